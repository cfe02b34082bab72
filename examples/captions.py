"""Captions of all images of a folder, several at a time, as lines of JSON.

    python examples/captions.py examples --output captions.jsonl

`vlmserve batch` does the same with a progress bar, and resumes after an interruption.
"""

import argparse
import asyncio
import base64
import json
import mimetypes
import sys
from pathlib import Path

from openai import AsyncOpenAI


def data_url(path: Path) -> str:
    kind = mimetypes.guess_type(path)[0]
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


async def caption(client: AsyncOpenAI, model: str, path: Path, places: asyncio.Semaphore) -> dict[str, str]:
    image = {"type": "image_url", "image_url": {"url": data_url(path)}}
    content = [image, {"type": "text", "text": "Describe the image."}]
    async with places:
        answer = await client.chat.completions.create(
            model=model, temperature=0, messages=[{"role": "user", "content": content}]
        )
    return {"file": path.name, "caption": answer.choices[0].message.content or ""}


async def captions(client: AsyncOpenAI, model: str, paths: list[Path], at_once: int) -> list[dict[str, str]]:
    places = asyncio.Semaphore(at_once)  # the server makes batches of what comes at the same time
    return await asyncio.gather(*(caption(client, model, path, places) for path in paths))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pixie")
    given = parser.parse_args(arguments)
    images = sorted(
        path for path in given.folder.iterdir() if path.suffix.lower() in {".png", ".jpg", ".jpeg", ".webp"}
    )
    client = AsyncOpenAI(base_url=given.url, api_key="unused")
    rows = asyncio.run(captions(client, given.model, images, given.at_once))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if given.output is None:
        sys.stdout.write(lines)
    else:
        given.output.write_text(lines, "utf-8")


if __name__ == "__main__":
    main()

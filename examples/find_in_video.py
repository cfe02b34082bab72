"""When something is to be seen in a video: a question about one frame of each second, several at a time.

    python examples/find_in_video.py docs/images/circles.gif "What colour is the circle?" red

Animated GIF and WebP need nothing else; other files need PyAV (pip install 'vlmserve[video]'). Models that take videos
answer questions about a whole one, with a part {"type": "video_url", ...}.
"""

import argparse
import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import OpenAI
from PIL import Image, ImageSequence


def frames(path: Path) -> Iterator[tuple[float, Image.Image]]:
    """All frames, each with its time in seconds."""
    if path.suffix.lower() in {".gif", ".webp"}:
        time = 0.0
        with Image.open(path) as file:
            for frame in ImageSequence.Iterator(file):
                yield time, frame.convert("RGB")
                time += frame.info.get("duration", 100) / 1000
        return
    import av

    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            yield frame.time, frame.to_image()


def sampled(path: Path, every: float) -> Iterator[tuple[float, Image.Image]]:
    wanted = 0.0
    for time, frame in frames(path):
        if time >= wanted:
            yield time, frame
            wanted = time + every


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("video", type=Path)
    parser.add_argument("question")
    parser.add_argument("answer", help="the word that is searched for in answers")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between frames")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pixie")
    given = parser.parse_args(arguments)
    client = OpenAI(base_url=given.url, api_key="unused")

    def ask(moment: tuple[float, Image.Image]) -> tuple[float, str]:
        file = io.BytesIO()
        moment[1].save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": given.question}]
        answer = client.chat.completions.create(
            model=given.model, temperature=0, max_tokens=32, messages=[{"role": "user", "content": content}]
        )
        return moment[0], answer.choices[0].message.content or ""

    with ThreadPoolExecutor(8) as pool:
        for time, text in pool.map(ask, sampled(given.video, given.every)):
            if given.answer.lower() in text.lower().split():
                print(f"{time:.1f} s: {text}")


if __name__ == "__main__":
    main()

"""Several questions about one image: the server computes the image once, and so does a cluster, which sends a prompt to
the worker that has its image and its beginning.

    vlmserve cluster up --workers 2 --port 8000
    python examples/shared_image.py examples/shapes.png "What colour is the circle?" "How many shapes are there?"
"""

import argparse
import base64
from pathlib import Path

from openai import OpenAI


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pixie")
    given = parser.parse_args(arguments)
    client = OpenAI(base_url=given.url, api_key="unused")
    encoded = base64.b64encode(given.image.read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    for question in given.questions:
        content = [image, {"type": "text", "text": question}]  # what is shared comes first
        answer = client.chat.completions.create(
            model=given.model, temperature=0, messages=[{"role": "user", "content": content}]
        )
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        print(
            f"{answer.choices[0].message.content} ({cached} of {usage.prompt_tokens} tokens of the prompt were cached)"
        )


if __name__ == "__main__":
    main()

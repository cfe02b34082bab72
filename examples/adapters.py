"""A LoRA adapter for each customer: the name of the model chooses it, and all are computed in one batch.

vlmserve serve pixie --enable-lora --lora-modules corners=pixie/corners
python examples/adapters.py examples/shapes.png "How many corners does the triangle have?"
"""

import argparse
import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import OpenAI


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    given = parser.parse_args(arguments)
    client = OpenAI(base_url=given.url, api_key="unused")
    encoded = base64.b64encode(given.image.read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        {"type": "text", "text": given.question},
    ]

    def ask(model: str) -> str:
        answer = client.chat.completions.create(
            model=model, temperature=0, messages=[{"role": "user", "content": content}]
        )
        return answer.choices[0].message.content or ""

    models = [model.id for model in client.models.list()]  # the model, then its adapters
    with ThreadPoolExecutor(len(models)) as pool:
        for model, text in zip(models, pool.map(ask, models), strict=True):
            print(f"{model}: {text}")


if __name__ == "__main__":
    main()

"""Fields of an image as JSON that fits a class, each with its probability: a person checks the doubtful ones.

python examples/fields.py examples/shapes.png
"""

import argparse
import base64
from pathlib import Path
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

Colour = Literal["red", "green", "blue", "yellow"]


class Shapes(BaseModel):
    """The fields to read. The server constrains its answer to this schema."""

    count: int = Field(ge=0, le=9)
    circle: Colour
    square: Colour


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("--check-below", type=float, default=0.9)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pixie")
    given = parser.parse_args(arguments)
    encoded = base64.b64encode(given.image.read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        {"type": "text", "text": "How many shapes are there? What colour is the circle? What colour is the square?"},
    ]
    answer = OpenAI(base_url=given.url, api_key="unused").chat.completions.parse(
        model=given.model,
        temperature=0,
        logprobs=True,
        messages=[{"role": "user", "content": content}],
        response_format=Shapes,
    )
    shapes = answer.choices[0].message.parsed
    probabilities = answer.choices[0].confidence  # vlmserve's extension of the answer
    for name, value in shapes.model_dump().items():
        mark = "  <- check this" if probabilities[name] < given.check_below else ""
        print(f"{name}: {value} ({probabilities[name]:.0%}){mark}")


if __name__ == "__main__":
    main()

"""vlmserve behind instructor: an answer as an instance of a class.

pip install instructor
python examples/instructor_fields.py examples/shapes.png
"""

import argparse
from pathlib import Path
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Circle(BaseModel):
    colour: Literal["red", "green", "blue", "yellow"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pixie")
    given = parser.parse_args(arguments)
    client = instructor.from_openai(OpenAI(base_url=given.url, api_key="unused"), mode=instructor.Mode.JSON_SCHEMA)
    image = instructor.Image.from_path(given.image)
    circle = client.chat.completions.create(
        model=given.model,
        temperature=0,
        response_model=Circle,
        messages=[{"role": "user", "content": [image, "What colour is the circle?"]}],
    )
    print(circle.colour)


if __name__ == "__main__":
    main()

"""An agent with a tool and an image: the model calls a function, gets what it returns, and answers.

    python examples/agent.py examples/shapes.png "How large is the circle?"

A small model has to be told that it is to call the tool; a larger one decides by itself with --tool-choice auto.
"""

import argparse
import base64
import json
from pathlib import Path

from openai import OpenAI
from PIL import Image, ImageColor

NAMES = ["red", "green", "blue", "yellow"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "share_of_colour",
            "description": "The share of the image's area that has a colour, in percent.",
            "parameters": {
                "type": "object",
                "properties": {"colour": {"enum": NAMES}},
                "required": ["colour"],
                "additionalProperties": False,
            },
        },
    }
]


def share_of_colour(path: Path, colour: str) -> float:
    wanted = ImageColor.getrgb(colour)
    pixels = Image.open(path).convert("RGB").get_flattened_data()
    near = sum(all(abs(a - b) < 80 for a, b in zip(pixel, wanted, strict=True)) for pixel in pixels)
    return round(100 * near / len(pixels), 1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("question")
    parser.add_argument("--steps", type=int, default=4, help="most calls of the model")
    parser.add_argument("--tool-choice", choices=["auto", "required"], default="required", help="of the first step")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pixie")
    given = parser.parse_args(arguments)
    client = OpenAI(base_url=given.url, api_key="unused")
    encoded = base64.b64encode(given.image.read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        {"type": "text", "text": given.question},
    ]
    messages: list = [{"role": "user", "content": content}]
    choice = given.tool_choice
    for _ in range(given.steps):
        message = client.chat.completions.create(
            model=given.model, temperature=0, max_tokens=64, messages=messages, tools=TOOLS, tool_choice=choice
        ).choices[0].message  # fmt: skip
        choice = "auto"
        if not message.tool_calls:
            print(message.content)
            return
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = share_of_colour(given.image, **json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) -> {result} %")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{result} %"})
    print("(no answer within the allowed steps)")


if __name__ == "__main__":
    main()

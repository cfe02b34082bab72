"""vlmserve behind Pydantic AI: an agent that looks at an image and answers with an instance of a class.

pip install 'pydantic-ai-slim[openai]'
python examples/pydantic_ai_agent.py examples/shapes.png
"""

import argparse
from pathlib import Path
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Circle(BaseModel):
    colour: Literal["red", "green", "blue", "yellow"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pixie")
    given = parser.parse_args(arguments)
    model = OpenAIChatModel(given.model, provider=OpenAIProvider(base_url=given.url, api_key="unused"))
    agent = Agent(model, output_type=NativeOutput(Circle), model_settings={"temperature": 0})
    image = BinaryContent(given.image.read_bytes(), media_type="image/png")
    print(agent.run_sync([image, "What colour is the circle?"]).output.colour)


if __name__ == "__main__":
    main()

"""OpenAI's Agents SDK, which uses the Responses API: a streamed answer about an image, and a tool call."""

import argparse
import asyncio
import base64
from pathlib import Path
from typing import Literal

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("image", type=Path)
parser.add_argument("--url", required=True)
parser.add_argument("--model", required=True)
given = parser.parse_args()


@function_tool
def note(colour: Literal["red", "green", "blue", "yellow"]) -> str:
    """Note a colour."""
    return f"noted {colour}"


async def main() -> None:
    set_tracing_disabled(True)
    model = OpenAIResponsesModel(given.model, AsyncOpenAI(base_url=given.url, api_key="unused"))
    url = f"data:image/png;base64,{base64.b64encode(given.image.read_bytes()).decode()}"
    parts = [
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": "What colour is the circle?"},
    ]
    question = [{"role": "user", "content": parts}]
    viewer = Agent(name="viewer", model=model, model_settings=ModelSettings(temperature=0))
    stream = Runner.run_streamed(viewer, question)
    events = [event async for event in stream.stream_events()]
    assert any(event.type == "raw_response_event" for event in events)

    settings = ModelSettings(temperature=0, tool_choice="required")
    caller = viewer.clone(tools=[note], model_settings=settings, tool_use_behavior="stop_on_first_tool")
    called = await Runner.run(caller, question)
    assert called.final_output.startswith("noted "), called
    print(stream.final_output)


asyncio.run(main())

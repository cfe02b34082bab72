"""Anthropic's SDK: a message about an image, its stream, its length in tokens, and a tool call."""

import argparse
import base64
from pathlib import Path

from anthropic import Anthropic

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("image", type=Path)
parser.add_argument("--url", required=True)
parser.add_argument("--model", required=True)
given = parser.parse_args()
client = Anthropic(base_url=given.url.removesuffix("/v1"), api_key="unused")
data = base64.b64encode(given.image.read_bytes()).decode()
content = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
    {"type": "text", "text": "What colour is the circle?"},
]
fields = {"model": given.model, "messages": [{"role": "user", "content": content}]}
limits = {"max_tokens": 4096, "extra_body": {"temperature": 0}}  # the SDK has no argument `temperature`

message = client.messages.create(**fields, **limits)
whole = message.content[0].text
with client.messages.stream(**fields, **limits) as stream:
    assert "".join(stream.text_stream) == whole
read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
assert client.messages.count_tokens(**fields).input_tokens == read, message.usage

schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
tool = {"name": "note", "description": "Note a colour", "input_schema": schema}
called = client.messages.create(**fields, **limits, tools=[tool], tool_choice={"type": "any"})
assert called.stop_reason == "tool_use", called
assert called.content[-1].input["colour"] in {"red", "blue"}, called
print(whole)

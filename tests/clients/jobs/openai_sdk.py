"""OpenAI's SDK: a chat completion, its stream, a parsed answer, a tool call, a response, embeddings, a decision."""

import argparse
import base64
from pathlib import Path
from typing import Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class Circle(BaseModel):
    colour: Literal["red", "green", "blue", "yellow"]


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("image", type=Path)
parser.add_argument("--url", required=True)
parser.add_argument("--model", required=True)
given = parser.parse_args()
client = OpenAI(base_url=given.url, api_key="unused")
url = f"data:image/png;base64,{base64.b64encode(given.image.read_bytes()).decode()}"
question = "What colour is the circle?"
parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
fields = {"model": given.model, "temperature": 0, "messages": [{"role": "user", "content": parts}]}

whole = client.chat.completions.create(**fields).choices[0].message.content
chunks = list(client.chat.completions.create(**fields, stream=True))
assert len(chunks) > 1
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole

parsed = client.chat.completions.parse(**fields, response_format=Circle).choices[0].message.parsed
assert isinstance(parsed, Circle), parsed

tools = [pydantic_function_tool(Circle)]
message = client.chat.completions.parse(**fields, tools=tools, tool_choice="required").choices[0].message
assert isinstance(message.tool_calls[0].function.parsed_arguments, Circle), message

shown = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": question}]
response = client.responses.create(model=given.model, temperature=0, input=[{"role": "user", "content": shown}])
assert response.output_text == whole, response

vectors = client.embeddings.create(model=given.model, input=["a red circle", "a blue square"], dimensions=16).data
assert [len(one.embedding) for one in vectors] == [16, 16]

question = {"type": "choice", "instructions": question, "choices": [{"value": "red"}, {"value": "blue"}]}
[decided] = client.decisions.create(
    model=given.model, input=[{"role": "user", "content": shown[:1]}], questions=[question]
).answers
assert abs(sum(one.probability for one in decided.probabilities) - 1) < 1e-6, decided
print(whole)

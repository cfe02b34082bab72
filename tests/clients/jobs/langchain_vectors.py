"""LangChain's embeddings of texts, and its decisions about a text, an image and a conversation."""

import argparse
import asyncio
import base64
from pathlib import Path

import numpy as np
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import OpenAIEmbeddings
from langchain_openai.decisions import Choice, Level, OpenAIDecisions, Predicate, Score
from openai import BadRequestError, OpenAI

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("image", type=Path)
parser.add_argument("--url", required=True)
parser.add_argument("--model", required=True)
given = parser.parse_args()

texts = ["a red circle", "a blue square"]
embeddings = OpenAIEmbeddings(model=given.model, base_url=given.url, api_key="unused", check_embedding_ctx_length=False)
expected = OpenAI(base_url=given.url, api_key="unused").embeddings.create(model=given.model, input=texts).data
for ours, theirs in zip(embeddings.embed_documents(texts), expected, strict=True):
    assert np.allclose(ours, theirs.embedding)
assert np.allclose(embeddings.embed_query(texts[0]), expected[0].embedding)

decisions = OpenAIDecisions(model=given.model, base_url=given.url, api_key="unused")
questions = {
    "colour": Choice(instructions="Which colour?", choices={"red": "like a rose", "blue": None}),
    "whole": Choice(instructions="Is it whole?", choices={True: None, False: None}),
    "round": Predicate(instructions="It is round"),
    "size": Score(instructions="How large is it?", levels=["small", Level(label="large", description="half of it")]),
}
data = base64.b64encode(given.image.read_bytes()).decode()
image = HumanMessage([{"type": "image", "base64": data, "mime_type": "image/png"}])
contents = ["A red circle", image, [SystemMessage("Be strict."), image, AIMessage("I see it.")], {"shapes": [1, None]}]
for content in contents:
    response = decisions.invoke({"input": content, "questions": questions})
    assert response.choices["colour"].choice in ("red", "blue"), response
    assert response.choices["whole"].choice in (True, False), response
    assert 0 < response.predicates["round"].probability < 1, response
    assert response.scores["size"].legend == {0: "small", 1: "large"}, response
    assert response.usage.input_tokens, response
    assert response.request_id, response
assert asyncio.run(decisions.ainvoke({"input": content, "questions": questions})).answers == response.answers
message = ""
try:
    decisions.invoke({"input": "A red circle", "questions": {"one": Choice(instructions="?", choices={"red": None})}})
except BadRequestError as error:
    message = str(error)
assert "questions[0].choices" in message
print("equal vectors")

"""LangChain's embeddings of texts, and its decisions."""

import argparse
from pathlib import Path

import numpy as np
from langchain_openai import OpenAIEmbeddings
from langchain_openai.decisions import Choice, OpenAIDecisions, Predicate
from openai import OpenAI

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
    "colour": Choice(instructions="Which colour?", choices={"red": "like a rose", "blue": "like the sky"}),
    "round": Predicate(instructions="It is round"),
}
response = decisions.invoke({"input": "A red circle", "questions": questions})
assert response.choices["colour"].choice in ("red", "blue"), response
assert 0 < response.predicates["round"].probability < 1, response
print("equal vectors")

"""Cohere's SDK: a ranking of documents, by both versions of its API."""

import argparse
import asyncio
from pathlib import Path

import cohere

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("image", type=Path)
parser.add_argument("--url", required=True)
parser.add_argument("--model", required=True)
given = parser.parse_args()

client = cohere.ClientV2(api_key="unused", base_url=given.url.removesuffix("/v1"))
documents = ["a red circle", "two blue squares", "a green star"]
answer = client.rerank(model=given.model, query="red", documents=documents, top_n=2)
scores = [one.relevance_score for one in answer.results]
assert len(scores) == 2, answer
assert 1 >= scores[0] >= scores[1] >= 0, answer
again = asyncio.run(
    cohere.AsyncClientV2(api_key="unused", base_url=given.url.removesuffix("/v1")).rerank(
        model=given.model, query="red", documents=documents
    )
)
assert [one.index for one in again.results[:2]] == [one.index for one in answer.results], again
old = cohere.Client(api_key="unused", base_url=given.url.removesuffix("/v1"))
[best] = old.rerank(model=given.model, query="red", documents=documents, top_n=1, return_documents=True).results
assert best.document.text == documents[answer.results[0].index], best
message = ""
try:
    client.rerank(model=given.model, query="red", documents=[])
except cohere.BadRequestError as error:
    message = str(error)
assert "documents must not be empty" in message
print("ranked")

"""Cohere's SDK: a ranking of documents."""

import argparse
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
print("ranked")

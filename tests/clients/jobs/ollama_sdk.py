"""Ollama's client: a chat about an image, and embeddings."""

import argparse
from pathlib import Path

import ollama

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("image", type=Path)
parser.add_argument("--url", required=True)
parser.add_argument("--model", required=True)
given = parser.parse_args()

client = ollama.Client(given.url.removesuffix("/v1"))
question = {"role": "user", "content": "What colour is the circle?", "images": [given.image.read_bytes()]}
vectors = client.embed(given.model, ["a red circle", "a blue square"]).embeddings
assert len(vectors) == 2
assert vectors[0] != vectors[1]
assert client.embeddings(given.model, "a red circle").embedding == vectors[0]
print(client.chat(given.model, [question], options={"temperature": 0}).message.content)

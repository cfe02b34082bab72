"""LlamaIndex's embeddings of texts."""

import argparse
from pathlib import Path

from llama_index.embeddings.openai_like import OpenAILikeEmbedding

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("image", type=Path)
parser.add_argument("--url", required=True)
parser.add_argument("--model", required=True)
given = parser.parse_args()

model = OpenAILikeEmbedding(model_name=given.model, api_base=given.url, api_key="unused")
first, other, same = model.get_text_embedding_batch(["a red circle", "a blue square", "a red circle"])
assert first == same != other
assert abs(sum(value * value for value in model.get_query_embedding("a")) - 1) < 1e-5
print("equal vectors")

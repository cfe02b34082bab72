"""LlamaIndex: embeddings of texts, a search that Cohere's postprocessor reranks, a chat about an image."""

import argparse
import asyncio
from pathlib import Path

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from llama_index.postprocessor.cohere_rerank import CohereRerank

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("image", type=Path)
parser.add_argument("--url", required=True)
parser.add_argument("--model", required=True)
given = parser.parse_args()

model = OpenAILikeEmbedding(model_name=given.model, api_base=given.url, api_key="unused")
first, other, same = model.get_text_embedding_batch(["a red circle", "a blue square", "a red circle"])
assert first == same != other
assert abs(sum(value * value for value in model.get_query_embedding("a")) - 1) < 1e-5
assert asyncio.run(model.aget_text_embedding("a red circle")) == first

texts = ["a red circle", "two blue squares", "a green star"]
index = VectorStoreIndex.from_documents([Document(text=text) for text in texts], embed_model=model)
found = index.as_retriever(similarity_top_k=3).retrieve("red")
assert {one.text for one in found} == set(texts), found
rerank = CohereRerank(api_key="unused", model=given.model, base_url=given.url.removesuffix("/v1"), top_n=2)
best, second = rerank.postprocess_nodes(found, query_str="red")
assert 1 >= best.score >= second.score >= 0, (best, second)

llm = OpenAILike(model=given.model, api_base=given.url, api_key="unused", is_chat_model=True, temperature=0)
blocks = [ImageBlock(path=given.image), TextBlock(text="What colour is the circle?")]
assert "red" in llm.chat([ChatMessage(role="user", blocks=blocks)]).message.content
print("equal vectors")

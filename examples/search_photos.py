"""Find photos by a text: vectors of photos in a Qdrant store, and the first ten hits reranked.

Needs: pip install openai qdrant-client
"""

import argparse
import base64
import uuid
from pathlib import Path
from typing import Any

from openai import OpenAI
from qdrant_client import QdrantClient
from qdrant_client.models import Distance, PointStruct, VectorParams

PHOTOS = "photos"
FORMATS = (".jpg", ".jpeg", ".png", ".webp")
FIRST = 10
"""Hits that the model looks at again."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("photos", type=Path, help="a folder, or one photo")
    parser.add_argument("query", help="what to find")
    parser.add_argument("--store", default=":memory:", help="folder that keeps the vectors; default: in memory")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pixie")
    given = parser.parse_args(arguments)
    client = OpenAI(base_url=given.url, api_key="none")
    store = QdrantClient(":memory:") if given.store == ":memory:" else QdrantClient(path=given.store)
    paths = sorted(given.photos.iterdir()) if given.photos.is_dir() else [given.photos]
    add_photos(store, client, given.model, [path for path in paths if path.suffix.lower() in FORMATS])
    vector = client.embeddings.create(model=given.model, input=given.query).data[0].embedding
    hits = store.query_points(PHOTOS, query=vector, limit=FIRST, with_payload=True).points
    found = [Path(hit.payload["path"]) for hit in hits if hit.payload]
    body = {"model": given.model, "query": given.query, "documents": [{"image": data_url(path)} for path in found]}
    ranked: Any = client.post("/rerank", body=body, cast_to=object)
    for one in ranked["results"]:
        print(f"{one['relevance_score']:.3f}  {found[one['index']].name}")


def add_photos(store: QdrantClient, client: OpenAI, model: str, paths: list[Path]) -> None:
    """Store the vectors of photos that have none yet."""
    for path in paths:
        key = str(uuid.uuid5(uuid.NAMESPACE_URL, path.resolve().as_uri()))
        if store.collection_exists(PHOTOS) and store.retrieve(PHOTOS, [key]):
            continue
        image = {"type": "image_url", "image_url": {"url": data_url(path)}}
        body = {"model": model, "messages": [{"role": "user", "content": [image]}]}
        answer: Any = client.post("/embeddings", body=body, cast_to=object)
        vector = answer["data"][0]["embedding"]
        if not store.collection_exists(PHOTOS):
            store.create_collection(PHOTOS, VectorParams(size=len(vector), distance=Distance.COSINE))
        store.upsert(PHOTOS, [PointStruct(id=key, vector=vector, payload={"path": str(path)})])


def data_url(path: Path) -> str:
    return f"data:image/x;base64,{base64.b64encode(path.read_bytes()).decode()}"


if __name__ == "__main__":
    main()

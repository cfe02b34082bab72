"""Photos of a folder that show the same product: the server describes each, and similar descriptions, by their
embeddings, are one group.

    llama-server -m embedding-model.gguf --embeddings --port 8081
    python examples/duplicates.py photos --embeddings-url http://127.0.0.1:8081/v1

vlmserve computes no embeddings of texts, so they come from any server that has OpenAI's /v1/embeddings.
"""

import argparse
import base64
import mimetypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from openai import OpenAI


def describe(client: OpenAI, model: str, question: str, path: Path) -> str:
    encoded = base64.b64encode(path.read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:{mimetypes.guess_type(path)[0]};base64,{encoded}"}}
    answer = client.chat.completions.create(
        model=model,
        temperature=0,
        messages=[{"role": "user", "content": [image, {"type": "text", "text": question}]}],
    )
    return answer.choices[0].message.content or ""


def embed(client: OpenAI, model: str, texts: list[str]) -> np.ndarray:
    """Unit vectors, a row for each text."""
    found = client.embeddings.create(model=model, input=texts, encoding_format="float")
    vectors = np.array([one.embedding for one in found.data])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def group(vectors: np.ndarray, threshold: float) -> list[list[int]]:
    """Rows in groups: who is similar to one of a group belongs to it."""
    groups: list[list[int]] = []
    for row, similar in enumerate(vectors @ vectors.T >= threshold):
        touched = [one for one in groups if any(similar[other] for other in one)]
        groups = [one for one in groups if one not in touched]
        groups.append([*(other for one in touched for other in one), row])
    return groups


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--question", default="Describe the image.")
    parser.add_argument("--threshold", type=float, default=0.95, help="the cosine from which two are the same")
    parser.add_argument("--embeddings-url", default="http://127.0.0.1:8081/v1")
    parser.add_argument("--embeddings-model", default="default")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pixie")
    given = parser.parse_args(arguments)
    images = sorted(
        path for path in given.folder.iterdir() if path.suffix.lower() in {".png", ".jpg", ".jpeg", ".webp"}
    )
    client = OpenAI(base_url=given.url, api_key="unused")
    with ThreadPoolExecutor(16) as threads:  # the server makes batches of what comes at the same time
        texts = list(threads.map(lambda path: describe(client, given.model, given.question, path), images))
    vectors = embed(OpenAI(base_url=given.embeddings_url, api_key="unused"), given.embeddings_model, texts)
    for rows in group(vectors, given.threshold):
        if len(rows) > 1:
            print(f"{', '.join(images[row].name for row in sorted(rows))}: {texts[rows[0]]}")


if __name__ == "__main__":
    main()

"""Photos of a folder that show the same product: the server describes each, and similar descriptions, by their
embeddings, are one group.

    python examples/duplicates.py photos

An embedding is a count of the description's words, unless a server with OpenAI's /v1/embeddings computes better ones,
which know that two words mean the same:

    llama-server -m embedding-model.gguf --embeddings --port 8081
    python examples/duplicates.py photos --embeddings-url http://127.0.0.1:8081/v1
"""

import argparse
import base64
import mimetypes
import re
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


def counted_words(texts: list[str]) -> np.ndarray:
    """How often each word of all texts is in each of them, a row for each text."""
    split = [re.findall(r"\w+", text.lower()) for text in texts]
    words = sorted({word for text in split for word in text})
    return np.array([[text.count(word) for word in words] for text in split])


def embed(url: str, model: str, texts: list[str]) -> np.ndarray:
    """Return the server's embeddings, one row per text."""
    client = OpenAI(base_url=url, api_key="unused")
    found = client.embeddings.create(model=model, input=texts, encoding_format="float")
    return np.array([one.embedding for one in found.data])


def group(vectors: np.ndarray, threshold: float) -> list[list[int]]:
    """Rows in groups: who is similar to one of a group belongs to it."""
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-9)
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
    parser.add_argument("--threshold", type=float, default=0.95, help="lowest cosine of photos of one product")
    parser.add_argument("--embeddings-url", help="a server of embeddings; default: count words")
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
    if given.embeddings_url:
        vectors = embed(given.embeddings_url, given.embeddings_model, texts)
    else:
        vectors = counted_words(texts)
    for rows in group(vectors, given.threshold):
        if len(rows) > 1:
            print(f"{', '.join(images[row].name for row in sorted(rows))}: {texts[rows[0]]}")


if __name__ == "__main__":
    main()

"""Real engines behind a gateway."""

from __future__ import annotations

import base64
import io

import httpx
from PIL import Image, ImageDraw

from tests.scaleout.processes import Cluster
from vlmserve.config import BUILT_IN_MODEL

REAL = {"engine": "real", "num_threads": 1, "dtype": "float32", "kv_cache_memory": 64 * 1024**2}
QUESTIONS = ("What colour is the circle?", "How many shapes are there?", "Describe the image.", "What is this?")


def picture(number: int) -> str:
    """An image that no other number has."""
    image = Image.new("RGB", (64, 64), (number * 37 % 256, number * 91 % 256, number * 53 % 256))
    ImageDraw.Draw(image).ellipse((10 + number % 20, 10, 50, 50), "red")
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def ask(url: str, image: int, question: str) -> dict:
    content = [{"type": "image_url", "image_url": {"url": picture(image)}}, {"type": "text", "text": question}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def hits(workers: int) -> tuple[int, int, list[str]]:
    """Of a workload in which every image is asked about twice, a while apart: images that were cached, prompt tokens
    that were, and the answers."""
    with Cluster(BUILT_IN_MODEL, workers, engine=REAL, server={"served_model_name": ()}) as cluster:
        images = tokens = 0
        texts = []
        for turn in range(40):
            image = turn if turn % 4 < 2 else turn - 2
            answer = ask(cluster.url, image, QUESTIONS[turn % 4])
            details = answer["usage"]["prompt_tokens_details"]
            images += details["images"] - details["images_encoded"]
            tokens += details["cached_tokens"]
            texts.append(answer["choices"][0]["message"]["content"])
        return images, tokens, texts


def test_two_workers_find_what_one_engine_finds():
    one, two = hits(1), hits(2)
    assert one[0] == 20
    assert two[0] >= 0.95 * one[0]
    assert two[1] >= 0.95 * one[1]
    assert two[2] == one[2]

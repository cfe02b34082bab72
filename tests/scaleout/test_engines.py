"""Real engines behind a gateway: what they have cached, and adapters that one of them lacks."""

from __future__ import annotations

import base64
import io
import shutil
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from PIL import Image, ImageDraw

from tests.scaleout.processes import Cluster
from vlmserve.server.keys import add_key
from vlmserve.settings.config import BUILT_IN_MODEL

ENGINE = {
    "engine": "real", "num_threads": 1, "dtype": "float32", "kv_cache_memory": 64 * 1024**2, "enable_lora": True,
}  # fmt: skip
WORKERS = ("worker-0", "worker-1")
QUESTIONS = ("What colour is the circle?", "How many shapes are there?", "Describe the image.", "What is this?")
CORNERS = "How many corners do the shapes have?"


class Served:
    """Two workers with pixie, and keys of an admin and of a user."""

    def __init__(self, cluster: Cluster, keys: dict[str, str]) -> None:
        self.cluster, self._keys = cluster, keys

    def post(self, path: str, key: str = "admin", **body) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._keys[key]}"}
        return httpx.post(self.cluster.url + path, json=body, headers=headers, timeout=60)

    def load(self, name: str, path: str, **fields) -> httpx.Response:
        return self.post("/v1/load_lora_adapter", lora_name=name, lora_path=path, **fields)

    def ask(self, model: str, question: str = CORNERS, image: int = 0, **fields) -> httpx.Response:
        content = [{"type": "image_url", "image_url": {"url": picture(image)}}, {"type": "text", "text": question}]
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8, **fields}
        return self.post("/v1/chat/completions", "user", model=model, logprobs=True, **body)

    def logprobs(self, model: str, question: str = CORNERS) -> list[float]:
        """Of an answer's tokens, which tell a model and its adapters apart."""
        answer = self.ask(model, question)
        assert answer.status_code == 200, answer.text
        return [token["logprob"] for token in answer.json()["choices"][0]["logprobs"]["content"]]

    def models(self) -> dict[str, dict]:
        headers = {"Authorization": f"Bearer {self._keys['user']}"}
        return {card["id"]: card for card in httpx.get(f"{self.cluster.url}/v1/models", headers=headers).json()["data"]}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    base = tmp_path_factory.mktemp("engines")
    adapter = Path(str(files("vlmserve.pixie") / "adapters" / "corners"))
    for folder in ("worker-0/files/both", "worker-1/files/both", "worker-1/files/one"):
        shutil.copytree(adapter, base / folder)
    keys = {name: add_key(base / "keys", name, admin=admin) for name, admin in (("user", False), ("admin", True))}
    settings = {
        "engine": ENGINE,
        "server": {"served_model_name": ()},
        "front": {"api_keys_file": str(base / "keys")},
        "own": {worker: {"lora_folder": str(base / worker)} for worker in WORKERS},
    }
    with Cluster(BUILT_IN_MODEL, 2, in_threads=False, **settings) as cluster:
        yield Served(cluster, keys)


def picture(number: int) -> str:
    """An image that no other number has."""
    image = Image.new("RGB", (64, 64), (number * 37 % 256, number * 91 % 256, number * 53 % 256))
    ImageDraw.Draw(image).ellipse((10 + number % 20, 10, 50, 50), "red")
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def hits(served: Served, workers: int) -> tuple[int, int, list[str]]:
    """Of a workload in which every image is asked about twice, a while apart, to the first workers: images that were
    cached, prompt tokens that were, and the answers. Nothing is shared with other numbers of workers."""
    served.cluster.tell(workers)
    served.cluster.wait_for(workers)
    images = tokens = 0
    texts = []
    for turn in range(24):
        image = turn if turn % 4 < 2 else turn - 2
        answer = served.ask(BUILT_IN_MODEL, QUESTIONS[turn % 4], image, cache_salt=f"{workers} workers")
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"]["prompt_tokens_details"]
        images += details["images"] - details["images_encoded"]
        tokens += details["cached_tokens"]
        texts.append(answer.json()["choices"][0]["message"]["content"])
    return images, tokens, texts


def test_two_workers_find_what_one_engine_finds(served):
    one, two = hits(served, 1), hits(served, 2)
    assert one[0] == 12
    assert two[0] >= 0.95 * one[0]
    assert two[1] >= 0.95 * one[1]
    assert two[2] == one[2]
    assert served.cluster.requests("worker-1") > 0


def test_all_workers_load_an_adapter_and_unload_it(served):
    assert served.ask("poems").status_code == 404
    answer = served.load("poems", "files/both", model=BUILT_IN_MODEL)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'poems' added successfully.")
    assert served.models()["poems"]["parent"] == BUILT_IN_MODEL
    assert served.logprobs("poems") != served.logprobs(BUILT_IN_MODEL)
    again = served.load("poems", "files/both")
    assert again.status_code == 400
    assert again.json()["workers"].keys() == set(WORKERS)
    assert served.load("poems", "files/both", load_inplace=True).status_code == 200
    assert served.post("/v1/unload_lora_adapter", lora_name="poems").status_code == 200
    assert served.ask("poems").status_code == 404
    assert served.post("/v1/unload_lora_adapter", lora_name="poems").status_code == 404


def test_requests_go_to_workers_with_the_adapter(served):
    answer = served.load("sql", "files/one")
    assert answer.status_code == 400
    body = answer.json()
    assert body["error"]["code"] == "workers_failed"
    assert body["workers"]["worker-1"] == "ok"
    assert "worker-0: " + body["workers"]["worker-0"] in body["error"]["message"]
    assert "sql" in served.models()
    before = [served.cluster.requests(worker) for worker in WORKERS]
    for question in QUESTIONS:
        assert served.ask("sql", question).status_code == 200
    assert [served.cluster.requests(worker) for worker in WORKERS] == [before[0], before[1] + len(QUESTIONS)]


@pytest.mark.parametrize(
    ("key", "body", "status", "words"),
    [
        ("user", {"lora_name": "x", "lora_path": "files/both"}, 403, "may not change the server"),
        ("admin", {"lora_name": "x", "lora_path": "files/both", "model": "other"}, 404, "'other'"),
        ("admin", {"lora_name": "x"}, 400, "lora_path"),
        ("admin", {"lora_name": "x", "lora_path": "../outside"}, 400, "not inside the folder"),
    ],
)
def test_what_cannot_be_loaded_is_refused_kindly(served, key, body, status, words):
    answer = served.post("/v1/load_lora_adapter", key, **body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert "x" not in served.models()

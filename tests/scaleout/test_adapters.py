"""Adapters behind a gateway: two workers with a small model, of which one has an adapter that the other lacks."""

from __future__ import annotations

import httpx
import pytest

from tests.adapters.test_serving import write_adapter
from tests.checkpoints import make_llama
from tests.scaleout.processes import Cluster
from vlmserve.server.keys import add_key

ENGINE = {
    "engine": "real", "dtype": "float32", "device": "cpu", "kv_cache_memory": "8MiB", "num_threads": 1,
    "enable_lora": True, "max_lora_rank": 4,
}  # fmt: skip


class Served:
    """A cluster, and keys of an admin and of a user."""

    def __init__(self, cluster: Cluster, keys: dict[str, str]) -> None:
        self.cluster, self._keys = cluster, keys

    def post(self, path: str, key: str = "admin", **body) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._keys[key]}"}
        return httpx.post(self.cluster.url + path, json=body, headers=headers, timeout=60)

    def load(self, name: str, path: str, **fields) -> httpx.Response:
        return self.post("/v1/load_lora_adapter", lora_name=name, lora_path=path, **fields)

    def unload(self, name: str) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", lora_name=name)

    def ask(self, model: str, prompt: str = "one two") -> httpx.Response:
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 8, "logprobs": 1}
        return self.post("/v1/completions", "user", **body)

    def tokens(self, model: str, prompt: str = "one two") -> list[str]:
        answer = self.ask(model, prompt)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["logprobs"]["tokens"]

    def models(self) -> dict[str, dict]:
        headers = {"Authorization": f"Bearer {self._keys['user']}"}
        return {card["id"]: card for card in httpx.get(f"{self.cluster.url}/v1/models", headers=headers).json()["data"]}

    def requests(self, worker: str) -> float:
        prefix = f'vlmserve:gateway_requests_total{{worker="{worker}"}} '
        page = httpx.get(f"{self.cluster.url}/metrics", timeout=20).text.splitlines()
        return sum(float(line.removeprefix(prefix)) for line in page if line.startswith(prefix))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    base = tmp_path_factory.mktemp("adapters")
    checkpoint = make_llama(base / "llama", max_position_embeddings=512)
    for worker in ("worker-0", "worker-1"):
        write_adapter(base / worker / "files" / "both", 1)
    write_adapter(base / "worker-1" / "files" / "one", 2)
    keys = {name: add_key(base / "keys", name, admin=admin) for name, admin in (("user", False), ("admin", True))}
    own = {worker: {"lora_folder": str(base / worker)} for worker in ("worker-0", "worker-1")}
    with Cluster(checkpoint, 2, engine=ENGINE, front={"api_keys_file": str(base / "keys")}, own=own) as cluster:
        yield Served(cluster, keys)


def test_all_workers_load_an_adapter_and_unload_it(served):
    assert served.ask("poems").status_code == 404
    answer = served.load("poems", "files/both", model="tiny")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'poems' added successfully.")
    assert served.models()["poems"]["parent"] == "tiny"
    assert served.tokens("poems") != served.tokens("tiny")
    before = [served.requests(worker) for worker in ("worker-0", "worker-1")]
    expected = served.tokens("poems", "three")
    assert all(served.tokens("poems", "three") == expected for _ in range(3))
    assert sum(served.requests(worker) for worker in ("worker-0", "worker-1")) == sum(before) + 4
    again = served.load("poems", "files/both")
    assert again.status_code == 400
    assert again.json()["workers"].keys() == {"worker-0", "worker-1"}
    assert served.load("poems", "files/both", load_inplace=True).status_code == 200
    assert served.unload("poems").status_code == 200
    assert served.ask("poems").status_code == 404
    assert served.unload("poems").status_code == 404


def test_requests_go_to_the_workers_that_have_the_adapter(served):
    answer = served.load("sql", "files/one")
    assert answer.status_code == 400
    body = answer.json()
    assert body["error"]["code"] == "workers_failed"
    assert body["workers"]["worker-1"] == "ok"
    assert "worker-0: " + body["workers"]["worker-0"] in body["error"]["message"]
    assert "sql" in served.models()
    before = served.requests("worker-0"), served.requests("worker-1")
    for number in range(6):
        served.tokens("sql", f"question {number}")
    assert (served.requests("worker-0"), served.requests("worker-1")) == (before[0], before[1] + 6)


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

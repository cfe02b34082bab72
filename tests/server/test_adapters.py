"""Adapters over HTTP: named by requests, listed, loaded and unloaded by admins, and found in a folder."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.adapters.test_serving import write_adapter
from tests.checkpoints import make_llama
from tests.server.live import QUESTION, LiveServer
from tests.waiting import wait_until
from vlmserve.frontend.engine_calls import EngineCalls
from vlmserve.server.keys import add_key
from vlmserve.types import AdapterInfo

ENGINE = {
    "engine": "real", "dtype": "float32", "device": "cpu", "kv_cache_memory": "8MiB", "num_threads": 1,
    "enable_lora": True, "max_lora_rank": 4,
}  # fmt: skip


class Served:
    """A server with adapters. headers: of a key that may change them."""

    def __init__(self, live: LiveServer, folder: Path, keys: dict[str, str]) -> None:
        self.live, self.folder, self.keys = live, folder, keys

    def post(self, path: str, key: str = "admin", **body) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.keys[key]}"}
        return httpx.post(self.live.url + path, json=body, headers=headers, timeout=60)

    def ask(self, model: str) -> str:
        response = self.post(
            "/v1/chat/completions", "user", model=model, messages=QUESTION, temperature=0, max_tokens=8, logprobs=True
        )
        assert response.status_code == 200, response.text
        assert response.json()["model"] == model
        return str([token["token"] for token in response.json()["choices"][0]["logprobs"]["content"]])

    def card(self, model: str) -> dict:
        headers = {"Authorization": f"Bearer {self.keys['user']}"}
        return httpx.get(f"{self.live.url}/v1/models/{model}", headers=headers).json()

    def models(self) -> dict[str, dict]:
        headers = {"Authorization": f"Bearer {self.keys['user']}"}
        return {card["id"]: card for card in httpx.get(f"{self.live.url}/v1/models", headers=headers).json()["data"]}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    base = tmp_path_factory.mktemp("served")
    checkpoint = make_llama(base / "llama", max_position_embeddings=2048)
    for number in range(3):
        write_adapter(base / "allowed" / f"adapter-{number}", number)
    write_mixture(base / "allowed" / "mixed")
    write_adapter(base / "outside", 9)
    write_adapter(base / "fixed", 8)
    (base / "allowed" / "link").symlink_to(base / "outside")
    write_adapter(base / "allowed" / "linked", 9)
    write_mixture(base / "allowed" / "linked-mixture")
    for weights in (
        base / "allowed" / "linked" / "adapter_model.safetensors",
        next((base / "allowed" / "linked-mixture").glob("*/adapter_model.safetensors")),
    ):
        weights.unlink()
        weights.symlink_to(base / "outside" / "adapter_model.safetensors")
    (base / "allowed" / "broken").mkdir()
    (base / "allowed" / "broken" / "adapter_config.json").write_text("{}")
    keys = {name: add_key(base / "keys", name, admin=admin) for name, admin in (("user", False), ("admin", True))}
    engine = {**ENGINE, "lora_modules": [f"fixed={base / 'fixed'}"]}
    server = {"lora_folder": str(base / "allowed"), "api_keys_file": str(base / "keys")}
    with LiveServer(checkpoint, engine=engine, server=server) as live:
        yield Served(live, base / "allowed", keys)


def test_model_names_an_adapter_of_settings_or_folder(served):
    found = {model: served.ask(model) for model in ("tiny", "fixed", "adapter-0", "adapter-1")}
    assert len(set(found.values())) == 4
    assert served.ask("adapter-0") == found["adapter-0"]
    cards = served.models()
    assert {"tiny", "fixed", "adapter-0", "adapter-1", "adapter-2", "broken"} <= cards.keys()
    assert "parent" not in cards["tiny"]
    assert cards["adapter-0"]["parent"] == "tiny"
    assert len(cards["adapter-0"]["root"]) == 64
    assert "root" not in cards["adapter-2"], "it was never loaded"


def test_admins_load_replace_and_unload(served):
    before = served.ask("adapter-0")
    assert served.post("/v1/load_lora_adapter", lora_name="mine", lora_path="adapter-0").status_code == 200
    assert served.ask("mine") == before
    again = {"lora_name": "mine", "lora_path": str(served.folder / "adapter-1")}
    assert "already" in served.post("/v1/load_lora_adapter", **again).json()["error"]["message"]
    assert served.post("/v1/load_lora_adapter", **again, load_inplace=True).status_code == 200
    assert served.ask("mine") != before
    assert served.post("/v1/unload_lora_adapter", lora_name="mine").status_code == 200
    assert served.post("/v1/chat/completions", model="mine", messages=QUESTION).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lora_name": "x", "lora_path": "../outside"}, 400, "not inside"),
        ({"lora_name": "x", "lora_path": "/etc"}, 400, "not inside"),
        ({"lora_name": "x", "lora_path": "link"}, 400, "not inside"),
        ({"lora_name": "x", "lora_path": "."}, 400, "not inside"),
        ({"lora_name": "x", "lora_path": "a\0b"}, 400, "null byte"),
        ({"lora_name": "x", "lora_path": "y" * 4000}, 400, "cannot be a path"),
        ({"lora_name": "x", "lora_path": "linked"}, 400, "links to outside"),
        ({"lora_name": "x", "lora_path": "nothing"}, 400, "no folder"),
        ({"lora_name": "x", "lora_path": "broken"}, 400, "it has no adapter_model.safetensors"),
        ({"lora_name": "tiny", "lora_path": "adapter-0"}, 400, "the model itself"),
        ({"lora_name": "", "lora_path": "adapter-0"}, 400, "printable"),
        ({"lora_name": "x"}, 400, "missing"),
    ],
)
def test_unloadable_adapter_is_rejected_and_changes_nothing(served, body, status, message):
    before = served.models().keys()
    response = served.post("/v1/load_lora_adapter", **body)
    assert response.status_code == status, response.text
    assert message in response.json()["error"]["message"]
    assert served.models().keys() == before


def test_other_keys_may_not_change_served_adapters(served):
    bodies = [("load", {"lora_name": "x", "lora_path": "adapter-0"}), ("unload", {"lora_name": "fixed"})]
    for path, body in [*bodies, ("unload", {"lora_name": "0", "mixture": "mixed"})]:
        response = served.post(f"/v1/{path}_lora_adapter", "user", **body)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "admin_key_needed")
    assert served.post("/v1/unload_lora_adapter", lora_name="nothing").status_code == 404


@pytest.mark.parametrize(
    "name", ["../outside", "..", ".", "link", "a/b", "adapter-0/", "x" * 5000, "nothing", "nothing:latest"]
)
def test_names_reach_nothing_outside_of_the_folder(served, name):
    response = served.post("/v1/chat/completions", model=name, messages=QUESTION)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_adapter_names_may_have_ollamas_tag(served):
    """As Ollama's list shows them."""
    for name in ("fixed", "adapter-0"):
        response = served.post("/v1/chat/completions", "user", model=f"{name}:latest", messages=QUESTION, max_tokens=1)
        assert (response.status_code, response.json().get("model")) == (200, name), response.text
        assert served.card(f"{name}:latest")["id"] == name


def test_broken_folder_adapter_fails_its_requests(served):
    response = served.post("/v1/chat/completions", model="broken", messages=QUESTION)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_adapter")
    assert served.ask("tiny")


@pytest.mark.parametrize("name", ["linked", "linked-mixture"])
def test_an_adapter_with_links_to_outside_is_rejected(served, name):
    response = served.post("/v1/chat/completions", model=name, messages=QUESTION)
    assert response.status_code == 400, response.text
    assert "links to outside" in response.json()["error"]["message"]


def test_failed_load_is_retried_only_for_new_files(served):
    """Reading files takes the engine's time, and every request may name them."""
    reads, load = [], EngineCalls.load_adapter
    broken = served.folder / "broken" / "adapter_config.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCalls, "load_adapter", lambda *args: (reads.append(1), load(*args))[1])
        for _ in range(3):
            assert served.post("/v1/chat/completions", model="broken", messages=QUESTION).status_code == 400
        assert len(reads) <= 1
        broken.write_text('{"r": 4}')
        assert served.post("/v1/chat/completions", model="broken", messages=QUESTION).status_code == 400
    assert 1 <= len(reads) <= 2
    broken.write_text("{}")


def test_the_folder_is_watched(served):
    """New files under the name are another adapter, half of them change nothing, and without files it is gone."""
    place = served.folder / "watched"
    write_adapter(place, 20)
    first = served.ask("watched")
    write_adapter(place, 21)
    wait_until(lambda: served.ask("watched") != first)
    second = served.ask("watched")
    (place / "adapter_model.safetensors").write_bytes(b"half")
    time.sleep(1.1)  # longer than between two looks at the files
    assert served.ask("watched") == second
    shutil.rmtree(place)

    def is_gone() -> bool:
        return served.post("/v1/chat/completions", model="watched", messages=QUESTION).status_code == 404

    wait_until(is_gone)


def test_an_engine_that_takes_over_has_the_adapters(served, monkeypatch):
    served.post("/v1/load_lora_adapter", lora_name="kept", lora_path="adapter-2")
    served.post("/v1/load_lora_adapter", lora_name="kept mixture", lora_path="mixed")
    for mixture in ("mixed", "kept mixture"):
        response = served.post("/v1/unload_lora_adapter", lora_name="0", mixture=mixture)
        assert response.status_code == 200, response.text
    names = ("kept", "kept mixture", "mixed")
    expected = [served.ask(name) for name in names]
    service = served.live.service
    load = service.client.calls.load_adapter

    async def load_slowly(name: str, path: str, pool: dict[str, str] | None) -> AdapterInfo:
        await asyncio.sleep(0.5)
        return await load(name, path, pool)

    monkeypatch.setattr(service.client.calls, "load_adapter", load_slowly)

    async def take_over() -> None:
        for name in names:
            await service.client.calls.unload_adapter(name)
        await load("fixed", str(served.folder.parent / "fixed"), None)
        service.replace(service.client)

    assert served.post("/v1/unload_lora_adapter", lora_name="fixed").status_code == 200
    asyncio.run_coroutine_threadsafe(take_over(), served.live.loop).result(60)
    assert "kept" in served.models()
    assert [served.ask(name) for name in names] == expected
    gone = served.post("/v1/chat/completions", model="fixed", messages=QUESTION)
    assert gone.status_code == 404, "a new engine comes with it, but it was unloaded"
    assert served.post("/v1/load_lora_adapter", lora_name="0", lora_path="mixed/0", mixture="mixed").status_code == 200


def write_mixture(folder: Path) -> None:
    """An X-LoRA checkpoint of two adapters."""
    for number in range(2):
        write_adapter(folder / str(number), 30 + number)
    adapters = {str(number): str(folder / str(number)) for number in range(2)}
    config = {"peft_type": "XLORA", "hidden_size": 48, "adapters": adapters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weight = torch.randn(2, 48, generator=torch.Generator().manual_seed(0))
    save_file({"internal_xlora_classifier.layers.0.weight": weight}, folder / "adapter_model.safetensors")


def test_admins_change_what_a_checkpoint_mixes(served):
    first = served.ask("mixed")
    root = served.models()["mixed"]["root"]
    assert served.models()["mixed"]["mixes"] == ["0", "1"]
    assert "mixes" not in served.models()["adapter-0"]
    one = {"lora_name": "1", "mixture": "mixed"}
    assert served.post("/v1/unload_lora_adapter", **one).status_code == 200
    assert served.models()["mixed"]["mixes"] == ["0"]
    second = served.ask("mixed")
    assert served.post("/v1/load_lora_adapter", **one, lora_path="mixed/1").status_code == 200
    assert (served.ask("mixed"), served.models()["mixed"]["root"]) == (first, root)
    again = served.post("/v1/load_lora_adapter", **one, lora_path="adapter-2")
    assert "already" in again.json()["error"]["message"]
    assert served.post("/v1/load_lora_adapter", **one, lora_path="adapter-2", load_inplace=True).status_code == 200
    assert len({first, second, served.ask("mixed")}) == 3
    assert served.post("/v1/load_lora_adapter", **one, lora_path="mixed/1", load_inplace=True).status_code == 200
    assert served.ask("mixed") == first


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("load", {"lora_name": "7", "lora_path": "adapter-0"}, 400, "no output for '7', only for 0, 1"),
        ("unload", {"lora_name": "7"}, 400, "mixes no adapter '7'"),
        ("unload", {"lora_name": "1", "mixture": "adapter-0"}, 400, "no X-LoRA checkpoint"),
        ("unload", {"lora_name": "1", "mixture": "tiny"}, 404, "no X-LoRA checkpoint"),
        ("load", {"lora_name": "1", "lora_path": "../outside", "load_inplace": True}, 400, "not inside"),
        ("load", {"lora_name": "1", "lora_path": "link", "load_inplace": True}, 400, "not inside"),
        ("load", {"lora_name": "1", "lora_path": "nothing", "load_inplace": True}, 400, "no folder with an adapter"),
        ("load", {"lora_name": "1", "lora_path": "broken", "load_inplace": True}, 400, "no adapter_model.safetensors"),
        ("load", {"lora_name": "1", "lora_path": "mixed", "load_inplace": True}, 400, "adapter"),
    ],
)
def test_unmixable_adapters_are_rejected_and_change_nothing(served, path, body, status, message):
    served.ask("mixed")
    served.ask("adapter-0")
    before = served.models()["mixed"]
    response = served.post(f"/v1/{path}_lora_adapter", **{"mixture": "mixed", **body})
    assert response.status_code == status, response.text
    assert message in response.json()["error"]["message"]
    assert served.models()["mixed"] == before


def test_metrics_count_adapters(served):
    served.ask("adapter-0")
    metrics = httpx.get(f"{served.live.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("vlmserve:lora"))
    by_name = {key.partition("{")[0]: float(value) for key, value in values.items()}
    assert by_name["vlmserve:lora_adapters_served"] >= 2
    assert by_name["vlmserve:lora_loads_total"] >= 2
    assert by_name["vlmserve:lora_memory_used_bytes"] > 0
    assert os.path.exists(served.folder)

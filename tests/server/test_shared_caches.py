"""Chats, decisions and embeddings find each other's images and prompts cached, unless salts or adapters differ."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.server.live import LiveServer
from tests.server.test_chat import about, data_url
from vlmserve.models.hub import resolve_model
from vlmserve.settings.config import BUILT_IN_MODEL

Ask = Callable[..., dict[str, Any]]
_NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def pixie(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The built-in model with two adapters: one of its decoder, one of its vision tower."""
    folder = tmp_path_factory.mktemp("adapters")
    decoder = _write_adapter(folder / "decoder", "language_model.layers.0.self_attn.v_proj", (128, 256))
    tower = _write_adapter(folder / "tower", "vision_tower.encoder.layers.0.self_attn.v_proj", (192, 192))
    engine = {
        "engine": "real", "kv_cache_memory": "32MiB", "num_threads": 1, "enable_lora": True,
        "lora_modules": [f"decoder={decoder}", f"tower={tower}"],
    }  # fmt: skip
    with LiveServer(resolve_model(BUILT_IN_MODEL), engine=engine) as server:
        yield server


def _write_adapter(folder: Path, layer: str, shape: tuple[int, int]) -> Path:
    folder.mkdir()
    random = torch.Generator().manual_seed(0)
    key = f"base_model.model.model.{layer}"
    save_file(
        {
            f"{key}.lora_A.weight": torch.randn(2, shape[1], generator=random),
            f"{key}.lora_B.weight": torch.randn(shape[0], 2, generator=random),
        },
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8}))
    return folder


@pytest.fixture
def url() -> str:
    """An image that no other test shows."""
    return data_url(f"#{next(_NUMBERS) * 6173 % 0xFFFFFF:06x}")


def _post(server: LiveServer, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(server.url + path, json={"model": "tiny", **fields}, timeout=60)
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    return usage


def _chat(server: LiveServer, url: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": about(url), "max_tokens": 1, **fields}
    details: dict[str, Any] = _post(server, "/v1/chat/completions", body)["prompt_tokens_details"]
    return details


def _decide(server: LiveServer, url: str, **fields: Any) -> dict[str, Any]:
    questions = [{"type": "predicate", "instructions": text} for text in ("It is red.", "There is a star.")]
    content = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
    body = {"input": content, "questions": questions, **fields}
    details: dict[str, Any] = _post(server, "/v1/decisions", body)["input_tokens_details"]
    return details


def _embed(server: LiveServer, url: str, **fields: Any) -> dict[str, Any]:
    details: dict[str, Any] = _post(server, "/v1/embeddings", {"messages": about(url), **fields})[
        "prompt_tokens_details"
    ]
    return details


ASKS = {"chat": _chat, "decide": _decide, "embed": _embed}
BEFORE_IMAGE = 16
"""Tokens before an image, which all prompts share."""


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(ASKS, 2)])
def test_tasks_share_images_and_their_tokens(pixie: LiveServer, url: str, first: str, second: str) -> None:
    assert ASKS[first](pixie, url)["images_encoded"] == 1
    again = ASKS[second](pixie, url)
    assert again["images_encoded"] == 0
    assert again["cached_tokens"] > BEFORE_IMAGE


@pytest.mark.parametrize("second", ["decide", "embed"])
def test_salts_and_adapters_separate_tasks(pixie: LiveServer, url: str, second: str) -> None:
    ask: Ask = ASKS[second]
    _chat(pixie, url)
    for fields in ({"cache_salt": "a"}, {"model": "tower"}):
        other = ask(pixie, url, **fields)
        assert other["images_encoded"] == 1, fields
        assert other["cached_tokens"] <= BEFORE_IMAGE
        assert ask(pixie, url, **fields)["cached_tokens"] > BEFORE_IMAGE
    other = ask(pixie, url, model="decoder")
    assert (other["images_encoded"], other["cached_tokens"] <= BEFORE_IMAGE) == (0, True), "its tower is the model's"

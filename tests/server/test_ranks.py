"""A model of two processes: the answers of one, and an engine that ends and comes back when a rank dies."""

from __future__ import annotations

import base64
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from tests.checkpoints import make_llava
from tests.media.images_for_tests import encoded, noise
from tests.server.test_run import Asking, ServerProcess, serving
from tests.server.test_supervision import is_ready, restarts
from tests.waiting import wait_until
from vlmserve import LLM, SamplingParams
from vlmserve.engine import ranks
from vlmserve.engine.ranks import RankProcesses
from vlmserve.errors import ConfigurationError, EngineDeadError, MissingWeightsError
from vlmserve.settings.config import EngineConfig

SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "16MiB"}
IMAGE = noise(40, 30)
PARTS: list[list[dict[str, Any]]] = [
    [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(encoded(IMAGE)).decode()}}],
    [],
]
CONVERSATIONS = [[{"role": "user", "content": [*parts, {"type": "text", "text": "What is there?"}]}] for parts in PARTS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("ranks"))


def answers(server: ServerProcess) -> list[str]:
    fields = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    bodies = [{"messages": conversation, **fields} for conversation in CONVERSATIONS]
    responses = [httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60) for body in bodies]
    return [response.json()["choices"][0]["message"]["content"] for response in responses]


def rank_of(server: ServerProcess) -> psutil.Process:
    [rank] = server.engine().children()
    return rank


def test_a_server_of_two_ranks(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [result.text for result in LLM(str(checkpoint), **SETTINGS).chat(CONVERSATIONS, params, use_tqdm=False)]
    assert expected[0] != expected[1]
    server_settings = {"restart_backoff": 1}
    settings = {**SETTINGS, "tensor_parallel_size": 2, "rank_timeout": 8}
    with serving(checkpoint, engine="real", server=server_settings, **settings) as server:
        assert answers(server) == expected
        assert 'ranks="2"' in server.metrics()
        assert 'process_resident_memory_bytes{model_name="ranks0",process="rank 1"}' in server.metrics()
        rank, engine = rank_of(server), server.engine()
        rank.kill()  # while nothing runs
        wait_until(lambda: restarts(server) == 1 and is_ready(server))
        assert not engine.is_running()
        assert answers(server) == expected
        rank, engine = rank_of(server), server.engine()
        asking = Asking(server.url, max_tokens=400)
        rank.send_signal(signal.SIGSTOP)
        asking.join(60)
        assert asking.error["code"] == "engine_dead"
        assert "rank 1 did not respond for" in asking.error["message"]
        wait_until(lambda: not engine.is_running() and not rank.is_running())


def test_later_processes_read_all_shards(checkpoint: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings = {**SETTINGS, "disk_cache": str(tmp_path), "block_size": 4}
    found = []
    for _ in range(2):
        llm = LLM(str(checkpoint), tensor_parallel_size=2, **settings)
        found.append(llm.chat(CONVERSATIONS, params, use_tqdm=False))
        llm.close()
    assert [one.text for one in found[0]] == [one.text for one in found[1]]
    assert [len(one.prompt_token_ids) - one.num_cached_tokens for one in found[1]] == [1, 1]


def test_stopped_rank_is_an_error_of_llm(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), tensor_parallel_size=2, rank_timeout=3, **SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    [rank] = [child for child in psutil.Process().children() if "vlmserve.engine.rank" in child.cmdline()]
    rank.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"rank 1 did not respond for \d+ s and was killed \(--rank-timeout\)"):
        llm.chat(CONVERSATIONS, params, use_tqdm=False)
    psutil.wait_procs([rank], 10)
    assert not rank.is_running()


def test_why_a_rank_cannot_start_is_said(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The rank says it before its process exits, which takes longer.
    monkeypatch.setattr(ranks, "GRACE", 0.02)
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    config = EngineConfig(model=str(tmp_path), tensor_parallel_size=2, **SETTINGS)
    begun: list[RankProcesses] = []

    def compute() -> None:
        begun.append(RankProcesses(config, tmp_path))
        with begun[0].explained():
            begun[0].ranks.sum(torch.ones(1))

    # Whether the rank ends before both have met, or later.
    with pytest.raises(MissingWeightsError, match=r"rank 1: .*safetensors"):
        compute()
    for processes in begun:
        with pytest.raises(EngineDeadError):
            processes.send([b""])


def test_unsupported_rank_features_are_rejected_before_start(checkpoint: Path) -> None:
    for wrong, words in [
        ({"enable_lora": True}, "--enable-lora"),
        ({"device": "cuda:0"}, "cuda|CUDA"),
        ({"model_impl": "transformers"}, "--model-impl transformers"),
    ]:
        with pytest.raises(ConfigurationError, match=words):
            LLM(str(checkpoint), tensor_parallel_size=2, **{**SETTINGS, **wrong})

"""Engines that start again with a disk cache: the same tokens, with little of the prompts computed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import state_fuzz
from tests.checkpoints import make_gemma3
from tests.disk_fuzz import Saboteur, Tally, fuzz
from tests.engine.test_gemma3 import CONVERSATIONS, GREEDY
from tests.engine.test_parity import NEW_TOKENS, Oracle, engine_for, generate, llava_oracle, mixed_prompts, tight_cache
from tests.waiting import wait_until
from vlmserve import LLM
from vlmserve.cache.tiers import Buffer, DiskTier
from vlmserve.engine.engine import Engine
from vlmserve.steps import Bytes
from vlmserve.types import EngineRequest, Prompt, SamplingParams

pytestmark = pytest.mark.usefixtures("native_kernels")

GREEDY_ANSWER = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return llava_oracle(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def prompts(llava: Oracle) -> list[Prompt]:
    return mixed_prompts(llava)


@pytest.fixture(scope="module")
def expected(llava: Oracle, prompts: list[Prompt]) -> list[list[int]]:
    return generate(engine_for(llava), prompts)


def restart(start: Callable[[], Engine], prompts: list[Prompt], expected: list[list[int]], folder: Path) -> Engine:
    """Start an engine with what another one has left on disk."""
    first = start()
    assert generate(first, prompts) == expected
    wait_until(lambda: first.stats().disk_queued_bytes == 0)
    assert [*folder.iterdir()]
    return start()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="batched"),
        pytest.param({"block_size": 4, "max_num_batched_tokens": 7}, id="chunked"),
        pytest.param({"kv_cache_dtype": "int8", "block_size": 5}, id="int8"),
    ],
)
def test_later_starts_compute_the_last_token_alone(
    llava: Oracle, prompts: list[Prompt], expected: list[list[int]], tmp_path: Path, settings: dict[str, Any]
) -> None:
    if "kv_cache_dtype" in settings:
        expected = generate(engine_for(llava, **settings), prompts)
    engine = restart(lambda: engine_for(llava, disk_cache=str(tmp_path), **settings), prompts, expected, tmp_path)
    assert generate(engine, prompts) == expected
    stats = engine.stats()
    assert stats.images_encoded == 0
    assert stats.prompt_tokens == len(prompts)
    assert generate(engine, prompts) == expected, "found in memory"
    assert engine.stats().disk_hits == stats.disk_hits


@pytest.mark.parametrize("max_num_batched_tokens", [5, 2048])
def test_embeddings_are_read_without_prefix_caching(
    llava: Oracle, prompts: list[Prompt], expected: list[list[int]], tmp_path: Path, max_num_batched_tokens: int
) -> None:
    settings: dict[str, Any] = {"enable_prefix_caching": False, "max_num_batched_tokens": max_num_batched_tokens}
    engine = restart(lambda: engine_for(llava, disk_cache=str(tmp_path), **settings), prompts, expected, tmp_path)
    assert generate(engine, prompts) == expected
    assert engine.stats().images_encoded == 0
    assert engine.stats().disk_hits > 0


def test_tokens_do_not_depend_on_preemption(
    llava: Oracle, prompts: list[Prompt], expected: list[list[int]], tmp_path: Path
) -> None:
    starts: list[Engine] = []

    def start() -> Engine:
        starts.append(tight_cache(llava, prompts, disk_cache=str(tmp_path)))
        return starts[-1]

    engine = restart(start, prompts, expected, tmp_path)
    for _ in range(2):
        assert generate(engine, prompts) == expected
    assert starts[0].stats().preemptions > 0


def test_broken_files_are_computed_again(
    llava: Oracle, prompts: list[Prompt], expected: list[list[int]], tmp_path: Path
) -> None:
    engine = restart(lambda: engine_for(llava, disk_cache=str(tmp_path)), prompts, expected, tmp_path)
    for path in tmp_path.glob("*.entry"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert generate(engine, prompts) == expected
    stats = engine.stats()
    assert stats.images_encoded > 0
    assert stats.disk_broken > 0
    assert stats.disk_hits == 0


def test_another_cache_type_finds_no_blocks(
    llava: Oracle, prompts: list[Prompt], expected: list[list[int]], tmp_path: Path
) -> None:
    kinds = iter(({}, {"kv_cache_dtype": "int8"}))
    engine = restart(lambda: engine_for(llava, disk_cache=str(tmp_path), **next(kinds)), prompts, expected, tmp_path)
    generate(engine, prompts)
    stats = engine.stats()
    assert stats.images_encoded == 0
    assert stats.prompt_tokens > len(prompts)


def test_other_code_finds_nothing(
    llava: Oracle,
    prompts: list[Prompt],
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = restart(lambda: engine_for(llava, disk_cache=str(tmp_path)), prompts[:1], expected[:1], tmp_path)
    monkeypatch.setattr("vlmserve.engine.disk.code_digest", lambda _: "edited")
    edited = engine_for(llava, disk_cache=str(tmp_path))
    for one in (engine, edited):
        assert generate(one, prompts[:1]) == expected[:1]
    assert engine.stats().disk_hits > 0
    assert edited.stats().disk_hits == 0


def test_windows_find_their_blocks(tmp_path: Path) -> None:

    model = str(make_gemma3(tmp_path / "model"))
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "16MiB", "block_size": 4}
    answers, cached = [], []
    for _ in range(2):
        llm = LLM(model, **settings, disk_cache=str(tmp_path / "disk"))
        found = llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
        answers.append([one.outputs[0].token_ids for one in found])
        cached.append([one.num_cached_tokens for one in found])
        wait_until(lambda llm=llm: llm.engine.stats().disk_queued_bytes == 0)
    assert answers[0] == answers[1]
    assert sum(cached[0]) < sum(cached[1])


@pytest.mark.parametrize(("family", "adapter"), [*((name, "") for name in state_fuzz.FAMILIES), ("qwen3_5", "mixed")])
def test_later_starts_read_states(tmp_path: Path, family: str, adapter: str) -> None:
    (tmp_path / "model").mkdir()
    model = state_fuzz.FAMILIES[family](tmp_path / "model")
    text = state_fuzz.Turn(Prompt([*range(10, 51), model.ends[0]]))
    prompts = [state_fuzz.joined([picture, text]) for picture in model.pictures]
    requests = [EngineRequest(str(i), one, GREEDY_ANSWER, adapter=adapter) for i, one in enumerate(prompts)]
    settings: dict[str, Any] = {"disk_cache": str(tmp_path / "disk"), "kv_cache_memory": "64MiB"}
    for start in range(2):
        engine = model.engine(**settings)
        for request in requests:
            engine.add(request)
        answers: dict[str, list[int]] = {}
        for output in state_fuzz.drain(engine):
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        assert answers == {request.request_id: model.expected(request).token_ids for request in requests}
        stats = engine.stats()
        if start:
            assert stats.images_encoded == 0
            assert stats.prompt_tokens == len(requests)
        wait_until(lambda engine=engine: engine.stats().disk_queued_bytes == 0)


def test_states_broken_at_random_change_no_answer(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model, disk = state_fuzz.FAMILIES["lfm2_vl"](tmp_path / "model"), tmp_path / "disk"
    tally = state_fuzz.Tally()
    for seed in (1, 2, 1):
        saboteur = Saboteur(disk, random.Random(seed))
        state_fuzz.fuzz(model, tally.finished + 10, seed, tally, state_fuzz.Disk(disk, 2**30, saboteur.act))
    assert tally.disk_hits > 0
    assert tally.different == []


def test_files_broken_at_random_change_no_answer(llava: Oracle, expected: list[list[int]], tmp_path: Path) -> None:
    tally = Tally()
    for seed in (0, 5):  # with room for all files
        fuzz(llava, tmp_path, 10, seed, tally, expected)
    assert tally.hits > 0
    Saboteur(tmp_path, random.Random(0)).break_all()
    fuzz(llava, tmp_path, 10, 6, tally, expected)
    assert tally.broken > 0
    assert tally.different == []


def test_other_requests_overtake_one_that_reads(
    llava: Oracle,
    prompts: list[Prompt],
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = restart(lambda: engine_for(llava, disk_cache=str(tmp_path)), prompts, expected, tmp_path)
    gate, read = threading.Event(), DiskTier.read

    def read_late(tier: DiskTier, key: bytes, size: int, *buffer: Buffer) -> Bytes | None:
        assert gate.wait(60)
        return read(tier, key, size, *buffer)

    monkeypatch.setattr(DiskTier, "read", read_late)
    engine.add(EngineRequest("known", prompts[0], GREEDY_ANSWER))
    engine.add(EngineRequest("new", Prompt([5, 6, 7]), GREEDY_ANSWER))
    answers: dict[str, list[int]] = {"known": [], "new": []}
    while engine.has_work():
        for output in engine.step():
            answers[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                assert gate.is_set() == (output.request_id == "known")
                gate.set()
    assert answers["known"] == expected[0]

"""Two ranks that start again with a disk cache. Each stores and reads its own shards of KV blocks."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vlmserve.engine.ranks
from tests.checkpoints import make_gemma3
from tests.disk_fuzz import Tally, fuzz
from tests.engine.test_disk_cache import GREEDY_ANSWER
from tests.engine.test_gemma3 import CONVERSATIONS, GREEDY
from tests.engine.test_parity import Oracle, engine_for, generate, llava_oracle, mixed_prompts
from tests.engine.test_qwen_vl import MIXED
from tests.engine.test_qwen_vl import make_oracle as make_qwen_vl
from tests.ranks import RankThreads
from tests.waiting import wait_until
from vlmserve import LLM
from vlmserve.cache.tiers import Buffer, DiskTier
from vlmserve.engine.engine import Engine
from vlmserve.steps import Bytes
from vlmserve.types import EngineRequest, Prompt

pytestmark = pytest.mark.usefixtures("native_kernels", "threads")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlmserve.engine.ranks, "RankProcesses", RankThreads)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return llava_oracle(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def prompts(llava: Oracle) -> list[Prompt]:
    return mixed_prompts(llava)


@pytest.fixture(scope="module")
def expected(llava: Oracle, prompts: list[Prompt]) -> list[list[int]]:
    return generate(engine_for(llava), prompts)


class Tiers:
    """The tiers of ranks, in the order of their first entries, which rank 0 has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: dict[DiskTier, list[bytes]] = {}
        self.gate = threading.Event()
        self.gate.set()
        store, read = DiskTier.store, DiskTier.read

        def note(tier: DiskTier, key: bytes, size: int, content: Callable[[], Bytes]) -> None:
            self.keys.setdefault(tier, []).append(key)
            store(tier, key, size, content)

        def read_late(tier: DiskTier, key: bytes, size: int | None, *buffer: Buffer) -> Bytes | None:
            assert size is not None or self.gate.wait(60), "rank 1 reads entries of unknown sizes"
            return read(tier, key, size, *buffer)

        monkeypatch.setattr(DiskTier, "store", note)
        monkeypatch.setattr(DiskTier, "read", read_late)

    def paths(self, rank: int) -> list[Path]:
        tier = [*self.keys][rank]
        return [tier.path(key) for key in self.keys[tier]]

    def wait(self) -> None:
        """Until all entries are written."""
        wait_until(lambda: all(path.exists() for rank in range(len(self.keys)) for path in self.paths(rank)))


@pytest.fixture
def tiers(monkeypatch: pytest.MonkeyPatch) -> Tiers:
    return Tiers(monkeypatch)


def start(llava: Oracle, folder: Path, **settings: Any) -> Engine:
    return engine_for(llava, disk_cache=str(folder), tensor_parallel_size=2, **settings)


def fill(llava: Oracle, folder: Path, prompts: list[Prompt], tiers: Tiers, **settings: Any) -> list[list[int]]:
    answers = generate(start(llava, folder, **settings), prompts)
    tiers.wait()
    return answers


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="batched"),
        pytest.param({"block_size": 4, "max_num_batched_tokens": 7}, id="chunked"),
    ],
)
def test_later_starts_read_shards_of_both_ranks(
    llava: Oracle,
    prompts: list[Prompt],
    expected: list[list[int]],
    tmp_path: Path,
    tiers: Tiers,
    settings: dict[str, Any],
) -> None:
    assert fill(llava, tmp_path, prompts, tiers, **settings) == expected
    assert {*tiers.paths(0)}.isdisjoint(tiers.paths(1))
    engine = start(llava, tmp_path, **settings)
    assert generate(engine, prompts) == expected
    stats = engine.stats()
    assert stats.images_encoded == 0
    assert stats.prompt_tokens == len(prompts)


@pytest.mark.parametrize("rank", [0, 1])
def test_broken_shard_is_a_miss_for_both(
    llava: Oracle, prompts: list[Prompt], expected: list[list[int]], tmp_path: Path, tiers: Tiers, rank: int
) -> None:
    fill(llava, tmp_path, prompts, tiers)
    for path in tiers.paths(rank):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    engine = start(llava, tmp_path)
    assert generate(engine, prompts) == expected
    assert engine.stats().prompt_tokens >= sum(len(prompt.token_ids) for prompt in prompts) / 2


def test_missing_shard_ends_the_prefix(
    llava: Oracle, prompts: list[Prompt], expected: list[list[int]], tmp_path: Path, tiers: Tiers
) -> None:
    [longest] = sorted(range(len(prompts)), key=lambda number: len(prompts[number].token_ids))[-1:]
    fill(llava, tmp_path, [prompts[longest]], tiers, block_size=4)
    tiers.paths(1)[2].unlink()
    engine = start(llava, tmp_path, block_size=4)
    assert generate(engine, [prompts[longest]]) == [expected[longest]]
    assert engine.stats().prompt_tokens == len(prompts[longest].token_ids) - 2 * 4


def test_requests_overtake_one_that_rank_1_reads(
    llava: Oracle, prompts: list[Prompt], expected: list[list[int]], tmp_path: Path, tiers: Tiers
) -> None:
    fill(llava, tmp_path, prompts, tiers)
    engine = start(llava, tmp_path)
    tiers.gate.clear()
    for name, prompt in (("aborted", prompts[1]), ("known", prompts[0]), ("new", Prompt([5, 6, 7]))):
        engine.add(EngineRequest(name, prompt, GREEDY_ANSWER))
    answers: dict[str, list[int]] = {"known": [], "new": []}
    while engine.has_work():
        for output in engine.step():
            answers[output.request_id] += output.token_ids
            if output.finish_reason is not None and output.request_id == "new":
                assert not answers["known"]
                engine.abort(["aborted"])
                tiers.gate.set()
    assert answers["known"] == expected[0]


def test_full_disk_of_rank_0_stops_all(
    llava: Oracle, prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskTier.store
    leading: list[DiskTier] = []
    following: list[DiskTier] = []
    is_full = threading.Event()

    def fail() -> Bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    def store_unless_leading(tier: DiskTier, key: bytes, size: int, content: Callable[[], Bytes]) -> None:
        is_leading = threading.current_thread() is threading.main_thread()
        (leading if is_leading else following).append(tier)
        store(tier, key, size, fail if is_leading and is_full.is_set() else content)

    monkeypatch.setattr(DiskTier, "store", store_unless_leading)
    engine = start(llava, tmp_path)
    generate(engine, prompts[:1])
    is_full.set()
    generate(engine, prompts[1:2])
    wait_until(lambda: not leading[0].writes)
    generate(engine, prompts[2:3])  # rank 1 has read earlier messages
    before = len(following)
    generate(engine, prompts[3:])
    assert len(following) == before > 0


def test_ranks_find_blocks_of_windows(tmp_path: Path, tiers: Tiers) -> None:
    model = str(make_gemma3(tmp_path / "model"))
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "16MiB", "block_size": 4}
    answers, cached = [], []
    for _ in range(2):
        llm = LLM(model, **settings, disk_cache=str(tmp_path / "disk"), tensor_parallel_size=2)
        found = llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
        answers.append([one.outputs[0].token_ids for one in found])
        cached.append([one.num_cached_tokens for one in found])
        tiers.wait()
    assert answers[0] == answers[1]
    assert sum(cached[0]) < sum(cached[1])


def test_ranks_read_states(tmp_path: Path, tiers: Tiers) -> None:
    oracle = make_qwen_vl(tmp_path / "model", "qwen3_5")
    prompts = [oracle.prompt(seed, *parts) for seed, parts in enumerate(MIXED[:5])]
    expected = generate(engine_for(oracle), prompts)
    computed = []
    for _ in range(2):
        engine = engine_for(oracle, disk_cache=str(tmp_path / "disk"), tensor_parallel_size=2)
        assert generate(engine, prompts) == expected
        computed.append(engine.stats().prompt_tokens)
        tiers.wait()
    assert engine.stats().images_encoded == 0
    assert computed[1] < computed[0] / 2


def test_shards_broken_at_random_change_no_answer(llava: Oracle, expected: list[list[int]], tmp_path: Path) -> None:
    tally = Tally()
    for seed in (0, 5):  # with room for all files
        fuzz(llava, tmp_path, 10, seed, tally, expected, ranks=2)
    assert tally.hits > 0
    assert tally.different == []

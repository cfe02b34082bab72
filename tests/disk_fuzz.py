"""Requests to engines that share a disk cache whose files are broken at random, against an engine without one.

    sudo .venv/bin/python -m tests.disk_fuzz --requests 5000

Files are changed, cut, emptied, exchanged and removed between steps. As root, the cache is on a small file system,
which another file fills from time to time. One engine starts after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import vlmserve.engine.ranks
from tests import state_fuzz
from tests.engine.test_parity import NEW_TOKENS, Oracle, bytes_of_4, engine_for, generate, llava_oracle, mixed_prompts
from tests.ranks import RankThreads
from tests.waiting import wait_until
from vlmserve.engine.engine import Engine
from vlmserve.types import EngineRequest, Prompt, SamplingParams

SALTS = ("", "", "tenant")
DISK = 8 * 2**20
"""Bytes of the small file system."""


@dataclass
class Tally:
    finished: int = 0
    engines: int = 0
    hits: int = 0
    broken: int = 0
    written: int = 0
    evictions: int = 0
    different: list[str] = field(default_factory=list)


class Saboteur:
    """Breaks files of a disk cache."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self._folder, self._chance = folder, chance

    def act(self) -> None:
        entries = sorted(self._folder.glob("*.entry"))
        for path in self._chance.sample(entries, min(len(entries), self._chance.choice([0, 0, 1, 3]))):
            with contextlib.suppress(FileNotFoundError):  # it was evicted
                self._break(path, self._chance.choice(entries))

    def break_all(self) -> None:
        """Cut off the last byte of each file."""
        for path in self._folder.glob("*.entry"):
            path.write_bytes(path.read_bytes()[:-1])

    def _break(self, path: Path, other: Path) -> None:
        data = bytearray(path.read_bytes())
        if not data:
            return
        match self._chance.choice(["change", "change", "cut", "empty", "exchange", "remove", "zero"]):
            case "change":
                data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
            case "cut":
                del data[self._chance.randrange(len(data)) :]
            case "empty":
                data.clear()
            case "exchange":
                data[:] = other.read_bytes()
            case "remove":
                path.unlink()
                return
            case _:
                data[self._chance.randrange(len(data)) :] = bytes(100)
        with contextlib.suppress(OSError):  # the disk is full
            path.write_bytes(data)


def fuzz(
    oracle: Oracle, folder: Path, num_requests: int, seed: int, tally: Tally, expected: list[list[int]], ranks: int = 1
) -> None:
    """Send requests to one engine, and count answers that differ from those of an engine that keeps nothing."""
    chance = random.Random(seed)
    prompts, saboteur = mixed_prompts(oracle), Saboteur(folder, chance)
    page = bytes_of_4(oracle.folder)
    longest = max(len(prompt.token_ids) for prompt in prompts) + NEW_TOKENS
    engine = engine_for(
        oracle,
        disk_cache=str(folder),
        disk_cache_memory=chance.choice([400_000, 10**9, 10**9]),
        block_size=4,
        tensor_parallel_size=ranks,
        kv_cache_memory=(longest // 4 + chance.choice([8, 60, 1000])) * page,
        max_num_batched_tokens=chance.choice([7, 50, 2048]),
        encoder_cache_memory=chance.choice([2**20, 2**28]),
    )
    sent: dict[str, int] = {}
    answers: dict[str, list[int]] = {}
    for number in range(num_requests):
        place = chance.randrange(len(prompts))
        engine.add(_request(str(number), prompts[place], chance.choice(SALTS)))
        sent[str(number)], answers[str(number)] = place, []
        for _ in range(chance.choice([0, 0, 3, 20])):
            _step(engine, answers)
        saboteur.act()
    while engine.has_work():
        _step(engine, answers)
    wait_until(lambda: engine.stats().disk_queued_bytes == 0)  # the next engine finds all
    tally.finished += len(sent)
    tally.different += [f"seed {seed}: {name}" for name in sent if answers[name] != expected[sent[name]]]
    _count(engine, tally)


def _request(name: str, prompt: Prompt, salt: str) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return EngineRequest(name, prompt, params, cache_salt=salt)


def _step(engine: Engine, answers: dict[str, list[int]]) -> None:
    for output in engine.step():
        assert output.error is None, output.error
        answers[output.request_id] += output.token_ids


def _count(engine: Engine, tally: Tally) -> None:
    stats = engine.stats()
    assert stats.kv_blocks_used == 0
    tally.engines += 1
    tally.hits += stats.disk_hits
    tally.broken += stats.disk_broken
    tally.written += stats.disk_written
    tally.evictions += stats.disk_evictions


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a small file system, or use the folder if this user may not mount any."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, check=False).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def llava_rounds(place: Path, disk: Path, ranks: int) -> Callable[[int, int], Tally]:
    """Return a function that runs an engine, for a seed and a number of requests."""
    (folder := place / "model").mkdir()
    oracle, tally = llava_oracle(folder), Tally()
    expected = generate(engine_for(oracle, enable_prefix_caching=False), mixed_prompts(oracle))

    def run(seed: int, num_requests: int) -> Tally:
        fuzz(oracle, disk, num_requests, seed, tally, expected, ranks)
        return tally

    return run


def state_rounds(place: Path, disk: Path, ranks: int) -> Callable[[int, int], state_fuzz.Tally]:
    """Like `llava_rounds`. Two engines in a row get the same requests."""
    models, tally = [], state_fuzz.Tally()
    for name, make in state_fuzz.FAMILIES.items():
        (folder := place / name).mkdir()
        model = make(folder)
        model.ranks = ranks
        models.append(model)

    def run(seed: int, num_requests: int) -> state_fuzz.Tally:
        model, saboteur = models[seed // 2 % len(models)], Saboteur(disk, random.Random(seed))
        files = state_fuzz.Disk(disk, random.Random(seed).choice([DISK // 8, DISK // 2, 2 * DISK]), saboteur.act)
        state_fuzz.fuzz(model, tally.finished + num_requests, seed // 2, tally, files)
        model.known.clear()
        return tally

    return run


def fuzz_all(options: argparse.Namespace, place: Path, disk: Path) -> Tally | state_fuzz.Tally:
    """Start one engine after the other, and fill the disk for every third."""
    run = state_rounds(place, disk, options.ranks) if options.states else llava_rounds(place, disk, options.ranks)
    num_full, seed, tally = 0, options.seed, None
    while tally is None or tally.finished < options.requests:
        ballast = disk / "ballast"
        ballast.unlink(missing_ok=True)
        if os.path.ismount(disk) and seed % 3 == 2:
            num_full += 1
            with contextlib.suppress(OSError):  # it is full then
                ballast.write_bytes(bytes(DISK))
        tally = run(seed, options.round)
        seed += 1
        print(f"seed {seed}, disk full for {num_full}: {tally}", flush=True)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.disk_fuzz", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=5000, help="requests in all (default 5000)")
    parser.add_argument("--round", type=int, default=40, help="requests of each engine (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first engine (default 0)")
    parser.add_argument("--states", action="store_true", help="models with states")
    parser.add_argument("--ranks", type=int, default=1, help="ranks, as threads of this process (default 1)")
    options = parser.parse_args()
    vlmserve.engine.ranks.RankProcesses = RankThreads  # type: ignore[misc, assignment]
    with tempfile.TemporaryDirectory() as place:
        (disk := Path(place) / "disk").mkdir(mode=0o700)
        with small_disk(disk):
            tally = fuzz_all(options, Path(place), disk)
    raise SystemExit(1 if tally.different else 0)


if __name__ == "__main__":
    main()

"""Prefix hits of conversations in a model with windows, while long prompts of others pass through.

    .venv/bin/python -m benchmarks.window_reuse

Scheduler, cache and keys are the engine's. Tokens are made up and nothing is computed, so figures are exact. Layers
are those of Gemma 3 1B: 4 attend to everything, 22 to 512 tokens. Several conversations take turns, and a long prompt
of another client runs after each round. Shares are tokens found in the cache, divided by tokens that the prompt shares
with the turn before. For the last column, all layers keep the whole history in a pool of the same size.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.command import keep, show_rows
from benchmarks.peers import version
from vlmserve.cache.blocks import BlockPool
from vlmserve.cache.prefix import PrefixCache
from vlmserve.layer_specs import CacheBytes
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.memory import KVMemory
from vlmserve.scheduler.scheduler import Scheduler
from vlmserve.steps import ModelRunnerOutput
from vlmserve.types import EngineRequest, Prompt, SamplingParams

BLOCK, CHUNK, ANSWER = 16, 2048, 32
END = 1
"""Token that ends turns."""
LAYERS: dict[str, tuple[int | None, ...]] = {
    "windows": (None, *[512] * 6),
    "whole history": (None,) * 7,
}
"""Block tables of a request, by what layers keep. A page holds 4 layers."""
CONVERSATIONS, TURNS, QUESTION, FIRST = 8, 6, 200, 1500
COLUMNS = ("Tokens of each long prompt", "Shared tokens", "Found, %", "Found if all layers keep the whole history, %")


class Served:
    """A scheduler whose steps have made-up tokens."""

    def __init__(self, windows: Sequence[int | None], num_pages: int) -> None:
        cache = PrefixCache(BlockPool(num_pages))
        self._memory = KVMemory(cache, BLOCK, prefix_caching=True, max_chunk=CHUNK, windows=windows)
        self._scheduler = Scheduler([self._memory], max_num_seqs=CONVERSATIONS, max_num_batched_tokens=CHUNK)
        self._number = 0

    def ask(self, prompts: Sequence[Sequence[int]]) -> int:
        """Answer prompts at once. Returns how many of their tokens were found."""
        before = self._memory.cached_tokens
        for prompt in prompts:
            self._number += 1
            params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
            request = EngineRequest(str(self._number), Prompt([*prompt]), params)
            ends = frozenset({END})
            self._scheduler.add(Request(request, root_key=bytes(32), seed=0, max_len=10**6, end_token_ids=ends))
        while len(self._scheduler):
            step = self._scheduler.schedule()
            output = ModelRunnerOutput()
            for one in step.requests:
                if one.start + one.num_tokens == len(self._scheduler.requests[one.request_id].token_ids):
                    output.token_ids[one.request_id] = [2]
            self._scheduler.update(step, output)
        return self._memory.cached_tokens - before


def found(windows: Sequence[int | None], num_pages: int, others: int, turns: int) -> tuple[int, int]:
    """Return shared tokens of later turns, and how many of these are found. others: tokens of each long prompt."""
    served, generator = Served(windows, num_pages), random.Random(0)

    def text(length: int) -> list[int]:
        return [*(generator.randrange(10, 10_000) for _ in range(length - 1)), END]

    talks = [text(FIRST) for _ in range(CONVERSATIONS)]
    total = hits = 0
    for turn in range(turns):
        own = sum(served.ask([talk]) for talk in talks)
        if turn:
            hits += own
            total += sum(len(talk) - ANSWER - QUESTION for talk in talks)
        if others:
            served.ask([text(others)])
        for talk in talks:
            talk += text(ANSWER) + text(QUESTION)
    return total, hits


def measure(lengths: Sequence[int], turns: int) -> dict[str, Any]:
    """Measure each length of others' prompts, in a pool for the conversations and one of the longest prompts."""
    of_tokens = CacheBytes(BLOCK, 1, LAYERS["windows"], {})
    longest = FIRST + turns * (QUESTION + ANSWER)
    num_pages = CONVERSATIONS * of_tokens.pages(longest, CHUNK) + of_tokens.pages(max(lengths) + ANSWER, CHUNK)
    rows = []
    for length in lengths:
        shares = []
        for windows in LAYERS.values():
            total, hits = found(windows, num_pages, length, turns)
            shares.append(round(100 * hits / total, 1))
        rows.append([length, total, *shares])
    return {
        "title": "Prefix hits of conversations beside long prompts of others",
        "command": "python -m benchmarks.window_reuse",
        "exact": True,
        "model": f"layers of Gemma 3 1B, {num_pages:,} pages of 4 layers, {CONVERSATIONS} conversations",
        "weights": "",
        "versions": {"vlmserve": version("vlmserve")},
        "columns": list(COLUMNS),
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and show a table."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.window_reuse", description=description)
    parser.add_argument("--others", type=int, nargs="+", default=[0, 4000, 16_000], help="tokens of long prompts")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"turns of a conversation (default {TURNS})")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    with Console().status("prompts ..."):
        report = measure(options.others, options.turns)
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()

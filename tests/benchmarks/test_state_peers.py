"""The conversations that the benchmark of hybrid models sends to each system."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks.state_peers import ANSWER, FIRST, QUESTION, REASONING, converse


def scripted(answer: int) -> tuple[list[list[int]], list[float]]:
    """Prompts that a system receives, and the seconds that it reports in turn."""
    prompts: list[list[int]] = []
    seconds = [9.0, 1.0, 2.0, 3.0]

    def ask(prompt: Sequence[int]) -> tuple[float, list[int]]:
        prompts.append([*prompt])
        return seconds[len(prompts) - 1], [answer] * ANSWER

    length, medians = converse([ask, ask_other], 300, len(seconds), REASONING)
    assert length == len(prompts[-1])
    return prompts, medians


def ask_other(prompt: Sequence[int]) -> tuple[float, list[int]]:
    return float(len(prompt)), [0] * ANSWER


def test_later_prompts_leave_reasoning_out() -> None:
    prompts, medians = scripted(answer=1)
    each = ANSWER - REASONING + QUESTION
    assert [len(prompt) for prompt in prompts] == [FIRST + each * turn for turn in range(4)]
    for earlier, later in itertools.pairwise(prompts):
        assert later[: len(earlier)] == earlier
        assert later[len(earlier) : len(earlier) + ANSWER - REASONING] == [1] * (ANSWER - REASONING)
    assert medians == [2.0, FIRST + 2 * each]

"""Measure how many questions a model answers correctly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vlmserve.calibration.prompts import messages_of_entry
from vlmserve.errors import ConfigurationError
from vlmserve.loadtest.dataset import Entry, read_entries
from vlmserve.offline.llm import LLM
from vlmserve.types import SamplingParams

AT_ONCE = 64
"""Questions in one call. Their images are in memory at the same time."""
MAX_TOKENS = 96
"""Default maximum tokens of an answer."""


def read_questions(path: Path) -> list[Entry]:
    """Raises as `read_entries` does, and ConfigurationError for a line without answer."""
    entries = read_entries(path, "--questions")
    for entry in entries:
        if entry.answer is None:
            raise ConfigurationError(f"--questions {path}: line {entry.line}: needs an answer")
    return entries


def share_right(
    llm: LLM, questions: Sequence[Entry], progress: Callable[[int, int], None] = lambda done, of: None
) -> float:
    """Ignore case, surrounding spaces and a final full stop.

    questions: at least one. progress: called with finished and total questions.
    """
    right = 0
    for start in range(0, len(questions), AT_ONCE):
        some = questions[start : start + AT_ONCE]
        params = [SamplingParams(temperature=0.0, max_tokens=one.max_tokens or MAX_TOKENS) for one in some]
        results = llm.chat([messages_of_entry(one) for one in some], params, use_tqdm=False)
        for one, result in zip(some, results, strict=True):
            right += _plain(result.outputs[0].text) == _plain(one.answer or "")
        progress(start + len(some), len(questions))
    return right / len(questions)


def _plain(text: str) -> str:
    return text.strip().removesuffix(".").casefold()

"""Sampling in the engine, by the data flow of a GPU: see `tests.static_device`.

What is scheduled does not depend on the device: each penalty has a schedule of its own here, and log probabilities are
told in the schedules that differ most.
"""

from pathlib import Path

import pytest

from tests.engine import test_sampling
from tests.engine.test_sampling import *  # noqa: F403
from tests.engine.test_sampling import PENALTIES, PREEMPTED, SCHEDULES
from tests.static_device import static_devices  # noqa: F401

pytestmark: list[object] = []  # There is one kind of kernels.
PAIRS = [
    pytest.param(*penalty, *schedule.values, id=f"{schedule.id}-{number}")
    for number, (penalty, schedule) in enumerate(zip(PENALTIES, [PREEMPTED, *SCHEDULES], strict=True))
]


@pytest.mark.parametrize(("params", "settings", "schedule"), PAIRS)
def test_greedy_answers_with_penalties_are_transformers(folder: Path, model, theirs, params, settings, schedule):
    test_sampling.test_greedy_answers_with_penalties_are_transformers(folder, model, theirs, params, settings, schedule)


@pytest.mark.parametrize("last_n", [5])
def test_frequency_and_presence_count_the_answer_alone_even_after_a_preemption(folder: Path, model, last_n):
    test_sampling.test_frequency_and_presence_count_the_answer_alone_even_after_a_preemption(folder, model, last_n)


@pytest.mark.parametrize("schedule", [{}, {"tight": True, "max_num_batched_tokens": 6}], ids=["one batch", "preempted"])
def test_logprobs_are_those_of_transformers_logits_before_all_edits(folder: Path, model, schedule):
    test_sampling.test_logprobs_are_those_of_transformers_logits_before_all_edits(folder, model, schedule)

"""Models whose images have positions in grids, by the data flow of a GPU: see `tests.static_device`."""

import pytest

from tests.engine import test_qwen_vl
from tests.engine.test_parity import engine_for, generate
from tests.engine.test_qwen_vl import *  # noqa: F403
from tests.engine.test_qwen_vl import Oracle
from tests.static_device import StaticDevice, kernels, static_devices  # noqa: F401
from vlmserve.types import Prompt

pytestmark: list[object] = []  # There is one kind of kernels.


@pytest.mark.parametrize("budget", [9, 2048])
def test_tokens_are_those_of_transformers(
    oracle: Oracle, prompts: list[Prompt], expected: list[list[int]], budget: int
) -> None:
    """With the budgets of one kind of kernels."""
    test_qwen_vl.test_tokens_are_those_of_transformers(oracle, prompts, expected, budget)


def test_towers_are_captured_over_images_of_the_same_sizes(
    oracle: Oracle,
    static_devices: list[StaticDevice],  # noqa: F811
) -> None:
    engine = engine_for(oracle)
    for seed in range(3):
        prompts = [oracle.prompt(seed, (3, 2), 5), oracle.prompt(seed + 10, 4, (2, 4), 2)]
        for some in (prompts, prompts[:1]):
            answers = generate(engine, some)
            assert answers == [oracle.greedy(*case) for case in zip(some, answers, strict=True)]
    assert static_devices[-1].tower_graphs.num_captured > 0

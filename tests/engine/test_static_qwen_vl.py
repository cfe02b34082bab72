"""Models whose images have positions in grids, by the data flow of a GPU: see `tests.static_device`."""

import pytest

from tests.engine import test_qwen_vl
from tests.engine.test_qwen_vl import *  # noqa: F403
from tests.engine.test_qwen_vl import Oracle
from tests.static_device import kernels, static_devices  # noqa: F401
from vlmserve.types import Prompt

pytestmark: list[object] = []  # There is one kind of kernels.


@pytest.mark.parametrize("budget", [9, 2048])
def test_tokens_are_those_of_transformers(
    oracle: Oracle, prompts: list[Prompt], expected: list[list[int]], budget: int
) -> None:
    """With the budgets of one kind of kernels."""
    test_qwen_vl.test_tokens_are_those_of_transformers(oracle, prompts, expected, budget)

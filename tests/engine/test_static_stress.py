"""Evictions, preemptions, aborts and images, by the data flow of a GPU: see `tests.static_device`."""

import pytest

from tests.engine.test_stress import *  # noqa: F403
from tests.engine.test_stress import Case, answered_alone
from tests.static_device import static_devices  # noqa: F401
from vlmserve.devices import choice
from vlmserve.devices.cpu import open_cpu
from vlmserve.types import Prompt


@pytest.fixture(scope="module")
def cases(prompts: list[Prompt]) -> list[Case]:
    """With what the CPU's own kernels answer, which are faster and have another data flow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(choice.KINDS, "cpu", open_cpu)
        return answered_alone(prompts)


@pytest.fixture
def num_requests() -> int:
    """Fewer of each seed than where the native kernels compute, which are faster."""
    return 40

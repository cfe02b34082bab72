"""Evictions, preemptions, aborts and images, by the data flow of a GPU: see `tests.static_device`."""

import pytest

from tests.engine.test_stress import *  # noqa: F403
from tests.static_device import static_devices  # noqa: F401


@pytest.fixture
def num_requests() -> int:
    """Fewer of each seed than where the native kernels compute, which are faster."""
    return 100

"""Sampling in the engine, by the data flow of a GPU: see `tests.static_device`."""

from tests.engine.test_sampling import *  # noqa: F403
from tests.static_device import static_devices  # noqa: F401

pytestmark: list[object] = []  # There is one kind of kernels.

"""The engine against transformers, by the data flow of a GPU: see `tests.static_device`."""

from tests.engine.test_parity import *  # noqa: F403
from tests.static_device import kernels, static_devices  # noqa: F401

pytestmark: list[object] = []  # There is one kind of kernels.

"""Too little memory, by the data flow of a GPU: see `tests.static_device`."""

from tests.engine.test_memory import *  # noqa: F403
from tests.static_device import static_devices  # noqa: F401

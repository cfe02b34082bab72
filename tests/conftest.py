"""Settings for all tests."""

import os

# Models are tiny here: one thread runs them faster than two that wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

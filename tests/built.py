"""Where tests keep what they compile from one run to the next."""

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "tests"
"""Each file's name or folder holds a hash of all that it was compiled from. `make clean` deletes it."""

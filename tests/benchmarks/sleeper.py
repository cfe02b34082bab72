"""A worker that sleeps as long as it is told to, or does not even start."""

import sys
import time

from benchmarks.worker import serve


def load() -> None:
    print("starting")
    if "broken" in sys.argv:
        raise SystemExit("nothing to load")


if __name__ == "__main__":
    serve(load, lambda request: float(request["seconds"]), time.sleep)

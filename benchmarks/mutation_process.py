"""Runs pytest in copies of the repository, in processes forked from one that has imported libraries.

It imports nothing of vlmserve: each copy has its own. It reads lines of JSON: the name of a function of this module and
its arguments. It answers each with pytest's exit code, which is negative if a signal ended the tests.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WAIT = 600
"""Seconds for tests that wait for something."""


def run(folder: str, arguments: Sequence[str], cpu_seconds: int, plugins: Sequence[Any] = ()) -> int:
    """Run pytest on the sources in `folder`, in this process, which can do nothing else afterwards."""
    import pytest

    own = [str(Path(folder, "src")), folder]
    sys.path[:0] = own
    os.environ["PYTHONPATH"] = os.pathsep.join(own)
    os.chdir(folder)
    with open(os.devnull, "w") as nothing:
        for number in (0, 1, 2):
            os.dup2(nothing.fileno(), number)
    signal.alarm(WAIT)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments], plugins))


def record(folder: str, arguments: Sequence[str], cpu_seconds: int, sources: Sequence[str], target: str) -> int:
    """Run the tests, and write to `target` the seconds of each test and the tests that reach each line of `sources`.

    A test here is a function with all its parameters.
    """
    import coverage
    import pytest

    paths = [str(Path(folder, source)) for source in sources]
    measured = coverage.Coverage(data_file=None, config_file=False, include=[*paths, *(f"{one}/*" for one in paths)])
    seconds: Counter[str] = Counter()

    class Contexts:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
            name, began = item.nodeid.partition("[")[0], time.process_time()
            measured.switch_context(name)
            result = yield
            measured.switch_context("")
            seconds[name] += time.process_time() - began
            return result

    measured.start()
    code = run(folder, arguments, cpu_seconds, [Contexts()])
    measured.stop()
    data = measured.get_data()
    lines: defaultdict[str, dict[int, list[str]]] = defaultdict(dict)
    for path in data.measured_files():
        lines[Path(path).relative_to(folder).as_posix()] = data.contexts_by_lineno(path)
    Path(target).write_text(json.dumps({"seconds": seconds, "lines": lines}))
    return code


def forked(function: str, *arguments: Any) -> int:
    """Call a function of this module in a process of its own."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgrp()
            code = globals()[function](*arguments)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):  # processes that the tests left
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    os.nice(5)
    del sys.path[0]  # this folder
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        print(forked(*json.loads(line)), flush=True)


if __name__ == "__main__":
    main()

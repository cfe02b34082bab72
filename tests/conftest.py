"""Settings for all tests."""

import copy
import functools
import gc
import inspect
import os
import ssl
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Models are tiny here: one thread runs them faster than two that wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Hundreds of processes import the same modules: without what Python keeps of them, each takes seconds longer.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # also in pytest_sessionstart

import certifi
import httpx
import pytest
import torch
import typer
from hypothesis import settings

from tests.forked_workers import can_fork_workers, fork_workers
from tests.lanes import LONGEST, MOST_SECONDS, SLOW
from tests.postgres import Postgres, running_postgres
from vlmserve.cache.costs import CostModel
from vlmserve.engine import drafting
from vlmserve.kernels.choice import VARIABLE
from vlmserve.kernels.extension import supported_isas
from vlmserve.runner import warm_up

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    # Interprets kernels in Triton. Its own functions look at this when it is imported, which transformers does.
    os.environ["TRITON_INTERPRET"] = "1"
# No test asserts a time, not even that of a generated example on a busy machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
# What whoever runs the tests has set for a server of their own is not for those of the tests.
for name in [name for name in os.environ if name.startswith("VLMSERVE_") and name not in (VARIABLE, "VLMSERVE_ISAS")]:
    del os.environ[name]


CRASHED: list[str] = []
"""Tests whose process died."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out the files that tests/lanes.py lists")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Slow files are not even imported in the fast lane."""
    here = Path(__file__).parent
    if config.getoption("fast") and collection_path.is_relative_to(here):
        return collection_path.relative_to(here).as_posix() in SLOW or None
    return None


def pytest_sessionstart() -> None:
    """What is imported and collected stays until the end: to look for garbage in it would take long."""
    sys.dont_write_bytecode = False
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files come first where several processes share the tests, so that none has one left at the end.

    Tests for a GPU are left out where there is none. Where they are asked for by name, they are skipped instead.
    """
    here = Path(__file__).parent
    if hasattr(config, "workerinput"):
        first = {name: place for place, name in enumerate((*LONGEST, *sorted(SLOW.difference(LONGEST))))}
        items.sort(key=lambda item: first.get(item.path.relative_to(here).as_posix(), len(first)))
    if torch.cuda.is_available() or "gpu" in config.option.markexpr:
        return
    kept, left_out = [], []
    for item in items:
        (kept if item.get_closest_marker("gpu") is None else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    if can_fork_workers():
        fork_workers(config, specs)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport) -> None:
    """A test whose process was killed is run again in another one. The first time, what that gives counts."""
    if crashitem not in CRASHED:
        CRASHED.append(crashitem)
        report.outcome = "rerun"  # type: ignore[assignment]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the tests whose process died, and what makes the fast lane slow."""
    if getattr(config, "cache", None) is not None and not hasattr(config, "workerinput"):
        config.cache.set("vlmserve/died", CRASHED)  # .ci/tests.py warns of them
    for name in CRASHED:
        terminalreporter.write_line(f"The process of {name} died; the test was run again.")
    if not config.getoption("fast"):
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    for name, taken in seconds.most_common():
        if taken > MOST_SECONDS:
            terminalreporter.write_line(f"{name} took {taken:.0f} s; if the machine was idle, add it to tests/lanes.py")


@pytest.fixture(scope="session", autouse=True)
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers keep a history by default, and pairs of GGUF files are described, and not where the user's own are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def command_line_made_once() -> Iterator[None]:
    """typer makes an app's commands from their functions at each call, which takes longer than most calls."""
    make = functools.cache(typer.main.get_group)

    def copied(app: typer.Typer) -> Any:
        # typer adds parameters to it.
        made = copy.copy(make(app))
        made.params = [*made.params]
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_group", copied)
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once() -> Iterator[None]:
    """Each call of httpx reads all certificate authorities, though no test talks to a server that has a certificate."""
    make = ssl.create_default_context
    of_file = functools.cache(lambda cafile: make(cafile=cafile))
    files = {certifi.where(), os.environ.get("SSL_CERT_FILE")}

    def make_or_share(*args: Any, **settings: Any) -> ssl.SSLContext:
        # As httpx calls it where nobody asks for anything else. Others may change what they get.
        shared = not args and settings.keys() == {"cafile"} and settings["cafile"] in files
        return of_file(settings["cafile"]) if shared else make(*args, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", make_or_share)
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> Iterator[None]:
    """Requests of tests wait for a minute: httpx gives up after 5 s, which a busy machine may need."""
    default = inspect.signature(httpx.request).parameters["timeout"].default
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "read", "write", "pool"):
            patch.setattr(default, name, 60.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def drafts_timed_once() -> Iterator[None]:
    """Three loads time steps with drafts, three times each. That takes longer than to load a tiny model."""
    known_costs = drafting.known_costs
    curves: dict[str, Any] = {}

    def measured_once(key: str, measure: Any) -> Any:
        if key not in curves:
            curves[key] = known_costs(key, measure)
        return curves[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_up, "ROUNDS_OF_DRAFTS", 1)
        patch.setattr(drafting, "known_costs", measured_once)
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server; tests that need it are skipped where none can be started."""
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["torch", *(["native"] if supported_isas() else [])])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kind of kernels in turn, for every model that the test loads."""
    monkeypatch.setenv(VARIABLE, request.param)
    return str(request.param)


@pytest.fixture
def native_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native kernels where the machine has any, for tests that do not ask for each kind of `kernels`."""
    if "kernels" not in request.fixturenames:
        monkeypatch.setenv(VARIABLE, "native" if supported_isas() else "torch")


@pytest.fixture
def saving_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicted blocks go to host memory, whatever this machine's clock says of it."""
    monkeypatch.setattr(CostModel, "worth_saving", lambda self: True)

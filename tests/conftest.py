"""Settings for all tests."""

import os
from collections.abc import Iterator

# Models are tiny here: one thread runs them faster than two that wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from tests.postgres import Postgres, running_postgres
from vlmserve.cache.costs import CostModel
from vlmserve.kernels.choice import VARIABLE
from vlmserve.kernels.extension import supported_isas

# What whoever runs the tests has set for a server of their own is not for those of the tests.
for name in [name for name in os.environ if name.startswith("VLMSERVE_") and name != VARIABLE]:
    del os.environ[name]


@pytest.fixture(scope="session", autouse=True)
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers keep a history by default, and not where the user's own is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
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
def saving_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicted blocks go to host memory, whatever this machine's clock says of it."""
    monkeypatch.setattr(CostModel, "worth_saving", lambda self: True)

"""All engines here run their steps from messages, as if the runner were in another process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.shared_models import shared_models as shared_models
from tests.static_device import replace_cpus
from vlmserve.frames import pack, unpack
from vlmserve.kernels.choice import VARIABLE
from vlmserve.kernels.extension import supported_isas
from vlmserve.runner.runner import ModelRunner, RunningStep
from vlmserve.steps import ModelRunnerOutput, SchedulerOutput


@pytest.fixture(scope="module", autouse=True)
def messages(shared_models: None) -> Iterator[None]:
    """The runner gets a copy of each step that has been through msgpack, and so does the scheduler of each output."""
    submit = ModelRunner.submit

    def submit_message(self: ModelRunner, step: SchedulerOutput) -> RunningStep:
        running = submit(self, unpack(pack(step), SchedulerOutput))
        return RunningStep(lambda: unpack(pack(running.result()), ModelRunnerOutput))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "submit", submit_message)
        yield


@pytest.fixture(params=["torch", *(["native"] if supported_isas() else [])])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels of every model that the test loads. "static" is the data flow of a GPU, see `tests.static_device`."""
    if request.param != "static":
        monkeypatch.setenv(VARIABLE, request.param)
        yield request.param
        return
    monkeypatch.delenv(VARIABLE, raising=False)
    devices = replace_cpus(monkeypatch)
    yield request.param
    executors = [executor for device in devices for executor in device.executors]
    # A model with experts has none.
    assert not executors or any(executor.num_captured for executor in executors)

"""All engines here run their steps from messages, as if the runner were in another process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vlmserve.frames import pack, unpack
from vlmserve.runner.runner import ModelRunner, RunningStep
from vlmserve.steps import ModelRunnerOutput, SchedulerOutput


@pytest.fixture(scope="module", autouse=True)
def messages() -> Iterator[None]:
    """The runner gets a copy of each step that has been through msgpack, and so does the scheduler of each output."""
    submit = ModelRunner.submit

    def submit_message(self: ModelRunner, step: SchedulerOutput) -> RunningStep:
        running = submit(self, unpack(pack(step), SchedulerOutput))
        return RunningStep(lambda: unpack(pack(running.result()), ModelRunnerOutput))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "submit", submit_message)
        yield

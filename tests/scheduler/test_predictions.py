"""When the model's own layer drafts, and which of its drafts are checked."""

from __future__ import annotations

from collections.abc import Callable

from tests.scheduler.made_up import request
from tests.scheduler.test_drafter import FLAT, decoding
from vlmserve.scheduler.drafts.costs import StepCosts
from vlmserve.scheduler.drafts.curve import Curve
from vlmserve.scheduler.drafts.drafter import Drafter
from vlmserve.scheduler.drafts.layer import LayerCosts
from vlmserve.scheduler.request import Request
from vlmserve.steps import CachedRequest, ModelRunnerOutput, SchedulerOutput

SECONDS = 0.3
"""A prediction compared with a step of one row, which takes 1 second."""
ROW = 0.05
"""The same for a row of the layer."""


class Simulation:
    """One request, whose tokens count up."""

    def __init__(self, drafter: Drafter, one: Request, right: Callable[[int], bool]) -> None:
        """right: whether the model predicts a token, by its index."""
        self.drafter, self.one, self._right = drafter, one, right
        self.predicted: list[int] = []
        """Predictions after each step."""
        self.ran: list[bool] = []
        """Whether the layer ran in each step."""
        self.checked: list[int] = []
        """Drafts of each step."""

    def step(self) -> None:
        drafter, one = self.drafter, self.one
        drafter.begin_step([one])
        drafts = [*drafter.propose(one)]
        step = SchedulerOutput(cached_requests=[CachedRequest(one.request_id, one.num_computed, 1 + len(drafts))])
        step.draft_token_ids = {one.request_id: drafts} if drafts else {}
        drafter.predict(step, {one.request_id: one})
        length, sampled = len(one.token_ids), []
        for number in range(1 + len(drafts)):
            sampled.append(length + number)
            if number < len(drafts) and drafts[number] != sampled[-1]:
                break
        count = step.num_predicted.get(one.request_id, 0)
        self.ran.append(one.request_id in step.num_predicted)
        after = range(length + len(sampled), length + len(sampled) + count)
        predicted = {one.request_id: [index if self._right(index) else 7 for index in after]}
        drafter.ran(
            step, ModelRunnerOutput(token_ids={one.request_id: sampled}, predicted=predicted), {one.request_id: one}
        )
        one.token_ids += sampled
        one.num_computed += len(sampled)
        self.predicted.append(count)
        self.checked.append(len(drafts))


def costs(draft: float = SECONDS, row: float = ROW) -> LayerCosts:
    return LayerCosts(draft, Curve([(1, row), (32, 2 * row)]))


def simulation(right: Callable[[int], bool], layer: LayerCosts | None = None) -> Simulation:
    one = decoding("a", 5)
    one.max_len = 100_000
    return Simulation(Drafter(StepCosts(FLAT), layer or costs()), one, right)


def test_right_predictions_are_checked() -> None:
    found = simulation(lambda index: True)
    for _ in range(80):
        found.step()
    assert len(found.one.token_ids) > 250
    assert max(found.checked) == max(found.predicted) == 8
    assert all(found.ran)


def test_wrong_predictions_cost_little() -> None:
    found = simulation(lambda index: False, costs(row=0.0))
    for _ in range(1000):
        found.step()
    assert 10 < sum(found.predicted) < 30
    assert sum(found.checked) < 40


def test_layer_stops_while_drafts_are_wrong() -> None:
    found = simulation(lambda index: False)
    for _ in range(4000):
        found.step()
    # 2 steps at first, then 0.5% of all
    assert sum(found.ran) * ROW < 2 + 0.005 * 4000 + 1
    assert sum(found.ran[-1000:]) > 20
    assert sum(found.predicted[-1000:]) > 0


def test_predictions_resume_when_they_are_right() -> None:
    found = simulation(lambda index: index > 1000)
    for _ in range(2500):
        found.step()
    assert sum(found.predicted[:900]) < 40
    assert sum(found.predicted[-100:]) > 200
    assert all(found.ran[-100:])


def test_prompts_skip_a_layer_that_failed() -> None:
    found = simulation(lambda index: False)
    for _ in range(200):
        found.step()
    drafter, fresh = found.drafter, request("b", 400)
    step = SchedulerOutput(cached_requests=[CachedRequest("b", 0, 400)])
    drafter.begin_step([fresh])
    drafter.predict(step, {"b": fresh})
    assert step.num_predicted == {}


def test_prompts_of_expected_drafts_run() -> None:
    fresh, step = request("b", 400), SchedulerOutput(cached_requests=[CachedRequest("b", 0, 300)])
    drafter = Drafter(StepCosts(FLAT), costs())
    drafter.begin_step([fresh])
    drafter.predict(step, {"b": fresh})
    assert step.num_predicted == {"b": 0}


def test_expensive_predictions_are_not_made() -> None:
    found = simulation(lambda index: True, costs(draft=2.0))
    for _ in range(60):
        found.step()
    assert sum(found.predicted) == 0
    assert not any(found.ran)


def test_models_without_the_layer_predict_nothing() -> None:
    one = decoding("a", 5)
    found = Simulation(Drafter(StepCosts(FLAT)), one, lambda index: True)
    found.step()
    assert found.predicted == [0]


def test_repeats_replace_predictions() -> None:
    drafter = Drafter(StepCosts(FLAT), costs())
    earlier = decoding("b", 5)
    earlier.token_ids += range(len(earlier.token_ids), len(earlier.token_ids) + 60)
    drafter.learn([earlier])
    found = Simulation(drafter, decoding("a", 5), lambda index: True)
    found.step()
    assert found.checked[0] > 8
    assert found.predicted == [0]

from __future__ import annotations

from vlmserve.cache.costs import TRIAL_INTERVAL, CostModel
from vlmserve.steps import BlockCopy

SAVES = [BlockCopy("save", block, block) for block in range(10)]
COPY = BlockCopy("copy", 0, 1)


def expensive() -> CostModel:
    """Two copies of a block take longer than computing it."""
    costs = CostModel(block_size=16)
    costs.computed(1000, 1.0)
    costs.copied(SAVES, 0.09)
    return costs


def test_saving_pays_if_two_copies_are_faster():
    costs = CostModel(block_size=16)
    assert costs.worth_saving(), "while nothing is known"
    costs.computed(1000, 1.0)
    costs.copied(SAVES, 0.07)
    assert costs.worth_saving()
    for _ in range(50):
        costs.copied(SAVES, 0.09)
    assert not costs.worth_saving()


def test_small_steps_say_nothing_about_prices():
    costs = CostModel(block_size=16)
    costs.computed(3, 1.0)
    assert costs.seconds_per_token is None


def test_device_copies_say_nothing_about_host_prices():
    costs = CostModel(block_size=16)
    costs.copied([], 1.0)
    costs.copied([COPY], 1.0)
    costs.copied([*SAVES, COPY], 1.0)
    assert costs.seconds_per_copy is None
    costs.copied([*SAVES, BlockCopy("load", 0, 1)], 1.1)
    assert costs.seconds_per_copy == 0.1


def test_trial_saves_keep_the_price_known():
    costs = expensive()
    answers = [costs.worth_saving() for _ in range(3 * TRIAL_INTERVAL)]
    assert answers.count(True) == 3
    assert not any(answers[: TRIAL_INTERVAL - 1])


def test_blocks_are_saved_once_copies_are_cheap():
    costs = expensive()
    for _ in range(100 * TRIAL_INTERVAL):
        if costs.worth_saving():
            costs.copied(SAVES[:1], 0.001)
    assert all(costs.worth_saving() for _ in range(TRIAL_INTERVAL))

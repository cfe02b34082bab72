"""Limits of a step by measured times."""

from __future__ import annotations

import math

import pytest

from vlmserve.scheduler.step_limits import (
    ALONE_FACTOR,
    FEWEST_PROMPT_TOKENS,
    FIRST_STEP_SECONDS,
    PROMPT_TOKENS_MULTIPLE,
    SEVERAL_SECONDS,
    MeasuredLimits,
)


def test_image_time_is_a_share_of_the_step():
    limits = MeasuredLimits(0.5, math.inf)
    assert limits.tower_macs(1, generating=True) == math.inf, "the tower's rate is not known"
    limits.encoded(1000, 2.0)
    assert limits.tower_macs(1, generating=True) == pytest.approx(0.5 * FIRST_STEP_SECONDS * 500)
    limits.generated(8.0)
    assert limits.tower_macs(1, generating=True) == pytest.approx(2000)
    limits.generated(4.0)
    assert 1000 < limits.tower_macs(1, generating=True) < 2000
    limits.encoded(0, 3.0)
    assert limits.seconds_per_mac == 0.002
    unlimited = MeasuredLimits(math.inf, math.inf)
    unlimited.encoded(1000, 2.0)
    assert unlimited.tower_macs(1, generating=True) == math.inf


def test_image_time_has_a_minimum_while_several_wait():
    limits = MeasuredLimits(0.5, math.inf)
    assert limits.tower_macs(2, generating=True) == math.inf, "the tower's rate is not known"
    limits.encoded(1_000_000, 1.0)
    limits.generated(0.001)
    assert limits.tower_macs(1, generating=True) == pytest.approx(500)
    for waiting in (2, 9):
        assert limits.tower_macs(waiting, generating=True) == pytest.approx(1_000_000 * SEVERAL_SECONDS)
    for _ in range(1000):
        limits.generated(1.0)
    for waiting in (1, 2):  # the share is more
        assert limits.tower_macs(waiting, generating=True) == pytest.approx(500_000, rel=0.01)


@pytest.mark.parametrize("generating", [True, False])
def test_no_step_exceeds_its_image_time(generating: bool):
    limits = MeasuredLimits(math.inf, 0.25)
    limits.encoded(4_000_000, 1.0)
    limits.generated(9.0)
    for waiting in (0, 1, 2):
        assert limits.tower_macs(waiting, generating=generating) == pytest.approx(1_000_000)


def test_prompt_tokens_follow_the_measured_rate():
    limits = MeasuredLimits(0.8, 0.25)
    assert limits.prompt_tokens(shared=True, generating=True) == PROMPT_TOKENS_MULTIPLE
    limits.prefilled(256, 0.256)
    assert limits.prompt_tokens(shared=True, generating=True) == 224
    assert limits.prompt_tokens(shared=False, generating=False) == 480 <= 0.25 * ALONE_FACTOR / 0.001
    limits.prefilled(PROMPT_TOKENS_MULTIPLE - 1, 1000.0)
    assert limits.prompt_tokens(shared=True, generating=True) == 224, "the time of few tokens is that of the weights"


def test_slow_prompts_still_get_some_tokens():
    limits = MeasuredLimits(0.8, 0.25)
    limits.prefilled(256, 256.0)
    assert limits.prompt_tokens(shared=True, generating=True) == FEWEST_PROMPT_TOKENS
    for shared in (True, False):
        assert limits.prompt_tokens(shared=shared, generating=False) == PROMPT_TOKENS_MULTIPLE, "no stream waits"


def test_streams_wait_no_longer_for_slow_prompts():
    limits = MeasuredLimits(0.8, 0.25)
    limits.generated(0.1)
    limits.prefilled(256, 256 * 0.015 + 0.1, 1)
    assert limits.prompt_tokens(shared=True, generating=True) == 16 <= 0.25 / 0.015 < PROMPT_TOKENS_MULTIPLE
    for _ in range(100):
        limits.prefilled(16, 16 * 0.001 + 0.1, 1)
    assert limits.prompt_tokens(shared=True, generating=True) == 224, "few tokens beside a stream are measured"


def test_one_slow_first_step_does_not_count():
    limits = MeasuredLimits(0.8, 0.25)
    limits.prefilled(256, 10.0)
    limits.prefilled(32, 0.032)
    assert limits.prompt_tokens(shared=True, generating=True) == 224


def test_decode_time_is_no_prompt_time():
    limits = MeasuredLimits(0.8, 0.25)
    limits.generated(0.1)
    limits.prefilled(100, 0.2, 1)
    assert limits.seconds_per_token == pytest.approx(0.001)


def test_many_decodes_take_no_prompt_time():
    limits = MeasuredLimits(0.8, 0.25)
    limits.generated(0.02)  # of a few decodes
    limits.prefilled(8, 0.136, 60)
    assert limits.seconds_per_token == pytest.approx(0.002)


def test_unlimited_steps_take_whole_prompts():
    limits = MeasuredLimits(math.inf, math.inf)
    limits.prefilled(256, 10.0)
    assert limits.prompt_tokens(shared=True, generating=True) == math.inf

"""How much of the vision tower and of prompts one step may compute."""

from __future__ import annotations

import math
from typing import Protocol

from vlmserve.cache.costs import smooth
from vlmserve.steps import RunTimings

FIRST_STEP_SECONDS = 0.01
"""Assumed time of a decode step, in seconds, until one was measured."""

SEVERAL_SECONDS = 0.02
"""Minimum time for images, in seconds, while several requests wait for theirs. A reader does not notice a token that
comes so much later, and all of those requests get their first tokens sooner."""

PROMPT_TOKENS_MULTIPLE = 32
"""Prompt tokens are limited to multiples of this, because kernels compute that many rows at once. Until a prompt token
was measured, a step computes this many."""

FEWEST_PROMPT_TOKENS = 8
"""Minimum prompt tokens of a step that others wait for, where even `PROMPT_TOKENS_MULTIPLE` take too long."""

ALONE_FACTOR = 2.0
"""A prompt that nobody waits for gets this many times as long a step: longer steps read the weights less often."""


class StepLimits(Protocol):
    """Limits of one step, which the scheduler plans by."""

    def tower_macs(self, num_waiting: int, *, generating: bool) -> float:
        """MACs of the vision tower, at least 1.

        num_waiting: running requests with images whose prompts are not computed. generating: whether requests generate.
        """
        ...

    def prompt_tokens(self, *, shared: bool) -> float:
        """Prompt tokens, at least 1. shared: whether there is more than one request."""
        ...


class MeasuredLimits(StepLimits):
    """Limits by time. The engine measures the time of MACs, of prompt tokens and of decode steps while it serves.

    A step spends at most `seconds` on images. While requests generate, it spends at most `share` times as long as the
    rest of the step, or `SEVERAL_SECONDS` if several requests wait for images and that is more.
    """

    def __init__(self, share: float, seconds: float) -> None:
        self._share = share
        self._seconds = seconds
        self.seconds_per_mac: float | None = None
        self.step_seconds: float | None = None
        self.seconds_per_token: float | None = None
        """Seconds of a prompt token: the lesser of the average and the last measurement, since first steps are slow."""
        self._average_per_token: float | None = None

    def ran(self, timings: RunTimings, prompt_tokens: int, decoded_tokens: int) -> None:
        """Note the times of a step that computed that many tokens of prompts and of answers."""
        if timings.products:
            self.encoded(timings.products, timings.vision)
        seconds = timings.build + timings.model + timings.sample
        if prompt_tokens:
            self.prefilled(prompt_tokens, seconds, decoded_tokens)
        elif decoded_tokens:
            self.generated(seconds)

    def encoded(self, macs: int, seconds: float) -> None:
        """Note that the tower computed that many MACs in that time."""
        if macs:
            self.seconds_per_mac = smooth(self.seconds_per_mac, seconds / macs)

    def generated(self, seconds: float) -> None:
        """Note the time, without images, of a step that computed no prompt."""
        self.step_seconds = smooth(self.step_seconds, seconds)

    def prefilled(self, num_tokens: int, seconds: float, decoded_tokens: int = 0) -> None:
        """Note the time, without images, of a step that computed that many tokens of prompts and of answers."""
        # Fewer tokens take the time of reading the weights, which decodes read too.
        if num_tokens < (FEWEST_PROMPT_TOKENS if decoded_tokens else PROMPT_TOKENS_MULTIPLE):
            return
        if decoded_tokens:
            # Each of many decodes takes as long as a prompt token.
            rest = max(seconds - (self.step_seconds or 0.0), seconds / 10)
            seconds = min(rest, seconds * num_tokens / (num_tokens + decoded_tokens))
        latest = seconds / num_tokens
        self._average_per_token = smooth(self._average_per_token, latest)
        self.seconds_per_token = min(latest, self._average_per_token)

    def tower_seconds(self, macs: float) -> float:
        """Time of the tower for that many MACs; 0 if it was never measured."""
        return macs * (self.seconds_per_mac or 0.0)

    def tower_macs(self, num_waiting: int, *, generating: bool) -> float:
        if not self.seconds_per_mac:
            return math.inf
        seconds = self._seconds
        if generating:
            share = self._share * (self.step_seconds or FIRST_STEP_SECONDS)
            seconds = min(seconds, max(share, SEVERAL_SECONDS) if num_waiting > 1 else share)
        return max(1.0, seconds / self.seconds_per_mac)

    def prompt_tokens(self, *, shared: bool) -> float:
        if math.isinf(self._seconds):
            return math.inf
        if not self.seconds_per_token:
            return PROMPT_TOKENS_MULTIPLE
        tokens = int((self._seconds if shared else ALONE_FACTOR * self._seconds) / self.seconds_per_token)
        is_small = shared and tokens < PROMPT_TOKENS_MULTIPLE
        multiple = FEWEST_PROMPT_TOKENS if is_small else PROMPT_TOKENS_MULTIPLE
        return max(1, tokens // multiple) * multiple

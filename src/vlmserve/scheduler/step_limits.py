"""Limits a step's image and prompt work."""

from __future__ import annotations

import math
from typing import Protocol

from vlmserve.cache.costs import smooth
from vlmserve.steps import RunTimings

FIRST_STEP_SECONDS = 0.01
"""Assumed seconds of a decode step before the first measurement."""

SEVERAL_SECONDS = 0.02
"""Minimum seconds for images while several requests wait for theirs. Readers do not notice such a delay of a token."""

PROMPT_TOKENS_MULTIPLE = 32
"""Prompt token limits are multiples of this, because kernels compute this many rows at once. Also the limit before the
first measurement."""

FEWEST_PROMPT_TOKENS = 8
"""Minimum prompt tokens of a step that generating requests wait for, if `PROMPT_TOKENS_MULTIPLE` takes too long."""

ALONE_FACTOR = 2.0
"""A prompt that delays no one gets steps longer by this factor, which read the weights less often."""


class StepLimits(Protocol):
    def tower_macs(self, num_waiting: int, *, generating: bool) -> float:
        """At least 1. num_waiting: running requests with images and uncomputed prompts."""
        ...

    def prompt_tokens(self, *, shared: bool, generating: bool) -> float:
        """At least 1. shared: there are several requests. generating: the step also decodes."""
        ...


class MeasuredLimits(StepLimits):
    """Limits by measured seconds of MACs, prompt tokens and decode steps.

    Images get `seconds` of a step. While requests generate, they get `share` of the rest of the step, or
    `SEVERAL_SECONDS` if that is more and several requests wait for images.
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
        if timings.products:
            self.encoded(timings.products, timings.vision)
        seconds = timings.build + timings.model + timings.sample
        if prompt_tokens:
            self.prefilled(prompt_tokens, seconds, decoded_tokens)
        elif decoded_tokens:
            self.generated(seconds)

    def encoded(self, macs: int, seconds: float) -> None:
        if macs:
            self.seconds_per_mac = smooth(self.seconds_per_mac, seconds / macs)

    def generated(self, seconds: float) -> None:
        self.step_seconds = smooth(self.step_seconds, seconds)

    def prefilled(self, num_tokens: int, seconds: float, decoded_tokens: int = 0) -> None:
        # fewer tokens measure the reading of weights
        if num_tokens < (FEWEST_PROMPT_TOKENS if decoded_tokens else PROMPT_TOKENS_MULTIPLE):
            return
        if decoded_tokens:
            # each of many decodes takes as long as a prompt token
            rest = max(seconds - (self.step_seconds or 0.0), seconds / 10)
            seconds = min(rest, seconds * num_tokens / (num_tokens + decoded_tokens))
        latest = seconds / num_tokens
        self._average_per_token = smooth(self._average_per_token, latest)
        self.seconds_per_token = min(latest, self._average_per_token)

    def tower_seconds(self, macs: float) -> float:
        return macs * (self.seconds_per_mac or 0.0)

    def tower_macs(self, num_waiting: int, *, generating: bool) -> float:
        if not self.seconds_per_mac:
            return math.inf
        seconds = self._seconds
        if generating:
            share = self._share * (self.step_seconds or FIRST_STEP_SECONDS)
            seconds = min(seconds, max(share, SEVERAL_SECONDS) if num_waiting > 1 else share)
        return max(1.0, seconds / self.seconds_per_mac)

    def prompt_tokens(self, *, shared: bool, generating: bool) -> float:
        if math.isinf(self._seconds):
            return math.inf
        if not self.seconds_per_token:
            return PROMPT_TOKENS_MULTIPLE
        tokens = int((self._seconds if shared else ALONE_FACTOR * self._seconds) / self.seconds_per_token)
        is_small = generating and tokens < PROMPT_TOKENS_MULTIPLE
        multiple = FEWEST_PROMPT_TOKENS if is_small else PROMPT_TOKENS_MULTIPLE
        return max(1, tokens // multiple) * multiple

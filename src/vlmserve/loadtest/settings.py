"""Settings of a load test. Lengths are in tokens, times in seconds."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vlmserve.settings.base import Settings, parse_json, read_settings

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
OBJECTIVES = ("ttft", "tpot", "itl", "e2el")
"""Metrics that may have objectives, in the order of reports."""


def parse_objective(text: str) -> tuple[str, float]:
    """Parse an objective, ``ttft=500ms`` or vLLM's ``ttft:500``, into its name and seconds.

    The default unit is milliseconds. Raises ValueError.
    """
    match = re.fullmatch(r"\s*(\w+)\s*[=:]\s*(\d+(?:\.\d+)?)\s*(s|ms|us)?\s*", text)
    if match is None or match[1] not in OBJECTIVES:
        raise ValueError(f"{text!r} is not an objective; write {'=500ms, '.join(OBJECTIVES)}=500ms")
    return match[1], float(match[2]) * SECONDS[match[3] or "ms"]


class TargetConfig(Settings):
    """The server under test."""

    model: str | None = Field(None, description="Model to ask for; default: the first that the server lists.")
    endpoint: str = Field(
        "/v1/chat/completions",
        description="Path of the API: /v1/chat/completions or /v1/completions.",
        pattern="^/.*completions$",
    )
    api_key: str | None = Field(None, repr=False, description="API key; default: VLMSERVE_API_KEY or OPENAI_API_KEY.")
    header: tuple[str, ...] = Field((), description="Additional header, as 'Name: value' (repeatable).")
    extra_body: Annotated[dict[str, Any], BeforeValidator(parse_json)] = Field(
        {}, description='Additional fields of every request, as JSON: {"top_p": 0.9}.'
    )
    temperature: float | None = Field(0.0, ge=0, description="Temperature of every request.")
    stream: bool = Field(True, description="Use streaming; without it, only whole requests are timed.")
    ignore_eos: bool = Field(True, description="Ask for answers of exactly their length, where the server supports it.")
    request_timeout: float = Field(600.0, gt=0, description="Seconds after which a request has failed.")
    insecure: bool = Field(False, description="Do not verify TLS certificates.")


class WorkloadConfig(Settings):
    """The content of requests."""

    num_prompts: int | None = Field(
        None, ge=1, le=10_000_000, description="Requests, or conversations with --turns; default: 100, or the dataset."
    )
    seed: int = Field(0, ge=0, description="The same seed sends the same requests at the same times.")
    random_input_len: int = Field(128, ge=1, description="Tokens of each prompt's random text.")
    random_output_len: int = Field(64, ge=1, description="Tokens of each answer.")
    random_range_ratio: float = Field(
        0.0, ge=0, le=1, description="Relative spread of both lengths: 0.2 means 80% to 120%."
    )
    random_prefix_len: int = Field(0, ge=0, description="Length of the common prefix of prompts in tokens.")
    num_prefixes: int = Field(1, ge=1, description="Number of different prefixes, used in rotation.")
    images: int = Field(0, ge=0, le=1000, description="Number of random images in each request, or in the first turn.")
    image_size: tuple[str, ...] = Field(
        ("512x512",), description="Width and height of images, like 640x480; with several, one is chosen at random."
    )
    image_format: Literal["jpeg", "png"] = Field("jpeg", description="File format of images.")
    image_reuse: float = Field(0.0, ge=0, le=1, description="Share of images that repeat earlier ones.")
    turns: int = Field(1, ge=1, le=1000, description="Number of turns in each conversation.")
    think_time: float = Field(0.0, ge=0, description="Seconds between an answer and the next question.")
    dataset_path: str | None = Field(
        None, description="A JSONL file instead of random texts, with prompt or messages, and max_tokens, images."
    )


class LoadConfig(Settings):
    """How fast requests are sent."""

    max_concurrency: int | None = Field(
        None, ge=1, le=100_000, description="Concurrent requests; default: 8 without a rate, else no limit."
    )
    request_rate: float | None = Field(
        None, gt=0, description="Requests per second, sent without waiting for answers; inf: all at once."
    )
    burstiness: float = Field(
        1.0, gt=0, description="1: a Poisson process; smaller is burstier, larger is more even; inf: constant."
    )
    ramp_up_strategy: Literal["linear", "exponential"] | None = Field(
        None, description="How the rate rises over the test, from start to end."
    )
    ramp_up_start_rps: float | None = Field(None, gt=0, description="Requests per second at the start.")
    ramp_up_end_rps: float | None = Field(None, gt=0, description="Requests per second at the end.")
    duration: float | None = Field(
        None, gt=0, description="Seconds after which no more requests are sent; with --find-rate, of each trial (15)."
    )
    num_warmups: int | None = Field(
        None, ge=0, description="Requests before the measurement; default: the concurrency, at most 8."
    )


class GoalConfig(Settings):
    """Latency objectives."""

    slo: tuple[str, ...] = Field(
        (), description="Latency objectives for ttft, tpot, itl and e2el, like ttft=500ms,tpot=50ms."
    )
    goodput: tuple[str, ...] = Field((), description="The same in vLLM's notation: ttft:500 tpot:50.")
    slo_share: float = Field(0.99, gt=0, le=1, description="Share of requests that must meet the objectives.")
    find_rate: bool = Field(False, description="Search for the highest request rate that meets the objectives.")
    find_rate_precision: float = Field(0.05, gt=0, lt=1, description="Relative precision of that rate.")

    @property
    def objectives(self) -> dict[str, float]:
        """Bounds in seconds by metric. Raises ValueError."""
        texts = [part for text in (*self.slo, *self.goodput) for part in re.split(r"[,\s]+", text) if part]
        found = dict(map(parse_objective, texts))
        return {name: found[name] for name in OBJECTIVES if name in found}


class TestConfig(Settings):
    """All settings of a load test. url: of the server, with or without ``/v1``."""

    __test__ = False
    url: str
    target: TargetConfig = read_settings(TargetConfig, {})
    workload: WorkloadConfig = read_settings(WorkloadConfig, {})
    load: LoadConfig = read_settings(LoadConfig, {})
    goal: GoalConfig = read_settings(GoalConfig, {})

    @property
    def concurrency(self) -> int | None:
        """Maximum requests in flight; None: no limit."""
        return 8 if self.load.max_concurrency is None and not self.is_open else self.load.max_concurrency

    @property
    def is_open(self) -> bool:
        """True if requests are sent by the clock and do not wait for answers."""
        if self.load.request_rate == math.inf and self.load.max_concurrency is not None:
            return False
        return self.load.request_rate is not None or self.load.ramp_up_strategy is not None

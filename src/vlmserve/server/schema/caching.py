"""OpenAI's cache options, and why a prompt was not cached."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import Field

from vlmserve.server.cache_diagnosis import Changed, Miss
from vlmserve.server.schema.base import RequestModel
from vlmserve.server.schema.sampling import SamplingRequest

_CHANGES = {
    "model": "model_changed", "tools": "tools_changed", "system": "input_changed", "messages": "input_changed"
}  # fmt: skip
"""Cache-miss reasons of OpenAI's API."""


class Prewarming(RequestModel):
    """Cache options. mode and ttl have no effect: all prompts are cached while there is room."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Annotated[str, Field(max_length=64)] | None = None
    prewarm: bool = False
    """Compute the prompt and generate nothing."""


class CacheOptions(Prewarming):
    comparison_response_id: str | None = None
    """A response whose prompt is compared with this one."""


class CachingRequest(SamplingRequest):
    prompt_cache_options: CacheOptions | None = Field(
        None, description="Compute a prompt without an answer, or ask why the caches lacked it."
    )

    @property
    def prewarms(self) -> bool:
        return self.prompt_cache_options is not None and self.prompt_cache_options.prewarm

    @property
    def comparison_response_id(self) -> str | None:
        return None if self.prompt_cache_options is None else self.prompt_cache_options.comparison_response_id


class CacheDiagnostics(msgspec.Struct):
    """Why a prompt could not reuse all of the compared one."""

    type: str
    """cache_miss, cache_hit, comparison_response_not_found or unavailable."""
    reason: str | msgspec.UnsetType = msgspec.UNSET
    cache_missed_tokens: int | msgspec.UnsetType = msgspec.UNSET
    comparison_reusable_tokens: int | msgspec.UnsetType = msgspec.UNSET
    detail: str | msgspec.UnsetType = msgspec.UNSET
    """A reason that OpenAI's types lack (vlmserve's extension)."""
    changed: Changed | msgspec.UnsetType = msgspec.UNSET
    """The first part that changed (vlmserve's extension)."""
    seconds_since_eviction: float | msgspec.UnsetType = msgspec.UNSET
    """With the detail evicted (vlmserve's extension)."""

    @classmethod
    def of(cls, miss: Miss | None) -> CacheDiagnostics:
        """Convert a miss to this API's form; None: a hit."""
        if miss is None:
            return cls("cache_hit")
        if miss.reason in _CHANGES:
            counts = miss.missed_tokens, miss.reusable_tokens
            return cls("cache_miss", _CHANGES[miss.reason], *counts, **miss.details())
        return cls("unavailable", **miss.details())

"""Fields of all requests that an engine answers."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field

from vlmserve.server.schema.base import MAX_COUNT, RequestModel
from vlmserve.types import MAX_CACHE_SALT

IGNORED_FIELDS = frozenset(
    "client_metadata guided_decoding_backend inference_geo metadata models prediction prompt_cache_key "
    "prompt_cache_options prompt_cache_retention safety_identifier service_tier speed store user verbosity".split()
)
"""Fields of other servers that never change an answer."""


class ModelRequest(RequestModel):
    """A request with prompts for the model."""

    ignored_fields: ClassVar[frozenset[str]] = IGNORED_FIELDS
    content_fields: ClassVar[tuple[str, ...]] = ()
    """Fields with the request's content."""

    model: str | None = Field(None, description="A name that /v1/models lists; default: the only one.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_COUNT, description="Keep only the prompt's last tokens; -1: as many as fit."
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_CACHE_SALT,
        description="Requests share caches only with requests of equal salt.",
    )

    @property
    def is_streamed(self) -> bool:
        return False

    def without_content(self) -> Self:
        """A copy without the content, which may be large."""
        return self.model_copy(update=dict.fromkeys(self.content_fields))

    def with_seed(self, seed: int) -> Self:
        """A copy with a seed, if the request samples and has none."""
        return self

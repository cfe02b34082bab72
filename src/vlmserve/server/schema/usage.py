from __future__ import annotations

import msgspec

from vlmserve.types import Missed


class PromptTokensDetails(msgspec.Struct):
    """Details of prompt tokens. The image fields are vlmserve's extensions."""

    cached_tokens: int
    """Found in the prefix cache."""
    images: int
    images_encoded: int
    """Images that went through the vision tower."""
    image_tokens: int
    """Tokens of images and videos."""
    missed_tokens: Missed | msgspec.UnsetType = msgspec.UNSET
    """Why the prefix cache lacked the other tokens, since the answer's first token."""


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    """Reasoning, with the markers around it."""
    accepted_prediction_tokens: int = 0
    """Drafts that are part of the answers; `rejected_prediction_tokens` are not."""
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    """Token counts. The prompt counts once for all answers. The end token counts as generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

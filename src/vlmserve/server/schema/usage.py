"""What answers cost, and what there is to ask."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """What the prompt cost. cached_tokens: those of the prompt that were found in the prefix cache. Beyond OpenAI's
    fields, images: images in the prompt; images_encoded: those that went through the vision tower; image_tokens: those
    of the prompt that are images, videos included.
    """

    cached_tokens: int
    images: int
    images_encoded: int
    image_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """What the answers cost. reasoning_tokens: generated ones that are thoughts, with the markers around them."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    """Drafts that are part of the answers; `rejected_prediction_tokens` are not."""
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of the prompt, once for all answers, and generated ones. The end token counts as generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

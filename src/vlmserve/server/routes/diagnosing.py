"""Why a prompt was not cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vlmserve.prompt.expand import truncate
from vlmserve.server.cache_diagnosis import AskedPrompt, Diagnosis
from vlmserve.server.generation import Generation
from vlmserve.server.schema.caching import CacheDiagnostics
from vlmserve.server.schema.sampling import SamplingRequest
from vlmserve.server.service import Service
from vlmserve.types import Prompt


def asked_prompt(
    service: Service,
    body: SamplingRequest,
    owner: str,
    messages: Sequence[Mapping[str, Any]],
    tools: object,
    prompt: Prompt,
    budget: object,
) -> AskedPrompt:
    """Make it of the part of a prompt that the engine gets. budget: see `AskedPrompt`. Raises InvalidRequestError."""
    kept = truncate(prompt, body.truncate_prompt_tokens, service.client.info.max_prompt_len)
    cut = len(prompt.token_ids) - len(kept.token_ids)
    return AskedPrompt(owner, body.cache_salt or "", messages, tools, kept, budget, cut)


def diagnose(diagnosis: Diagnosis, generation: Generation) -> CacheDiagnostics | msgspec.UnsetType:
    """Answer in the form of OpenAI's APIs.

    Remember the prompt of an ended generation, and compare it with an earlier one if the request names it."""
    changed = diagnosis.begin(generation.id, generation.model)
    if diagnosis.is_unknown:
        return CacheDiagnostics("comparison_response_not_found")
    return CacheDiagnostics.of(changed or diagnosis.end(generation.usage)) if diagnosis.compares else msgspec.UNSET

"""Says in OpenAI's APIs why a prompt was not cached."""

from __future__ import annotations

import msgspec

from vlmserve.server.cache_diagnosis import Diagnosis
from vlmserve.server.generation import Generation
from vlmserve.server.schema.caching import CacheDiagnostics


def diagnose(diagnosis: Diagnosis, generation: Generation) -> CacheDiagnostics | msgspec.UnsetType:
    """Remember the prompt of an ended generation, and compare it with an earlier one if the request names it."""
    changed = diagnosis.begin(generation.id, generation.model)
    if diagnosis.is_unknown:
        return CacheDiagnostics("comparison_response_not_found")
    return CacheDiagnostics.of(changed or diagnosis.end(generation.usage)) if diagnosis.compares else msgspec.UNSET

"""A vision-language model server for many users at once, on a CPU or a GPU."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vlmserve.cores import bound_spinning
from vlmserve.folders import name_hub_folder

if TYPE_CHECKING:
    from vlmserve.offline.async_llm import AsyncLLM
    from vlmserve.offline.confidences import confidence
    from vlmserve.offline.grounding import original_box, original_point
    from vlmserve.offline.llm import LLM
    from vlmserve.offline.outputs import CompletionOutput, Logprob, RequestOutput
    from vlmserve.offline.requests import LoRARequest
    from vlmserve.sampling_params import Grammar, GuidedDecodingParams, SamplingParams, StructuredOutputsParams

if "torch" not in sys.modules:  # otherwise it is too late, and the engine warns
    bound_spinning(os.environ)
name_hub_folder(os.environ)

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Grammar",
    "GuidedDecodingParams",
    "LoRARequest",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "confidence",
    "original_box",
    "original_point",
]

_HOMES = {
    "LLM": "vlmserve.offline.llm",
    "AsyncLLM": "vlmserve.offline.async_llm",
    "confidence": "vlmserve.offline.confidences",
    "original_box": "vlmserve.offline.grounding",
    "original_point": "vlmserve.offline.grounding",
    "CompletionOutput": "vlmserve.offline.outputs",
    "LoRARequest": "vlmserve.offline.requests",
    "Logprob": "vlmserve.offline.outputs",
    "RequestOutput": "vlmserve.offline.outputs",
    "Grammar": "vlmserve.sampling_params",
    "GuidedDecodingParams": "vlmserve.sampling_params",
    "StructuredOutputsParams": "vlmserve.sampling_params",
    "SamplingParams": "vlmserve.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that importing one subpackage stays fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'vlmserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

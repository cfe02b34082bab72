"""Entries of ``/v1/models``, with fields of vLLM, OpenRouter, Ollama and Anthropic."""

from __future__ import annotations

import datetime
from typing import Any, Literal

import msgspec

from vlmserve.server.schema.chat import ChatRequest

_OPENROUTER_PARAMETERS = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "max_tokens", "stop", "seed", "logit_bias", "logprobs", "top_logprobs", "response_format", "structured_outputs",
    "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "include_reasoning",
)  # fmt: skip
_OF_TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
_OF_REASONING = frozenset({"reasoning_effort", "include_reasoning"})

Input = Literal["text", "image", "video", "file"]


class Abilities(msgspec.Struct, frozen=True):
    """Limits and abilities of a loaded model."""

    max_model_len: int
    """Prompt and answer together, in tokens."""
    max_prompt_len: int
    max_output_len: int
    max_logprobs: int
    inputs: tuple[Input, ...]
    """OpenRouter's names; "file" means documents."""
    tools: bool
    reasons: bool
    max_request_bytes: int
    """Maximum size of a request's body, with files in base64."""
    useful_image_pixels: int | None
    """Area above which a larger image shows the model nothing more; None: unknown."""
    defaults: dict[str, float]
    """Sampling parameters of requests that set none, by OpenRouter's names."""
    num_parameters: int = 0
    """0: unknown."""
    weight_bytes: int = 0
    """Memory that the weights take; 0: unknown."""


class Architecture(msgspec.Struct):
    """Kinds of input and output, in OpenRouter's form."""

    modality: str
    input_modalities: tuple[Input, ...]
    output_modalities: tuple[str, ...] = ("text",)


class TopProvider(msgspec.Struct):
    """Limits of the server, in OpenRouter's form."""

    context_length: int
    max_completion_tokens: int
    is_moderated: bool = False


class ModelCard(msgspec.Struct):
    """An entry of ``/v1/models``. Abilities are null while the model loads."""

    id: str
    name: str
    display_name: str
    created: int
    created_at: str
    max_model_len: int | None = None
    """Prompt and answer together, in tokens."""
    context_length: int | None = None
    max_input_tokens: int | None = None
    max_tokens: int | None = None
    architecture: Architecture | None = None
    supported_parameters: list[str] | None = None
    default_parameters: dict[str, float] | None = None
    max_request_bytes: int | None = None
    useful_image_pixels: int | None = None
    """Area above which a larger image shows the model nothing more, unless a request sets its detail or budget."""
    capabilities: list[str] | dict[str, Any] | None = None
    top_provider: TopProvider | None = None
    object: str = "model"
    type: str = "model"
    lifecycle: str = "active"
    owned_by: str = "vlmserve"
    parent: str | msgspec.UnsetType = msgspec.UNSET
    """The model that an adapter adapts."""
    root: str | msgspec.UnsetType = msgspec.UNSET
    """The digest of an adapter's content, once the adapter is loaded."""
    mixes: list[str] | msgspec.UnsetType = msgspec.UNSET
    """The adapters that an X-LoRA checkpoint mixes."""
    state: str | msgspec.UnsetType = msgspec.UNSET
    """unloaded, loading, loaded, unloading or failed, if models load on demand."""
    reason: str | msgspec.UnsetType = msgspec.UNSET
    """Why it could not be loaded."""


class ModelList(msgspec.Struct):
    """The response of ``/v1/models``, always one page."""

    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    object: str = "list"
    has_more: bool = False


def model_list(cards: list[ModelCard]) -> ModelList:
    return ModelList(cards, cards[0].id if cards else None, cards[-1].id if cards else None)


def model_card(name: str, created: int, abilities: Abilities | None, *, for_anthropic: bool = False) -> ModelCard:
    """Make an entry. abilities: None while the model loads. for_anthropic: use Anthropic's ``capabilities``."""
    when = datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat().replace("+00:00", "Z")
    card = ModelCard(name, name, name, created, when)
    if abilities is None:
        return card
    card.max_model_len = card.context_length = abilities.max_model_len
    card.max_input_tokens, card.max_tokens = abilities.max_prompt_len, abilities.max_output_len
    card.architecture = Architecture(f"{'+'.join(abilities.inputs)}->text", abilities.inputs)
    card.top_provider = TopProvider(abilities.max_model_len, abilities.max_output_len)
    lacking = (frozenset() if abilities.tools else _OF_TOOLS) | (frozenset() if abilities.reasons else _OF_REASONING)
    known = ChatRequest.model_fields.keys() - lacking
    card.supported_parameters = [name for name in _OPENROUTER_PARAMETERS if name in known]
    card.default_parameters, card.max_request_bytes = abilities.defaults, abilities.max_request_bytes
    card.useful_image_pixels = abilities.useful_image_pixels
    card.capabilities = _as_anthropic(abilities) if for_anthropic else _as_ollama(abilities)
    return card


def _as_ollama(abilities: Abilities) -> list[str]:
    has = {"vision": "image" in abilities.inputs, "tools": abilities.tools, "thinking": abilities.reasons}
    return ["completion", *(name for name, is_there in has.items() if is_there)]


def _as_anthropic(abilities: Abilities) -> dict[str, Any]:
    has = {
        "batch": False,
        "citations": False,
        "code_execution": False,
        "context_management": False,
        "image_input": "image" in abilities.inputs,
        "pdf_input": "file" in abilities.inputs,
        "server_tools": False,
        "structured_outputs": True,
    }
    reasons = {"supported": abilities.reasons}
    levels = {level: {"supported": False} for level in ("low", "medium", "high", "max")}
    types = {"adaptive": reasons, "enabled": reasons, "disabled": {"supported": True}}
    return {
        **{name: {"supported": is_there} for name, is_there in has.items()},
        "thinking": {**reasons, "types": types},
        "effort": {"supported": False, **levels},
    }

"""Spans by https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/, without prompts and answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from starlette.requests import Request

from vlmserve.server.generation import Generation, GenerationRequest
from vlmserve.types import RequestTimings

if TYPE_CHECKING:
    from vlmserve.server.tracing import Attributes, Trace

TRACE = "vlmserve.trace"
"""Key in an ASGI scope: the request's trace."""


def trace_of(request: Request) -> Trace | None:
    trace: Trace | None = request.scope.get(TRACE)
    return trace if trace is not None and trace.is_recorded else None


def record_preparation(trace: Trace, seconds: float) -> None:
    """Add the span of preparing the prompt, which ends now."""
    trace.part("media", time.time() - seconds, seconds)


def record_generation(trace: Trace, operation: str, generation: Generation) -> None:
    """Add spans and attributes of an ended generation. operation: OpenTelemetry's name of it."""
    usage, details = generation.usage, generation.usage.prompt_tokens_details
    reasons = [answer.finish_reason for answer in generation.answers if answer.finish_reason is not None]
    attributes: dict[str, str | bool | int | float | list[str]] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "vlmserve",
        "gen_ai.request.model": generation.model,
        "gen_ai.response.model": generation.model,
        "gen_ai.response.id": generation.id,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": details.cached_tokens,
        "vlmserve.images": details.images,
        "vlmserve.images_encoded": details.images_encoded,
    }
    if reasons:
        attributes["gen_ai.response.finish_reasons"] = reasons
    firsts = [answer.ttft for answer in generation.answers if answer.ttft is not None]
    if firsts:
        attributes["gen_ai.response.time_to_first_chunk"] = min(firsts)
    trace.describe(f"{operation} {generation.model}", {**attributes, **_request_attributes(generation.request)})
    for answer in generation.answers:
        if answer.timings is not None:
            _record_parts(trace, answer.timings, {"vlmserve.answer": answer.index})


def _request_attributes(request: GenerationRequest) -> Attributes:
    params = request.params
    asked: dict[str, int | float | None] = {
        "gen_ai.request.choice.count": request.num_answers if request.num_answers > 1 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": params.seed,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _record_parts(trace: Trace, timings: RequestTimings, attributes: Attributes) -> None:
    """Image encoding may be spread over several prefill steps; its span has their total length."""
    started = timings.arrived + timings.queue
    answered = started + timings.prefill
    trace.part("queue", timings.arrived, timings.queue, attributes)
    if timings.vision:
        trace.part("vision", timings.arrived + timings.before_vision, timings.vision, attributes)
    trace.part("prefill", started, timings.prefill, attributes)
    if timings.decode is not None:
        trace.part("decode", answered, timings.decode, attributes)

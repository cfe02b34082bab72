"""What a trace tells of a request: the parts of its way, and attributes by OpenTelemetry's conventions.

Of what is asked and answered there is nothing in it. https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from starlette.requests import Request

from vlmserve.server.generation import Generation, Question
from vlmserve.types import RequestTimings

if TYPE_CHECKING:
    from vlmserve.server.tracing import Attributes, Trace

TRACE = "vlmserve.trace"
"""Where the trace of a request is in its ASGI scope, if it has one."""


def trace_of(request: Request) -> Trace | None:
    """The trace that a request has, if somebody will see it."""
    trace: Trace | None = request.scope.get(TRACE)
    return trace if trace is not None and trace.is_recorded else None


def tell_preparation(trace: Trace, seconds: float) -> None:
    """The prompt is made, or cannot be: that took so long until now."""
    trace.part("media", time.time() - seconds, seconds)


def tell_generation(trace: Trace, operation: str, generation: Generation) -> None:
    """A request is answered, or its answer has ended in some other way. operation: as the conventions call it."""
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
    trace.describe(f"{operation} {generation.model}", {**attributes, **_asked(generation.question)})
    for answer in generation.answers:
        if answer.timings is not None:
            _tell_parts(trace, answer.timings, {"vlmserve.answer": answer.index})


def _asked(question: Question) -> Attributes:
    params = question.params
    asked: dict[str, int | float | None] = {
        "gen_ai.request.choice.count": question.num_answers if question.num_answers > 1 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": params.seed,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _tell_parts(trace: Trace, timings: RequestTimings, attributes: Attributes) -> None:
    """An answer's way through the engine. Encoding may be spread over several steps of a prefill; it is shown from
    where it began, as long as it took in all."""
    started = timings.arrived + timings.queue
    answered = started + timings.prefill
    trace.part("queue", timings.arrived, timings.queue, attributes)
    if timings.vision:
        trace.part("vision", timings.arrived + timings.before_vision, timings.vision, attributes)
    trace.part("prefill", started, timings.prefill, attributes)
    if timings.decode is not None:
        trace.part("decode", answered, timings.decode, attributes)

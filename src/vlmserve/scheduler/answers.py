"""Extends answers by a step's tokens, and finishes them."""

from __future__ import annotations

from vlmserve.scheduler.request import Request
from vlmserve.steps import ModelRunnerOutput
from vlmserve.types import EngineOutput, FinishReason


def extend_answer(request: Request, output: ModelRunnerOutput) -> EngineOutput:
    """An end token finishes the answer and is not part of it."""
    request_id = request.request_id
    new: list[int] = []
    reason: FinishReason | None = None
    stop_token_id = None
    for token in output.token_ids[request_id]:
        if token in request.end_token_ids:
            reason, stop_token_id = "stop", token
            request.stop_token_id = token
            break
        request.token_ids.append(token)
        new.append(token)
        if len(request.token_ids) >= request.max_len:
            reason = "length"
            break
    result = output.results.get(request_id)
    reason = output.finish_reasons.get(request_id, reason if result is None else "stop")
    error, error_param = _error(request, output) if output.failures else (None, None)
    logprobs = output.logprobs.get(request_id)
    stop_logprobs = None
    if logprobs is not None and stop_token_id is not None:
        stop_logprobs = logprobs[len(new)]
    prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    missed, request.missed = request.missed, None
    return EngineOutput(
        request_id,
        new,
        reason if error is None else "error",
        stop_token_id,
        error,
        request.num_cached or 0,
        request.num_encoded,
        logprobs=None if logprobs is None else logprobs[: len(new)],
        prompt_logprobs=prompt_logprobs,
        missed=missed,
        error_param=error_param,
        stop_logprobs=stop_logprobs,
        result=result,
        accepted_drafts=0 if request.drafting is None else request.drafting.num_accepted,
        rejected_drafts=0 if request.drafting is None else request.drafting.num_rejected,
    )


def _error(request: Request, output: ModelRunnerOutput) -> tuple[str | None, str | None]:
    failure = output.failures.get(request.request_id)
    if failure is None:
        return None, None
    if failure.kind == "not_finite":
        return "the model's output is not a number; try another dtype (--dtype float32)", None
    if failure.kind == "no_token":
        return "no token of allowed_token_ids may come next; allow more tokens", "allowed_token_ids"
    if failure.kind == "out_of_memory":
        return "the device has too little memory for it; send fewer or smaller images, or a shorter prompt", None
    source = None if request.params.grammar is None else request.params.grammar.source
    return f"the answer cannot follow its grammar: {failure.message}", source

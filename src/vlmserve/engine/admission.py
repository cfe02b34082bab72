"""Request checks that every engine makes before queueing."""

from __future__ import annotations

from collections.abc import Container

from vlmserve.errors import InvalidRequestError, PromptTooLongError, TooManyImagesError
from vlmserve.sampling_params import MAX_LOGPROB_TOKEN_IDS
from vlmserve.tasks import Embed, Generate, Score, ScoreBranch, Task
from vlmserve.types import EngineRequest, ImageSpan, ModelInfo, Prompt, SamplingParams


def check_request(request: EngineRequest, info: ModelInfo, unfinished: Container[str], *, max_logprobs: int) -> None:
    """unfinished: ids in use. max_logprobs: maximum alternatives.

    Raises PromptTooLongError, TooManyImagesError, or InvalidRequestError for an id in use, an empty prompt, a token id
    outside the vocabulary, too many alternatives, or images outside the prompt.
    """
    if request.request_id in unfinished:
        raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
    prompt = request.prompt
    if not prompt.token_ids:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    if len(prompt.token_ids) > info.max_prompt_len:
        raise PromptTooLongError.of(len(prompt.token_ids), info.max_prompt_len, param="messages")
    if prompt.num_images and not info.supports_images:
        raise TooManyImagesError("this model takes no images; send text only", param="messages")
    end = 0
    for span in prompt.images:
        if span.start < end or span.end > len(prompt.token_ids) or span.image.num_embeddings < 1:
            raise InvalidRequestError("the prompt's images overlap or do not fit into it", param="prompt")
        _check_text(span, prompt)
        end = span.end
    _check_token_ids(prompt, info.vocab_size)
    _check_params(request.params, info.vocab_size, max_logprobs)
    _check_task(request, info)


def check_min_tokens(wanted: int, prompt: Prompt, info: ModelInfo) -> None:
    """Check that the shortest allowed answer fits into the context. Raises InvalidRequestError.

    `max_tokens` needs no check: answers end with the context.
    """
    num_tokens, context = len(prompt.token_ids), info.max_prompt_len + 1
    if num_tokens < context < num_tokens + wanted:
        raise InvalidRequestError(
            f"min_tokens is {wanted}, but the prompt of {num_tokens} tokens leaves {context - num_tokens} of the "
            f"context of {context}; lower min_tokens",
            param="min_tokens",
        )


def _check_task(request: EngineRequest, info: ModelInfo) -> None:
    task: Task = request.task
    if isinstance(task, Generate):
        return
    if request.beams is not None or request.params.grammar is not None or request.params.prompt_logprobs is not None:
        raise InvalidRequestError("only generation takes beams, a grammar or prompt_logprobs", param="task")
    if isinstance(task, Embed) and not 1 <= (task.dimensions or 1) <= info.embedding_size:
        raise InvalidRequestError(
            f"dimensions must be from 1 to {info.embedding_size}, the size of this model's embeddings; "
            f"got {task.dimensions}",
            param="dimensions",
        )
    if isinstance(task, Score):
        _check_continuations(task, len(request.prompt.token_ids), info)
    if isinstance(task, ScoreBranch):
        raise InvalidRequestError("ask for continuations with Score; its branches are the engine's own", param="task")


def _check_continuations(task: Score, num_tokens: int, info: ModelInfo) -> None:
    if not task.continuations or not all(task.continuations):
        raise InvalidRequestError("give continuations of at least one token each", param="continuations")
    if not all(0 <= token < info.vocab_size for tokens in task.continuations for token in tokens):
        raise InvalidRequestError(f"a token id is not in the vocabulary of {info.vocab_size}", param="continuations")
    if num_tokens + task.longest - 1 > info.max_prompt_len:
        raise PromptTooLongError.of(num_tokens + task.longest - 1, info.max_prompt_len, param="messages")


def _check_params(params: SamplingParams, vocab_size: int, max_logprobs: int) -> None:
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > max_logprobs:
            raise InvalidRequestError(
                f"{name} must be at most {max_logprobs} here, got {count}; --max-logprobs sets how many", param=name
            )
    if len(params.logprob_token_ids or ()) > MAX_LOGPROB_TOKEN_IDS:
        raise InvalidRequestError(
            f"logprob_token_ids must have at most {MAX_LOGPROB_TOKEN_IDS} token ids", param="logprob_token_ids"
        )
    for name in ("logit_bias", "allowed_token_ids", "logprob_token_ids"):
        unknown = max(getattr(params, name) or (), default=0)
        if unknown >= vocab_size:
            raise InvalidRequestError(
                f"token id {unknown} in {name} is not in the vocabulary of {vocab_size}", param=name
            )


def _check_text(span: ImageSpan, prompt: Prompt) -> None:
    """Check that text inside an image equals the prompt's tokens, which identify cached blocks."""
    before = -1
    for place, token_id in span.image.text:
        if not before < place < span.image.num_tokens or prompt.token_ids[span.start + place] != token_id:
            raise InvalidRequestError("the text inside an image is not that of the prompt", param="prompt")
        before = place


def _check_token_ids(prompt: Prompt, vocab_size: int) -> None:
    """Check that text is in the vocabulary. Placeholders may be outside."""
    if min(prompt.token_ids) >= 0 and max(prompt.token_ids) < vocab_size:
        return
    placeholders = {
        position
        for span in prompt.images
        for run in span.placement.runs(span.start, span.end)
        for position in range(run.first, run.last)
    }
    for position, token_id in enumerate(prompt.token_ids):
        if token_id < 0 or (token_id >= vocab_size and position not in placeholders):
            raise InvalidRequestError(
                f"token id {token_id} at position {position} is not in the vocabulary of {vocab_size}", param="prompt"
            )

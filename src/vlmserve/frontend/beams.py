"""The answers of a beam search as streams."""

from __future__ import annotations

import asyncio
from typing import Self

import msgspec

from vlmserve.errors import InvalidRequestError, VLMServeError
from vlmserve.frontend.client import EngineClient
from vlmserve.types import MAX_BIASES, BeamSearch, EngineOutput, EngineRequest, SamplingParams


class BeamStream:
    """One answer of a beam search. Closing any of the streams cancels the search."""

    def __init__(self, search: asyncio.Task[list[EngineOutput]], place: int) -> None:
        self._search = search
        self._place = place
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EngineOutput:
        if self._ended:
            raise StopAsyncIteration
        outputs = await asyncio.shield(self._search)
        self._ended = True
        return outputs[self._place]

    def close(self) -> None:
        self._ended = True
        self._search.cancel()


def start_beam_search(
    client: EngineClient, request: EngineRequest, search: BeamSearch, num_answers: int, max_logprobs: int
) -> list[BeamStream]:
    """Return the streams of the `num_answers` best answers, best first.

    Raises InvalidRequestError for unsupported parameters. The streams raise what `EngineClient.submit_together` does.
    """
    _check_params(request.params)
    needed = search.num_choices(len(search.end_token_ids(request.params, client.info.end_token_ids)))
    needed += len(request.params.bad_token_ids)
    if needed > max_logprobs:
        raise InvalidRequestError(
            f"{search.width} beams need {needed} alternatives of each token; the server allows {max_logprobs} "
            "(--max-logprobs)",
            param="best_of",
        )
    task = asyncio.ensure_future(_search(client, msgspec.structs.replace(request, beams=search), num_answers))
    # Closed streams leave the error unread.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return [BeamStream(task, place) for place in range(num_answers)]


async def _search(client: EngineClient, request: EngineRequest, num_answers: int) -> list[EngineOutput]:
    [stream] = await client.submit_together([request])
    try:
        async for output in stream:
            if output.beams is None:
                raise VLMServeError(output.error or "The engine aborted this request")
            return [
                msgspec.structs.replace(
                    output,
                    request_id=f"{request.request_id}-{place}",
                    token_ids=answer.token_ids,
                    finish_reason=answer.finish_reason,
                    stop_token_id=answer.stop_token_id,
                    images_encoded=output.images_encoded if place == 0 else 0,
                )
                for place, answer in enumerate(output.beams[:num_answers])
            ]
        raise VLMServeError("The engine returned no output for a beam search")
    finally:
        stream.close()


def _check_params(params: SamplingParams) -> None:
    """Raise InvalidRequestError for parameters that beam search does not support."""
    if len(params.allowed_token_ids or ()) > MAX_BIASES:
        raise InvalidRequestError(
            f"allowed_token_ids must have at most {MAX_BIASES} token ids with use_beam_search",
            param="allowed_token_ids",
        )
    neutral = SamplingParams(temperature=0)
    fields = (
        "logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram_size",
        "logprobs", "prompt_logprobs", "logprob_token_ids", "thinking_token_budget", "stop",
    )  # fmt: skip
    if params.grammar is not None:
        source = params.grammar.source
        raise InvalidRequestError(f"{source} cannot be combined with use_beam_search; leave it out", param=source)
    for name in fields:
        if getattr(params, name) != getattr(neutral, name):
            raise InvalidRequestError(f"{name} cannot be combined with use_beam_search; leave it out", param=name)

"""From logits to tokens: sampling, verifying draft tokens, logprobs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmserve.kernels.torch_sampling import Draw
from vlmserve.kernels.transfers import to_device
from vlmserve.runner.requests import RequestState, ScheduledRequest
from vlmserve.sampling.logprobs import token_logprobs
from vlmserve.sampling.sampler import sample
from vlmserve.steps import ModelRunnerOutput, RequestFailure


def sample_tokens(logits: Tensor, batch: Sequence[ScheduledRequest], output: ModelRunnerOutput, draw: Draw) -> None:
    """Sample the next tokens of each request, and append them to the requests' states and to `output`.

    logits: float32 ``[rows, vocabulary]``, `num_sampled` rows of each request in order; overwritten.
    draw: the device's.

    A draft is accepted if it equals the token that is sampled in its place; then the row after it is sampled as well.
    Rows are sampled in rounds, one row of each request in each, because penalties, grammars and random numbers depend
    on the tokens before. So answers are the same with and without drafts.
    """
    first = 0
    going: list[tuple[int, ScheduledRequest]] = []
    for request in batch:
        if request.num_sampled:
            going.append((first, request))
            output.token_ids[request.state.request_id] = []
            if request.state.params.logprobs is not None:
                output.logprobs[request.state.request_id] = []
        first += request.num_sampled
    depth = 0
    while going:
        all_rows = len(going) == len(logits)
        rows = logits if all_rows else logits[to_device(torch.tensor([row + depth for row, _ in going]), logits.device)]
        tokens = _sample_once(rows, [request.state for _, request in going], output, draw)
        drafted = []
        for (row, request), token in zip(going, tokens, strict=True):
            continues = _append(request.state, token, output)
            if continues and depth < len(request.draft_token_ids) and request.draft_token_ids[depth] == token:
                drafted.append((row, request))
        going = drafted
        depth += 1


def can_draw_later(batch: Sequence[ScheduledRequest]) -> bool:
    """Whether at most one token of each request is wanted, and nothing on the host has a say in it."""
    return all(
        request.num_sampled <= 1
        and not request.draft_token_ids
        and request.state.matcher is None
        and request.state.permitted is None
        and request.state.forced is None
        and request.state.params.logprobs is None
        for request in batch
    )


def append_drawn(tokens: Sequence[int], drawn: Sequence[ScheduledRequest], output: ModelRunnerOutput) -> None:
    """Append tokens that were drawn later, one of each request in order, to their states and to `output`."""
    for request, token in zip(drawn, tokens, strict=True):
        output.token_ids[request.state.request_id] = []
        _append(request.state, None if token < 0 else token, output)


def _sample_once(
    logits: Tensor, states: Sequence[RequestState], output: ModelRunnerOutput, draw: Draw
) -> list[int | None]:
    """A token for each row, and its logprobs where they are asked for."""
    asking = [index for index, state in enumerate(states) if state.params.logprobs is not None]
    raw = logits[asking] if asking else None  # sampling overwrites them
    rows = [state.sampling_row() for state in states]
    drawn = sample(logits, rows, draw)
    tokens = [
        token if token is None or state.matcher is None else state.settle(token)
        for token, state in zip(drawn, states, strict=True)
    ]
    if raw is not None:
        chosen = [tokens[index] or 0 for index in asking]
        num_top = [states[index].params.logprobs or 0 for index in asking]
        wanted = [states[index].params.logprob_token_ids for index in asking]
        for index, scores in zip(asking, token_logprobs(raw, chosen, num_top, wanted), strict=True):
            if tokens[index] is not None:
                output.logprobs[states[index].request_id].append(scores)
    return tokens


def _append(state: RequestState, token: int | None, output: ModelRunnerOutput) -> bool:
    """Append a sampled token; None: no token could be sampled. Returns whether another one may follow."""
    request_id, matcher = state.request_id, state.matcher
    if token is None:
        if matcher is not None and matcher.finished:
            output.finish_reasons[request_id] = "stop"
        elif matcher is not None and matcher.error is not None:
            output.failures[request_id] = RequestFailure("grammar", matcher.error)
        else:
            output.failures[request_id] = RequestFailure("not_finite" if state.permitted is None else "no_token")
        return False
    output.token_ids[request_id].append(token)
    if token in state.end_token_ids:
        return False
    state.append(token)
    if matcher is not None and not state.is_thinking:
        if matcher.cut and matcher.complete:
            output.finish_reasons[request_id] = "length"
        elif matcher.finished:
            output.finish_reasons[request_id] = "stop"
        return request_id not in output.finish_reasons
    return True

"""Pass a step's rows to heads, and return the results of finished prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vlmserve.devices.out_of_memory import with_less_memory
from vlmserve.kernels.transfers import to_device
from vlmserve.models.protocols import LanguageModel
from vlmserve.runner.adapters import RunnerAdapters
from vlmserve.runner.heads.head import Head
from vlmserve.runner.heads.scores import TokenHead, logprobs_after
from vlmserve.runner.requests import ScheduledRequest
from vlmserve.steps import ModelRunnerOutput, RequestFailure
from vlmserve.tasks import TaskResult


def head_rows(scheduled: Sequence[ScheduledRequest], device: torch.device) -> Tensor | None:
    """Return the rows that heads read, int64, in the order of requests. None: no heads."""
    rows: list[int] = []
    first, has_heads = 0, False
    for request in scheduled:
        if request.state.head is not None:
            has_heads = True
            rows += [first + place - request.start for place in _places(request)]
        first += request.num_tokens
    return to_device(torch.tensor(rows, dtype=torch.int64), device) if has_heads else None


def read_rows(
    scheduled: Sequence[ScheduledRequest], hidden: Tensor, model: LanguageModel, adapters: RunnerAdapters | None
) -> list[tuple[str, Tensor]]:
    """Give each head its rows. Returns finished results. hidden: ``[rows of head_rows, hidden_size]``."""
    results: list[tuple[str, Tensor]] = []
    read = [(request, request.state.head, _places(request)) for request in scheduled if request.state.head is not None]
    logprobs = _logprobs(read, hidden, model, adapters)
    first = 0
    for request, head, places in read:
        state, count = request.state, len(places)
        if count:
            rows = logprobs.get(state.request_id)
            head.take(hidden[first : first + count] if rows is None else rows, count)
        if request.end >= len(state.token_ids):
            results.append((state.request_id, head.result()))
        first += count
    return results


def _logprobs(
    read: Sequence[tuple[ScheduledRequest, Head, range]],
    hidden: Tensor,
    model: LanguageModel,
    adapters: RunnerAdapters | None,
) -> dict[str, Tensor]:
    """Computes the rows of each adapter together. read: requests with the places that their heads read."""
    groups: dict[bytes, list[tuple[ScheduledRequest, TokenHead, range, int]]] = {}
    first = 0
    for request, head, places in read:
        if places and isinstance(head, TokenHead):
            groups.setdefault(request.state.adapter, []).append((request, head, places, first))
        first += len(places)
    found: dict[str, Tensor] = {}
    for adapter, members in groups.items():
        rows: list[int] = []
        wanted: list[Sequence[int]] = []
        sizes: list[int] = []
        for request, token_head, places, first in members:
            own = [token_head.tokens_after(place, request.state.token_ids) for place in places]
            rows += range(first, first + len(places))
            wanted += own
            sizes.append(sum(map(len, own)))
        if adapters is not None:
            adapters.use_for_all(adapter)
        states = hidden if len(rows) == len(hidden) else hidden[torch.tensor(rows, device=hidden.device)]
        ids = [request.state.request_id for request, *_ in members]
        found |= zip(ids, torch.split(logprobs_after(states, wanted, model), sizes), strict=True)
    return found


def write_results(results: Sequence[tuple[str, Tensor]], output: ModelRunnerOutput) -> None:
    tensors = [values for _, values in results]
    joined = with_less_memory(lambda: torch.cat(tensors).cpu(), lambda: torch.cat([tensor.cpu() for tensor in tensors]))
    host = joined.numpy().astype("<f4", copy=False)
    are_finite = bool((host < math.inf).all())
    first = 0
    for request_id, tensor in results:
        values = host[first : first + len(tensor)]
        first += len(tensor)
        output.token_ids[request_id] = []
        if are_finite or (values < math.inf).all():
            output.results[request_id] = TaskResult(values.tobytes())
        else:
            output.failures[request_id] = RequestFailure("not_finite")


def _places(request: ScheduledRequest) -> range:
    head = request.state.head
    return range(0) if head is None else head.places(request.start, request.end)

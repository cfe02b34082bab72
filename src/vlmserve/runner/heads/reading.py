"""Pass a step's rows to heads, and return the results of finished prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vlmserve.kernels.transfers import to_device
from vlmserve.models.protocols import LanguageModel
from vlmserve.runner.adapters import RunnerAdapters
from vlmserve.runner.heads.branches import BranchHead, follower_logprobs
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
    scheduled: Sequence[ScheduledRequest],
    hidden: Tensor,
    logits: Tensor,
    model: LanguageModel,
    adapters: RunnerAdapters | None,
) -> list[tuple[str, Tensor]]:
    """Give each head its rows, before sampling changes the logits. Returns finished results by request.

    hidden: ``[rows of head_rows, hidden_size]``. logits: ``[rows, vocabulary]``, `num_sampled` rows per request.
    """
    results: list[tuple[str, Tensor]] = []
    followers = _followers(scheduled, hidden, model, adapters)
    first = first_logits = 0
    for request in scheduled:
        head, count = request.state.head, len(_places(request))
        if head is not None:
            if head.reads_logits:
                rows = logits[first_logits : first_logits + request.num_sampled]
            elif isinstance(head, BranchHead):
                rows = followers[request.state.request_id]
            else:
                rows = hidden[first : first + count]
            if len(rows):
                head.take(rows)
            if request.end == len(request.state.token_ids):
                results.append((request.state.request_id, head.result()))
        first += count
        first_logits += request.num_sampled

    return results


def _followers(
    scheduled: Sequence[ScheduledRequest], hidden: Tensor, model: LanguageModel, adapters: RunnerAdapters | None
) -> dict[str, Tensor]:
    """Return log-probabilities for branches, computed together for each adapter."""
    groups: dict[bytes, list[tuple[ScheduledRequest, BranchHead, int]]] = {}
    first = 0
    for request in scheduled:
        if isinstance(request.state.head, BranchHead):
            groups.setdefault(request.state.adapter, []).append((request, request.state.head, first))
        first += len(_places(request))
    found: dict[str, Tensor] = {}
    for adapter, members in groups.items():
        rows: list[int] = []
        token_ids: list[int] = []
        counts: list[int] = []
        for request, head, first in members:
            places = _places(request)
            rows += range(first, first + len(places))
            token_ids += head.followers(request.state.token_ids, places)
            counts.append(len(places))
        scores = hidden.new_empty(0, dtype=torch.float32)
        if rows:
            if adapters is not None:
                adapters.use_for_all(adapter)
            scores = follower_logprobs(hidden[torch.tensor(rows, device=hidden.device)], token_ids, model)
        ids = [request.state.request_id for request, *_ in members]
        found |= zip(ids, torch.split(scores, counts), strict=True)
    return found


def write_results(results: Sequence[tuple[str, Tensor]], output: ModelRunnerOutput) -> None:
    """Wait for the device and output results."""
    host = torch.cat([values for _, values in results]).cpu()
    sizes = [len(values) for _, values in results]
    for (request_id, _), values in zip(results, torch.split(host, sizes), strict=True):
        output.token_ids[request_id] = []
        if (values < math.inf).all():
            output.results[request_id] = TaskResult(values.numpy().astype("<f4").tobytes())
        else:
            output.failures[request_id] = RequestFailure("not_finite")


def _places(request: ScheduledRequest) -> range:
    head = request.state.head
    if head is None or head.reads_logits:
        return range(0)
    return head.places(request.start, request.end)

"""Samples tokens from logits, verifies drafts, and computes log-probabilities."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vlmserve.devices.out_of_memory import MEMORY_ERRORS, is_out_of_memory
from vlmserve.kernels.torch_sampling import Draw
from vlmserve.kernels.transfers import to_device
from vlmserve.runner.requests import RequestState, ScheduledRequest
from vlmserve.sampling.guide import Guide
from vlmserve.sampling.logprobs import token_logprobs
from vlmserve.sampling.sampler import sample
from vlmserve.steps import ModelRunnerOutput, RequestFailure

logger = logging.getLogger(__name__)

PATIENCE = 0.005
"""Seconds that a step waits for grammars. Ordinary masks take less."""


class _Row(NamedTuple):
    """A token to sample, from row `place` of the step's logits or from `kept`."""

    state: RequestState
    place: int | None = None
    drafts: Sequence[int] = ()
    kept: Tensor | None = None
    num_before: int = 0
    """Drafts before it that the same round verifies."""

    @property
    def pending(self) -> Future[Any] | None:
        return None if self.state.guide is None else self.state.guide.pending


class TokenSampler:
    """A row with a slow grammar keeps its logits in host memory until a later step, at most one per request."""

    def __init__(self, draw: Draw, device: torch.device, *, waits: bool = False) -> None:
        """waits: each call of `draw` waits for the device."""
        self.tells_forced = False
        """Outputs have `forced` tokens."""
        self._draw, self._device, self._waits = draw, device, waits
        self._late: dict[str, _Row] = {}
        """Rows whose masks were not ready in their step, by request."""

    def drop(self, finished: Iterable[str], scheduled: Sequence[ScheduledRequest]) -> None:
        """Drop late rows of finished requests, and of requests whose logits are computed again."""
        if self._late:
            for request_id in (*finished, *(request.state.request_id for request in scheduled)):
                self._late.pop(request_id, None)

    def sample(self, logits: Tensor, batch: Sequence[ScheduledRequest], output: ModelRunnerOutput) -> None:
        """Sample the next tokens of each request and of late rows, into request states and `output`.

        logits: float32 ``[rows, vocabulary]``, `num_sampled` rows per request; overwritten. A draft is accepted if it
        equals the token sampled in its place; then the row after it is sampled too. Each round samples one row per
        request, because penalties and grammars depend on earlier tokens. If rounds wait for the device, the first one
        samples all rows of requests without these.
        """
        first = 0
        rows: list[_Row] = []
        for request in batch:
            if request.num_sampled and request.state.head is None:
                rows.append(_Row(request.state, first, request.draft_token_ids))
            first += request.num_sampled
        deadline = time.monotonic() + PATIENCE
        if self._late:
            _wait(rows, deadline)
            rows += [row for row in self._late.values() if row.pending is None]
        guided = [row.state for row in rows if row.state.guide is not None] if self.tells_forced else []
        while rows:
            rows = self._round(rows, logits, output, deadline)
        for state in guided:
            if state.guide is not None and state.guide.pending is None and not state.is_thinking:
                output.forced[state.request_id] = state.guide.forced

    def collect(self, timeout: float, output: ModelRunnerOutput) -> None:
        """Sample ready late rows; wait up to `timeout` seconds for one. Their requests fail if memory runs out."""
        if not self._late:
            return
        pending = [row.pending for row in self._late.values()]
        if all(pending):
            wait(filter(None, pending), timeout, FIRST_COMPLETED)
        rows = [row for row in self._late.values() if row.pending is None]
        try:
            if rows:
                self._round(rows, None, output, time.monotonic() + PATIENCE)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("Memory ran out: %s", error)
            for row in rows:
                if self._late.pop(row.state.request_id, None) is not None:
                    output.token_ids[row.state.request_id] = []
                    output.failures[row.state.request_id] = RequestFailure("out_of_memory")

    def _round(
        self, rows: Sequence[_Row], logits: Tensor | None, output: ModelRunnerOutput, deadline: float
    ) -> list[_Row]:
        """Returns the rows after accepted drafts."""
        if any([row.state.guide for row in rows]):
            _wait(rows, deadline)
        ready = []
        for row in rows:
            if row.state.guide is None or row.pending is None:
                ready.append(row)
            elif row.place is not None and logits is not None:
                self._keep(row.state, logits[row.place], output)
        if not ready:
            return []
        if self._waits:
            ready = [one for row in ready for one in _with_drafts(row)]
        own = self._gather(ready, logits)
        searching = [index for index, row in enumerate(ready) if row.state.guide and row.state.guide.searches]
        raw = dict(zip(searching, own[searching], strict=True)) if searching else {}
        asking = [index for index, row in enumerate(ready) if row.state.params.logprobs is not None]
        raw_asked = own[asking] if asking else None  # sampling overwrites logits
        drawn = sample(own, [row.state.sampling_row(row.num_before) for row in ready], self._draw)
        tokens, undecided = _settle(ready, drawn, deadline) if searching else (drawn, frozenset[int]())
        if raw_asked is not None:
            _add_logprobs(raw_asked, asking, ready, tokens, undecided, output)
        drafted: list[_Row] = []
        for index, (row, token) in enumerate(zip(ready, tokens, strict=True)):
            if index in undecided:
                self._keep(row.state, raw[index], output)
                continue
            if row.num_before:
                if not (drafted and drafted[-1].state is row.state):
                    continue  # an earlier draft was wrong
                drafted.pop()
            self._late.pop(row.state.request_id, None)
            goes_on = _append(row.state, token, output)
            if goes_on and row.place is not None and row.drafts and row.drafts[0] == token:
                drafted.append(_Row(row.state, row.place + 1, row.drafts[1:]))
        return drafted

    def _keep(self, state: RequestState, logits: Tensor, output: ModelRunnerOutput) -> None:
        """Sample ``[vocabulary]`` logits later. Logits after an accepted draft are recomputed instead."""
        if state.request_id not in output.token_ids:
            self._late[state.request_id] = _Row(state, kept=logits.to("cpu", copy=True))

    def _gather(self, rows: Sequence[_Row], logits: Tensor | None) -> Tensor:
        """Return ``[rows, vocabulary]``: `logits` itself if it has exactly these rows."""
        places = [row.place for row in rows if row.place is not None]
        kept = [to_device(row.kept, self._device) for row in rows if row.kept is not None]
        late = [torch.stack(kept)] if kept else []
        if logits is None or not places:
            return late[0]
        if len(places) < len(logits):
            logits = logits[to_device(torch.tensor(places), logits.device)]
        return torch.cat([logits, *late]) if late else logits


def _with_drafts(row: _Row) -> list[_Row]:
    """Add rows after drafts, if sampling them needs none of the tokens before."""
    state, place = row.state, row.place
    depends = state.params.reads_tokens or state.params.logprobs is not None or state.thinking is not None
    if place is None or depends:
        return [row]
    following = range(1, len(row.drafts) + 1)
    return [row, *(_Row(state, place + count, row.drafts[count:], num_before=count) for count in following)]


def can_draw_later(batch: Sequence[ScheduledRequest]) -> bool:
    """Return whether each request samples at most one token, without the host."""
    return all(
        request.num_sampled <= 1
        and not request.draft_token_ids
        and not request.state.params.needs_host
        and request.state.forced is None
        and request.state.head is None
        for request in batch
    )


def append_drawn(tokens: Sequence[int], drawn: Sequence[ScheduledRequest], output: ModelRunnerOutput) -> None:
    """Append sampled tokens. Requests that failed in the step get none."""
    for request, token in zip(drawn, tokens, strict=True):
        if request.state.request_id not in output.failures:
            _append(request.state, None if token < 0 else token, output)


def _wait(rows: Iterable[_Row], deadline: float) -> None:
    pending = [work for row in rows if (work := row.pending) is not None]
    if pending:
        wait(pending, max(0.0, deadline - time.monotonic()))


def _settle(
    rows: Sequence[_Row], drawn: Sequence[int | None], deadline: float
) -> tuple[list[int | None], frozenset[int]]:
    """Replace tokens after which the answer could not be completed in time. Also returns undecided rows."""
    tokens = list(drawn)
    searching: dict[int, Guide] = {}
    for index, (row, token) in enumerate(zip(rows, drawn, strict=True)):
        if token is not None and row.state.guide is not None and row.state.settles(token):
            row.state.guide.settle(token)
            searching[index] = row.state.guide
    _wait([rows[index] for index in searching], deadline)
    undecided = frozenset(index for index, guide in searching.items() if guide.pending is not None)
    for index in searching.keys() - undecided:
        tokens[index] = searching[index].settled
    return tokens, undecided


def _add_logprobs(
    logits: Tensor,
    asking: Sequence[int],
    rows: Sequence[_Row],
    tokens: Sequence[int | None],
    undecided: frozenset[int],
    output: ModelRunnerOutput,
) -> None:
    params = [rows[index].state.params for index in asking]
    chosen = [tokens[index] or 0 for index in asking]
    num_top = [one.logprobs or 0 for one in params]
    wanted = [one.logprob_token_ids for one in params]
    for index, scores in zip(asking, token_logprobs(logits, chosen, num_top, wanted), strict=True):
        if index not in undecided:
            logprobs = output.logprobs.setdefault(rows[index].state.request_id, [])
            if tokens[index] is not None:
                logprobs.append(scores)


def _append(state: RequestState, token: int | None, output: ModelRunnerOutput) -> bool:
    """None: sampling failed. Returns whether another token may follow."""
    request_id, guide = state.request_id, state.guide
    tokens = output.token_ids.setdefault(request_id, [])
    if token is None:
        if guide is not None and guide.finished:
            output.finish_reasons[request_id] = "stop"
        elif guide is not None and guide.error is not None:
            output.failures[request_id] = RequestFailure("grammar", guide.error)
        else:
            output.failures[request_id] = RequestFailure("not_finite" if state.permitted is None else "no_token")
        return False
    tokens.append(token)
    if token in state.end_token_ids:
        return False
    state.append(token)
    if guide is not None and not state.is_thinking:
        if guide.cut_off:
            output.finish_reasons[request_id] = "length"
        elif guide.finished:
            output.finish_reasons[request_id] = "stop"
        return request_id not in output.finish_reasons
    return True

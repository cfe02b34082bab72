"""Follows the grammar of one answer without blocking a step. Imports no torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from vlmserve.cores import usable_cores
from vlmserve.errors import VLMServeError
from vlmserve.sampling.fair_workers import FairWorkers
from vlmserve.sampling.grammar import Allowed, Matcher
from vlmserve.types import Grammar

logger = logging.getLogger(__name__)

_MAX_THREADS = 8
Result = TypeVar("Result")
ComputeMask = Callable[[Matcher], Allowed]
QUICK_SECONDS = 0.001
"""CPU time of a quick task. An ordinary mask takes a fifth of it, about as long as waking a thread."""
_FIRST_QUICK = 2
"""Consecutive quick tasks until the caller's thread computes."""
_MORE_QUICK = 4
"""Factor of this number after each slow task."""
MakeMatcher = Callable[[Grammar, str], Future[Matcher]]
"""Starts to compile a grammar for a client."""


class Guide:
    """`FairWorkers` compute masks and search for ends of answers, one task at a time.

    Call nothing but `close` while work is `pending`. Exceptions become an `error`.
    """

    def __init__(
        self,
        started: Future[Matcher],
        workers: FairWorkers,
        client: str,
        first: ComputeMask | None,
        *,
        measures: bool,
    ) -> None:
        """started: becomes the matcher. first: computes the first mask, if known. measures: compute `shortest`."""
        self._workers, self._client = workers, client
        self._started = started
        self._seconds = 0.0
        self._num_quick = 0
        self._enough_quick = _FIRST_QUICK
        self._matcher: Matcher | None = None
        self._mask: Future[Allowed | None] | None = None
        self._settled: Future[int] | None = None
        self._failure: str | None = None
        """Why the answer cannot follow its grammar, besides the matcher's `error`."""
        self.shortest = 0
        """Tokens of a short answer; 0 unless measured."""
        self.finished = False
        """True if nothing can follow. Valid while work is pending."""
        self.cut_off = False
        """True if the answer is complete because it was closed early. Valid while work is pending."""

        def prepare(matcher: Matcher) -> Allowed | None:
            self.shortest = matcher.shortest() if measures else 0
            return None if first is None else self._compute(matcher, first)

        def begin(started: Future[Matcher]) -> None:
            if started.cancelled():
                return
            try:
                self._matcher = matcher = started.result()
                self._mask = self._workers.submit(self._client, lambda: prepare(matcher))
            except BaseException as error:
                self._fail(error)

        started.add_done_callback(begin)

    @property
    def pending(self) -> Future[Any] | None:
        """The work that blocks the next token."""
        if self._mask is None:
            return self._started if self._failure is None else None
        return next((work for work in (self._mask, self._settled) if work is not None and not work.done()), None)

    @property
    def allowed(self) -> Allowed | None:
        """The current mask; None after an `error`, meaningless during reasoning."""
        return None if self._mask is None or self._failure is not None else self._result(self._mask)

    @property
    def forced(self) -> list[int]:
        """Tokens that probably follow the current mask's place."""
        is_ready = self._matcher is not None and self._mask is not None and self._failure is None
        return self._matcher.forced() if is_ready and self._matcher is not None else []

    @property
    def error(self) -> str | None:
        """Why no token can follow."""
        return self._failure if self._failure is not None or self._matcher is None else self._matcher.error

    @property
    def searches(self) -> bool:
        """True if `settle` may replace the current token."""
        return self._settled is not None or (self._matcher is not None and self._matcher.searches)

    def settle(self, token_id: int) -> None:
        matcher = self._matcher
        if self._settled is None and matcher is not None:
            self._settled = self._submit(lambda: matcher.settle(token_id), inline=matcher.has_short_end)

    @property
    def settled(self) -> int | None:
        """None after an `error`, or without a call for the current token."""
        return None if self._settled is None else self._result(self._settled)

    def advance(self, token_id: int) -> None:
        matcher = self._matcher
        assert matcher is not None
        self._settled = None
        try:
            matcher.advance(token_id)
            self.finished = matcher.finished
            self.cut_off = matcher.cut and matcher.complete
        except Exception as error:
            self._fail(error)

    def expect(self, compute: ComputeMask, left: int) -> None:
        """Compute the next mask. left: tokens left."""
        if self._failure is not None:
            return
        matcher = self._matcher
        assert matcher is not None
        self._mask = self._submit(lambda: self._compute(matcher, compute), inline=not matcher.search_is_due(left))

    def _compute(self, matcher: Matcher, compute: ComputeMask) -> Allowed:
        mask = compute(matcher)
        self.finished = matcher.finished
        return mask

    def close(self) -> None:
        for work in (self._started, self._mask, self._settled):
            if work is not None:
                work.cancel()

    def _submit(self, run: Callable[[], Result], *, inline: bool = False) -> Future[Result]:
        """inline: compute at once if the last tasks were quick."""

        def timed() -> Result:
            began = time.thread_time()
            try:
                return run()
            finally:
                self._note(time.thread_time() - began)

        if not inline or self._num_quick < self._enough_quick:
            return self._workers.submit(self._client, timed, cost=self._seconds)
        done: Future[Result] = Future()
        try:
            done.set_result(timed())
        except Exception as error:
            done.set_exception(error)
        return done

    def _result(self, work: Future[Result]) -> Result | None:
        error = work.exception()
        if error is None:
            return work.result()
        self._fail(error)
        return None

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, VLMServeError):
            self._failure = str(error)
        else:
            logger.error("The grammar of a request failed", exc_info=error)
            self._failure = "unexpected error, see the server's log"

    def _note(self, seconds: float) -> None:
        self._seconds += seconds
        if seconds < QUICK_SECONDS:
            self._num_quick += 1
        else:
            self._num_quick = 0
            self._enough_quick *= _MORE_QUICK


class Guides:
    """Guides share threads on half of the cores. A client may use all but one."""

    def __init__(self, make_matcher: MakeMatcher) -> None:
        self._make_matcher = make_matcher
        threads = min(_MAX_THREADS, max(2, usable_cores() // 2))
        self._workers = FairWorkers("grammar-masks", threads, per_client=threads - 1)

    def start(self, grammar: Grammar, client: str, first: ComputeMask | None, *, measures: bool) -> Guide:
        return Guide(self._make_matcher(grammar, client), self._workers, client, first, measures=measures)

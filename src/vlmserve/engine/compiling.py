"""Requests whose grammars compile in a thread while the engine steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from vlmserve.sampling.grammar import GrammarCompiler, Matcher
from vlmserve.types import EngineRequest


class CompilingRequests:
    """Holds requests until their grammars are compiled. Compiling releases the GIL, so other requests proceed."""

    def __init__(self, grammars: GrammarCompiler) -> None:
        self._grammars = grammars
        self._executor = ThreadPoolExecutor(1, "compile-grammars")
        self._held: list[tuple[EngineRequest, Future[Matcher]]] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, requests: Iterable[EngineRequest]) -> list[EngineRequest]:
        """Return the requests that need no compiling, and keep the others."""
        ready = []
        for request in requests:
            grammar = request.params.grammar
            if grammar is None or self._grammars.is_ready(grammar):
                ready.append(request)
            else:
                self._held.append((request, self._executor.submit(self._grammars.matcher, grammar)))
        return ready

    def release(self) -> list[EngineRequest]:
        """Return the requests whose grammars have compiled. Adding a request repeats the error of a broken grammar."""
        done = [request for request, compiled in self._held if compiled.done()]
        self._held = [(request, compiled) for request, compiled in self._held if not compiled.done()]
        return done

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests."""
        dropped = set(request_ids)
        for request, compiled in self._held:
            if request.request_id in dropped:
                compiled.cancel()
        self._held = [held for held in self._held if held[0].request_id not in dropped]

    def close(self) -> None:
        """Stop compiling."""
        self._executor.shutdown(wait=False, cancel_futures=True)

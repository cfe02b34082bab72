"""Requests whose grammars compile in threads while the engine steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from vlmserve.errors import VLMServeError
from vlmserve.sampling.grammar import GrammarCompiler, Matcher
from vlmserve.types import EngineRequest


class Released(NamedTuple):
    request: EngineRequest
    error: VLMServeError | None


class CompilingRequests:
    """Holds requests until their grammars are compiled. Compiling releases the GIL, so other requests proceed."""

    def __init__(self, grammars: GrammarCompiler) -> None:
        self._grammars = grammars
        self._held: list[tuple[EngineRequest, Future[Matcher]]] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, requests: Iterable[EngineRequest]) -> list[EngineRequest]:
        """Return the requests that need no compiling, and keep the others."""
        ready = []
        for request in requests:
            grammar = request.params.grammar
            if grammar is None or self._grammars.is_known(grammar):
                ready.append(request)
            else:
                self._held.append((request, self._grammars.begin(grammar, request.client)))
        return ready

    def release(self) -> list[Released]:
        done = [(request, compiled) for request, compiled in self._held if compiled.done()]
        self._held = [(request, compiled) for request, compiled in self._held if not compiled.done()]
        return [Released(request, _error(compiled)) for request, compiled in done]

    def abort(self, request_ids: Sequence[str]) -> None:
        dropped = set(request_ids)
        for request, compiled in self._held:
            if request.request_id in dropped:
                compiled.cancel()
        self._held = [held for held in self._held if held[0].request_id not in dropped]

    def close(self) -> None:
        self.abort([request.request_id for request, _ in self._held])


def _error(compiled: Future[Matcher]) -> VLMServeError | None:
    error = compiled.exception()
    if error is not None and not isinstance(error, VLMServeError):
        raise error
    return error

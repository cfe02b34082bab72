"""Checks in isolated processes whether a grammar compiles within limits."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path

from vlmserve.errors import InvalidRequestError, UnavailableError
from vlmserve.media.fork_server import disown_server, own_server, start_server
from vlmserve.media.isolated import Answer, IsolatedProcess
from vlmserve.sampling.schemas import JSONBounds
from vlmserve.settings.config import EngineConfig
from vlmserve.types import Grammar

QUICK_SECONDS = 0.2
"""CPU time after which a grammar counts as slow. Ordinary grammars take 1% to 10% of it."""
_PATIENCE = 10
"""Maximum wall time of a trial, as a multiple of its CPU time limit: other processes compute too."""


class SlowGrammarError(InvalidRequestError):
    """Compiling takes longer than the caller waits."""


class _Verdict(Answer):
    fault: str = ""


class GrammarTrials:
    """Caches verdicts. Thread-safe; holds no lock while it compiles."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        self._folder = str(folder.resolve())
        self._config = config
        self._bounds = asdict(JSONBounds.of(config))
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[tuple[str, str, bool], str] = OrderedDict()
        own_server("grammar", self._folder)
        weakref.finalize(self, disown_server, "grammar", self._folder)

    def start(self) -> None:
        """Start the process that reads the vocabulary, so that the first grammar waits less."""
        with contextlib.suppress(UnavailableError):  # the first grammar tries again, and its request gets the error
            start_server("grammar", self._folder)

    def passed(self, grammar: Grammar) -> bool:
        with self._lock:
            return self._verdicts.get((grammar.kind, grammar.text, grammar.strict)) == ""

    def check(self, grammar: Grammar, *, quick: bool = False) -> None:
        """Compile a grammar unless its verdict is cached. quick: give up after `QUICK_SECONDS`.

        Raises InvalidRequestError with the source of a broken, too large or too complex grammar; its subclass
        SlowGrammarError after too long; UnavailableError if no process starts; CancelledWorkError.
        """
        source = grammar.source
        data = grammar.text.encode(errors="replace")
        if len(data) > self._config.max_grammar_bytes:
            raise InvalidRequestError(
                f"{source} is longer than {self._config.max_grammar_bytes:,} bytes, the server's limit", param=source
            )
        key = (grammar.kind, grammar.text, grammar.strict)
        with self._lock:
            fault = self._verdicts.get(key)
        if fault is None:
            fault = self._try(grammar, data, quick=quick)
            with self._lock:
                self._verdicts[key] = fault
                self._verdicts.move_to_end(key)
                if len(self._verdicts) > self._config.grammar_cache:
                    self._verdicts.popitem(last=False)
        if fault:
            raise InvalidRequestError(f"{source}: {fault}", param=source)

    def _try(self, grammar: Grammar, data: bytes, *, quick: bool) -> str:
        seconds = QUICK_SECONDS if quick else self._config.max_grammar_seconds
        settings = {
            "kind": grammar.kind,
            "strict": grammar.strict,
            "bounds": self._bounds,
            "seconds": seconds,
            "quick": quick,
            "memory": self._config.max_grammar_memory,
        }
        process = IsolatedProcess(
            "grammar", seconds * _PATIENCE, lambda reason, detail: self._error(grammar, reason, detail), self._folder
        )
        try:
            fault = process.open(data, settings, _Verdict).fault
        except BaseException:
            process.close()
            raise
        process.release()
        return fault

    def _error(self, grammar: Grammar, reason: str, detail: str) -> Exception:
        source = grammar.source
        memory = f"{self._config.max_grammar_memory / 1024**2:,.0f} MiB"
        match reason:
            case "slow":
                limit = f"{self._config.max_grammar_seconds:g} s"
                return SlowGrammarError(f"{source} takes more than {limit} to compile: make it simpler", param=source)
            case "memory":
                return InvalidRequestError(
                    f"{source} takes more than {memory} of memory to compile: make it simpler", param=source
                )
            case "aborted":
                return InvalidRequestError(
                    f"{source} made the compiler abort, usually because it takes more than {memory} of memory: make "
                    "it simpler",
                    param=source,
                )
            case "killed":
                return UnavailableError(f"the process that compiled {source} was killed: send the request again")
        return InvalidRequestError(f"{source}: {detail or 'it is too complex to compile'}", param=source)

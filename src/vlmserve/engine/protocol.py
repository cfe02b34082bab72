"""The engine interface. The real and the mock engine pass the same contract tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from vlmserve.errors import VLMServeError
from vlmserve.sampling.grammar import GrammarCompiler
from vlmserve.types import AdapterInfo, BlockMap, EngineOutput, EngineRequest, EngineSnapshot, EngineStats, ModelInfo


class FinishedLoad(NamedTuple):
    """number: the caller's. error: None on success."""

    number: int
    error: VLMServeError | None = None


class VLMEngine(Protocol):
    """A synchronous engine without an event loop or socket. One thread at a time may call it."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars, in any thread. `add` compiles unknown grammars."""
        ...

    @property
    def watched(self) -> Sequence[int]:
        """Files that become readable when `check` may raise."""
        ...

    @property
    def silence(self) -> float:
        """Seconds since the last heartbeat of a required process. Any thread may read it."""
        ...

    def check(self) -> None:
        """Raises EngineDeadError if a required process has ended."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises PromptTooLongError if it could never run, TooManyImagesError if the model cannot take its images.
        Raises OverloadedError if batch and queue are full, InvalidRequestError for an id in use or an unknown token id.
        """
        ...

    def step(self) -> list[EngineOutput]:
        """Run one batch. Returns at most one output per request.

        Unless aborted, a request ends with exactly one output that has a finish_reason. Its own failure ends it with
        "error".
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests without output. Ignores unknown ids."""
        ...

    def has_work(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def inspect(self) -> EngineSnapshot:
        """Return the stats and every unfinished request, for debugging."""
        ...

    @property
    def adapters(self) -> list[AdapterInfo]: ...

    def load_adapter(self, number: int, name: str, path: str, pool: Mapping[str, str] | None = None) -> None:
        """Begin to load an adapter; `finished_loads` returns the result.

        pool: the adapters that an X-LoRA checkpoint mixes, see `adapters.xlora.read_xlora`. None: its own. Raises
        AdapterError if adapters are disabled or the name is invalid.
        """
        ...

    def finished_loads(self) -> list[FinishedLoad]: ...

    @property
    def is_loading(self) -> bool: ...

    def unload_adapter(self, name: str) -> None:
        """Running requests keep the adapter. Raises UnknownModelError."""
        ...

    def map_blocks(self) -> BlockMap:
        """Return the use of KV blocks, in at most `MAX_MAP_CELLS` cells."""
        ...

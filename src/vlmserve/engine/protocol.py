"""What every engine does. The real and the mock engine pass the same contract tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from vlmserve.errors import VLMServeError
from vlmserve.sampling.grammar import GrammarCompiler
from vlmserve.types import AdapterInfo, BlockMap, EngineOutput, EngineRequest, EngineSnapshot, EngineStats, ModelInfo


class FinishedLoad(NamedTuple):
    """A load of an adapter that has ended. number: the caller's. error: why nothing was loaded; None: it is served."""

    number: int
    error: VLMServeError | None = None


class VLMEngine(Protocol):
    """A synchronous engine without an event loop or socket. One thread at a time may call it."""

    @property
    def info(self) -> ModelInfo:
        """What is loaded."""
        ...

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars, in any thread. `add` compiles a grammar that is not known."""
        ...

    @property
    def watched(self) -> Sequence[int]:
        """Files that become readable when `check` may raise."""
        ...

    @property
    def silence(self) -> float:
        """Seconds without a heartbeat of a process that the engine needs. Any thread may ask."""
        ...

    def check(self) -> None:
        """Raises EngineDeadError if a process that the engine needs has ended."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises PromptTooLongError if it could never run, TooManyImagesError if it has images that the model cannot
        see, OverloadedError if the batch and the queue are full, InvalidRequestError if the id is in use or a token id
        is unknown.
        """
        ...

    def step(self) -> list[EngineOutput]:
        """Run one batch and return what is new, at most one output a request.

        Every added request ends with exactly one output that has a finish_reason, unless it is aborted. A failure
        that concerns single requests ends them with "error"; the engine goes on.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests immediately and free all they hold; unknown ids are ignored, no output follows."""
        ...

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot for logs and metrics."""
        ...

    def inspect(self) -> EngineSnapshot:
        """The stats and every unfinished request, for debugging."""
        ...

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The adapters that are served."""
        ...

    def load_adapter(self, number: int, name: str, path: str, pool: Mapping[str, str] | None = None) -> None:
        """Begin to load an adapter, to be served under a name; `finished_loads` says when that is done.

        pool: what an X-LoRA checkpoint mixes, see `adapters.xlora.read_xlora`; None: its own adapters.
        Raises AdapterError where there are no adapters, and for what is no name.
        """
        ...

    def finished_loads(self) -> list[FinishedLoad]:
        """What became of the loads that ended since the last call."""
        ...

    @property
    def is_loading(self) -> bool:
        """Whether `finished_loads` has yet to say what became of a load."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Serve an adapter no more; requests that have it keep it. Raises UnknownModelError."""
        ...

    def map_blocks(self) -> BlockMap:
        """How the KV cache's blocks are used, for the live view; in at most `MAX_MAP_CELLS` cells."""
        ...

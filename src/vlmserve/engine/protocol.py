"""What every engine does. The real and the mock engine pass the same contract tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from vlmserve.types import BlockMap, EngineOutput, EngineRequest, EngineSnapshot, EngineStats, ModelInfo


class VLMEngine(Protocol):
    """A synchronous, single-threaded engine: no event loop, socket or thread of its own."""

    @property
    def info(self) -> ModelInfo:
        """What is loaded."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises PromptTooLongError if it could never run, TooManyImagesError if it has images that the model cannot
        see, OverloadedError if the queue is full, InvalidRequestError if the id is in use or a token id is unknown.
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

    def map_blocks(self) -> BlockMap:
        """How the KV cache's blocks are used, for the live view; in at most `MAX_MAP_CELLS` cells."""
        ...

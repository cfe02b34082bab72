"""Code that the real and the mock engine share."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

from vlmserve.engine.admission import check_request
from vlmserve.engine.protocol import FinishedLoad
from vlmserve.errors import AdapterError, OverloadedError, UnknownModelError
from vlmserve.sampling.grammar import GrammarCompiler
from vlmserve.settings.config import EngineConfig
from vlmserve.types import AdapterInfo, EngineRequest, ModelInfo

if TYPE_CHECKING:
    from vlmserve.engine.adapters import AdapterLoading


class BaseEngine:
    """The part of a `VLMEngine` that is independent of how answers are made. Subclasses set all attributes."""

    _config: EngineConfig
    _info: ModelInfo
    _grammars: GrammarCompiler
    _adapters: AdapterLoading | None = None

    @property
    def grammars(self) -> GrammarCompiler:
        return self._grammars

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def watched(self) -> Sequence[int]:
        return ()

    @property
    def silence(self) -> float:
        return 0.0

    def check(self) -> None:
        pass

    @property
    def adapters(self) -> list[AdapterInfo]:
        return [] if self._adapters is None else self._adapters.store.infos

    def load_adapter(self, number: int, name: str, path: str, pool: Mapping[str, str] | None = None) -> None:
        if self._adapters is None:
            raise AdapterError("no adapters are served here: start with --enable-lora")
        self._adapters.begin(number, name, path, pool)

    def finished_loads(self) -> list[FinishedLoad]:
        return [] if self._adapters is None else self._adapters.finish()

    @property
    def is_loading(self) -> bool:
        return self._adapters is not None and self._adapters.is_loading

    def unload_adapter(self, name: str) -> None:
        if self._adapters is None:
            raise UnknownModelError(f"there is no adapter {name!r:.100} here", param="lora_name")
        self._adapters.store.unload(name)

    def _check(self, request: EngineRequest, unfinished: Container[str], num_waiting: int, num_running: int) -> None:
        """Raise the errors of `VLMEngine.add`.

        unfinished: ids in use. Requests that the next step admits do not count against the queue's limit.
        """
        check_request(request, self._info, unfinished, max_logprobs=self._config.max_logprobs)
        if num_waiting + num_running >= self._config.max_waiting + self._config.max_num_seqs:
            raise OverloadedError(f"{num_waiting} requests are waiting already; try again later")

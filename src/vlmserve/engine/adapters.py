"""Loads adapters: the configured ones, and more while the engine runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from vlmserve.adapters.location import check_name, find_adapter, read_module
from vlmserve.adapters.lora import Adapter
from vlmserve.adapters.xlora_store import XLoraStore
from vlmserve.engine.protocol import FinishedLoad
from vlmserve.errors import AdapterError, ConfigurationError
from vlmserve.models.protocols import LoadedModel
from vlmserve.scheduler.resources.adapters import AdapterPlaces
from vlmserve.scheduler.scheduler import Scheduler
from vlmserve.settings.config import EngineConfig

logger = logging.getLogger(__name__)


class _Load(NamedTuple):
    number: int
    name: str
    folder: Path
    reading: Future[Adapter]


class AdapterLoading:
    def __init__(self, store: XLoraStore) -> None:
        self.store = store
        self._loads: list[_Load] = []

    @classmethod
    def of(cls, config: EngineConfig, model: LoadedModel) -> AdapterLoading | None:
        """None: adapters are disabled. Raises ConfigurationError for models and adapters that are not supported."""
        if not config.enable_lora:
            if config.lora_modules:
                raise ConfigurationError("--lora-modules needs --enable-lora")
            return None
        if model.adaptable is None:
            raise ConfigurationError(f"{model.architecture} takes no adapters here; leave --enable-lora out")
        if config.max_cpu_loras < config.max_loras:
            raise ConfigurationError(
                f"--max-cpu-loras {config.max_cpu_loras} is less than --max-loras {config.max_loras}: adapters in a "
                "batch are in memory"
            )
        store = XLoraStore(
            model.adaptable,
            max_rank=config.max_lora_rank,
            max_loaded=config.max_cpu_loras,
            max_bytes=config.lora_memory,
        )
        for module in map(read_module, config.lora_modules):
            if module.name in store.names:
                raise ConfigurationError(f"--lora-modules has two adapters {module.name!r}")
            try:
                store.load(module.name, find_adapter(module.path))
            except AdapterError as error:
                raise ConfigurationError(f"--lora-modules {module.name}={module.path}: {error}") from error
        return cls(store)

    def follow(self, scheduler: Scheduler, slots: AdapterPlaces) -> None:
        self.store.is_needed = lambda digest: any(one.adapter == digest for one in scheduler.requests.values())
        self.store.is_pending = slots.is_pending

    def begin(self, number: int, name: str, path: str, pool: Mapping[str, str] | None) -> None:
        check_name(name)
        folder = find_adapter(path)
        self._loads.append(_Load(number, name, folder, self.store.read(folder, pool)))

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    def finish(self) -> list[FinishedLoad]:
        ended = [load for load in self._loads if load.reading.done()]
        self._loads = [load for load in self._loads if load not in ended]
        finished = []
        for load in ended:
            try:
                self.store.serve(load.name, load.folder, load.reading.result())
                finished.append(FinishedLoad(load.number))
            except AdapterError as error:
                finished.append(FinishedLoad(load.number, error))
            except Exception as error:
                logger.exception("an adapter could not be loaded")
                reason = AdapterError(f"{load.folder} could not be loaded: {type(error).__name__}")
                finished.append(FinishedLoad(load.number, reason))
        return finished

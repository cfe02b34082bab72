"""The engines: the real one, the mock one, and the process that hosts either."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vlmserve.garbage import collector_paused

if TYPE_CHECKING:
    from vlmserve.engine.protocol import VLMEngine
    from vlmserve.settings.config import EngineConfig


def create_engine(config: EngineConfig, folder: Path | None = None) -> VLMEngine:
    """The engine that the settings ask for, with its model loaded.

    folder: the checkpoint, if `config.model` is resolved already. Raises ModelLoadError and ConfigurationError.
    """
    if config.engine == "mock":
        from vlmserve.engine.mock import MockEngine

        return MockEngine(config, folder)
    from vlmserve.models.hub import resolve_model

    folder = resolve_model(config.model, config.revision, config.mmproj) if folder is None else folder
    check_settings(config, folder)
    with collector_paused():
        from vlmserve.engine.engine import Engine

    return Engine(config, folder)


def check_settings(config: EngineConfig, folder: Path) -> None:
    """Check settings against the headers of a checkpoint, before torch is imported, which takes seconds.

    Raises CapacityError for contexts that cannot be had, ModelLoadError for weights that need more memory than is
    free. Other errors are left to `create_engine`.
    """
    if config.engine == "mock":
        return
    from vlmserve.engine.lengths import check_configuration
    from vlmserve.models.footprint import check_memory

    check_configuration(config, folder)
    check_memory(config, folder)

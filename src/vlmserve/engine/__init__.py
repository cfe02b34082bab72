"""The engines: the real one, the mock one, and the process that hosts either."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vlmserve.garbage import collector_paused

if TYPE_CHECKING:
    from vlmserve.engine.protocol import VLMEngine
    from vlmserve.settings.config import EngineConfig


def create_engine(config: EngineConfig, folder: Path | None = None) -> VLMEngine:
    """Return the engine for these settings, with its model loaded.

    folder: the checkpoint, if `config.model` is already resolved. Raises ModelLoadError and ConfigurationError.
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
    """Check settings against a checkpoint's headers before torch is imported, which takes seconds.

    Raises CapacityError for impossible contexts, ModelLoadError for weights larger than free memory.
    """
    if config.engine == "mock":
        return
    from vlmserve.engine.lengths import check_configuration
    from vlmserve.models.footprint import check_memory

    check_configuration(config, folder)
    check_memory(config, folder)

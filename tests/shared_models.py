"""Loads each checkpoint once for all engines of a test module, since loading takes most of an engine's start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlmserve.devices import choice
from vlmserve.devices.cpu import open_cpu
from vlmserve.engine import engine, loading
from vlmserve.engine.lengths import check_lengths
from vlmserve.kernels.choice import VARIABLE
from vlmserve.layers.parallel import Ranks
from vlmserve.models.protocols import LoadedModel
from vlmserve.settings.config import EngineConfig

Files = tuple[tuple[str, int, int], ...]


def files_of(checkpoint: Path) -> Files:
    """Name, modification time and size of each file."""
    paths = sorted(checkpoint.rglob("*")) if checkpoint.is_dir() else [checkpoint]
    return tuple((str(path), (found := path.stat()).st_mtime_ns, found.st_size) for path in paths)


def is_shared(config: EngineConfig, ranks: Ranks | None) -> bool:
    """Adapters, eager execution and captured graphs change a model or belong to one engine."""
    return (
        ranks is None
        and config.tensor_parallel_size == 1
        and choice.KINDS["cpu"] is open_cpu
        and not (config.enable_lora or config.enforce_eager or config.weights_cache or config.num_threads)
        and not config.quantization.calibrates
    )


@pytest.fixture(scope="module")
def shared_models() -> Iterator[None]:
    """Engines of the module get the same model if they would load it from the same files with the same settings."""
    load, models = loading.load, dict[tuple[object, ...], LoadedModel]()

    def load_or_share(config: EngineConfig, folder: Path | None = None, ranks: Ranks | None = None) -> LoadedModel:
        if folder is None or not is_shared(config, ranks):
            return load(config, folder, ranks)
        settings = config.dtype, config.device, config.kernels, config.model_impl, config.input_bits
        quantized = config.quantization.model_dump_json(), config.kv_cache_dtype
        key = files_of(folder), os.environ.get(VARIABLE), *settings, *quantized
        if key in models:
            model = models[key]
            check_lengths(config, model.language_model.cache_bytes(config.block_size), model.max_position)
        else:
            models[key] = load(config, folder, ranks)
        return models[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "load", load_or_share)
        yield

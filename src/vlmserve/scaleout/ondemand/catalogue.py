"""The models of a server: their settings, and the memory that each is expected to take."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmserve.adapters.location import read_module
from vlmserve.errors import ConfigurationError
from vlmserve.folders import expanded
from vlmserve.gguf.choice import GGUF, PROJECTOR
from vlmserve.gguf_header import PART
from vlmserve.memory import free_memory
from vlmserve.models.footprint import LIBRARIES, footprint_of, loads_into_main_memory
from vlmserve.models.hub import resolve_model
from vlmserve.scaleout.settings import ModelsConfig
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig

PROCESSES = 192 * 2**20
"""Bytes that the two processes of a model take besides weights and caches; imported libraries are shared."""
_LEAST_KV, _MOST_KV = 128 * 2**20, 4 * 2**30
"""Bounds of a KV cache's default bytes, which equal the weights' bytes."""
_SHARE = 0.8
"""Default budget, as a share of the free memory."""
_OF_IMAGES = ("preprocessor_config.json", "processor_config.json")
"""Files of checkpoints that read images."""


@dataclass(frozen=True)
class Listed:
    name: str
    engine: EngineConfig
    media: MediaConfig
    server: ServerConfig

    @property
    def shown(self) -> tuple[str, ...]:
        """The names that lists of models have, the model's own name first."""
        return tuple(dict.fromkeys((self.name, *self.server.served_model_name)))

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(read_module(text).name for text in self.engine.lora_modules)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use, the model's own name first, its adapters' last."""
        return tuple(dict.fromkeys((*self.shown, self.engine.model, *self.adapters)))


@dataclass(frozen=True)
class Expected:
    weights: int
    kv_cache: int
    images: int
    """Caches of images."""

    @property
    def growth(self) -> int:
        """Bytes that requests fill after the start."""
        return self.kv_cache + self.images

    @property
    def total(self) -> int:
        return PROCESSES + self.weights + self.growth


def find_models(folder: str, engine: EngineConfig, media: MediaConfig, server: ServerConfig) -> list[Listed]:
    """Models are subfolders and GGUF files. Raises ConfigurationError if there are none, or for a draft model."""
    if engine.draft_model is not None:
        raise ConfigurationError(
            "--draft-model is for one model: with --models-dir, write draft_model below its [model.NAME] in --config"
        )
    place = expanded(folder)
    if not place.is_dir():
        raise ConfigurationError(f"--models-dir {folder}: there is no such folder")
    found = [
        Listed(name, engine.model_copy(update={"model": str(path)}), media, server) for name, path in _models_in(place)
    ]
    if not found:
        raise ConfigurationError(
            f"--models-dir {folder}: no model is there; put each in a subfolder with its config.json, or as a {GGUF} "
            "file"
        )
    return found


def check_names(models: Collection[Listed]) -> None:
    """Raises ConfigurationError if two models have one name."""
    seen: set[str] = set()
    for model in models:
        for name in model.shown:
            if name in seen:
                raise ConfigurationError(f"two models are called {name}; rename the folder or the section of one")
            seen.add(name)


def expect(model: Listed) -> Expected:
    """Downloads missing files. Raises ModelLoadError."""
    folder = resolve_model(model.engine.model, model.engine.revision, model.engine.mmproj)
    weights = 0 if model.engine.engine == "mock" else footprint_of(model.engine, folder).loading
    kv_cache = model.engine.kv_cache_memory or min(_MOST_KV, max(_LEAST_KV, weights))
    reads_images = any((folder / name).is_file() for name in _OF_IMAGES)
    images = model.engine.encoder_cache_memory + model.media.image_cache_memory if reads_images else 0
    return Expected(weights, kv_cache, images)


def budget_of(listed: Sequence[Listed], config: ModelsConfig) -> int:
    """Bytes for models, without the libraries that all share.

    Raises ConfigurationError for a GPU without a budget, or a budget that is too small.
    """
    memory = config.models_memory
    if memory is None:
        if not all(loads_into_main_memory(model.engine) for model in listed):
            raise ConfigurationError("models on a GPU need --models-memory: the GPU memory for all of them together")
        memory = int(_SHARE * free_memory())
    if memory <= LIBRARIES:
        raise ConfigurationError(
            f"--models-memory {memory / 1e9:.2f} GB: give at least 1GiB; libraries take {LIBRARIES / 1e9:.2f} GB"
        )
    return memory - LIBRARIES


def _models_in(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if (path / "config.json").is_file() or next(path.rglob(f"*{GGUF}"), None) is not None:
                yield path.name, path
        elif path.suffix == GGUF and PROJECTOR not in path.name.lower():
            part = PART.fullmatch(path.name)
            if part is None:
                yield path.stem, path
            elif path.name == f"{part['stem']}-{1:05}-of-{part['count']}{GGUF}":
                yield part["stem"], path

"""Lists and removes models in the local Hugging Face cache. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlmserve.errors import CheckpointNotFoundError
from vlmserve.gguf.choice import GGUF
from vlmserve.models.names import name_of, repository_of, suggestion
from vlmserve.settings.config import BUILT_IN_MODEL

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo

_WEIGHTS = (GGUF, ".safetensors", ".bin", ".pth")


@dataclass(frozen=True)
class Download:
    repository: str
    name: str
    num_bytes: int
    used: float
    """Unix time of the last read."""
    folder: Path


def downloads() -> list[Download]:
    found = (_download(entry) for entry in _repositories(_cache()))
    return sorted(found, key=lambda download: download.used, reverse=True)


def remove(name: str, confirm: Callable[[Download], bool] = lambda download: True) -> Download | None:
    """Remove all revisions of a model. Returns None if `confirm` declines.

    Raises CheckpointNotFoundError if the cache lacks it, for the built-in model, and for a single GGUF file, because
    the cache removes whole repositories.
    """
    if name == BUILT_IN_MODEL:
        raise CheckpointNotFoundError(f"{name} is built in and cannot be removed")
    repository = repository_of(name) or name
    cache = _cache()
    entries = {entry.repo_id: entry for entry in _repositories(cache)}
    whole = repository.partition(":")[0]
    if repository not in entries and whole in entries:
        raise CheckpointNotFoundError(f"vlmserve removes whole repositories: vlmserve rm {whole}")
    if repository not in entries:
        raise CheckpointNotFoundError(
            f"{name} is not downloaded{suggestion(name) if repository == name else ''}; vlmserve list shows what is"
        )
    entry = entries[repository]
    download = _download(entry)
    if cache is None or not confirm(download):
        return None
    cache.delete_revisions(*(revision.commit_hash for revision in entry.revisions)).execute()
    return download


def _cache() -> HFCacheInfo | None:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None


def _repositories(cache: HFCacheInfo | None) -> list[CachedRepoInfo]:
    """Omit entries with only a config or a tokenizer."""
    return [
        entry
        for entry in (cache.repos if cache is not None else ())
        if entry.repo_type == "model"
        and any(file.file_name.endswith(_WEIGHTS) for revision in entry.revisions for file in revision.files)
    ]


def _download(entry: CachedRepoInfo) -> Download:
    return Download(
        repository=entry.repo_id,
        name=name_of(entry.repo_id) or entry.repo_id,
        num_bytes=entry.size_on_disk,
        used=entry.last_accessed,
        folder=entry.repo_path,
    )

"""Prepared images on disk. Later starts need not decode and resize them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import PIL
from blake3 import blake3

from vlmserve.cache.tiers import DiskTier, Entries
from vlmserve.folders import code_digest
from vlmserve.frames import pack, unpack
from vlmserve.memory import huge_pages
from vlmserve.prompt.files import read_json
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.settings.config import EngineConfig
from vlmserve.steps import Bytes
from vlmserve.types import ImageInput

CODE = ("frames.py", "levels.py", "media", "tower_inputs.py", "types.py")
"""Modules and folders that prepared images depend on."""
FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a model that placeholders of images depend on. Keys cover pixels only."""
_ALIGNMENT = 64


class StoredImages:
    """Entries hold the message of an image and its arrays, see `frames.pack`."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier

    @classmethod
    def open(cls, config: EngineConfig, folder: Path, tokenizer: Tokenizer) -> StoredImages | None:
        """folder, tokenizer: of the model. None: not configured or not usable, which the engine logs."""
        if not config.disk_cache:
            return None
        entries = Entries.at(config.disk_cache, config.disk_cache_memory)
        return cls(DiskTier(entries, _identity(folder, tokenizer))) if entries.is_usable(log=False) else None

    def read(self, key: bytes) -> ImageInput | None:
        content = self._tier.read(key, None, _buffer)
        if content is None:
            return None
        content.flags.writeable = False  # requests share the image
        data = content.data
        return unpack([data[place] for place in _places(_sizes(data))], ImageInput)

    def store(self, key: bytes, image: ImageInput) -> None:
        frames = [memoryview(frame).cast("B") for frame in pack(image)]
        [*places] = _places([len(frame) for frame in frames])

        def content() -> Bytes:
            whole = np.zeros(places[-1].stop, np.uint8)
            header = struct.pack(f"<{1 + len(frames)}Q", len(frames), *map(len, frames))
            whole[: len(header)] = np.frombuffer(header, np.uint8)
            for place, frame in zip(places, frames, strict=True):
                whole[place] = frame
            return whole

        self._tier.store(key, places[-1].stop, content)


def _identity(folder: Path, tokenizer: Tokenizer) -> bytes:
    """Digest what images depend on, except their keys. An image contains token ids."""
    settings = [read_json(folder / name) for name in FILES]
    parts = ["images", code_digest(CODE), PIL.__version__, tokenizer.digest.hex(), settings]
    return blake3(json.dumps(parts, sort_keys=True).encode()).digest()


def _buffer(size: int) -> Bytes:
    """Images stay in memory for long, so each has pages of its own."""
    return np.frombuffer(huge_pages(size), np.uint8)[:size]


def _sizes(content: memoryview) -> Sequence[int]:
    (count,) = struct.unpack_from("<Q", content)
    return struct.unpack_from(f"<{count}Q", content, 8)


def _places(sizes: Sequence[int]) -> Iterator[slice]:
    """Frames after a header with their number and sizes."""
    end = 8 * (1 + len(sizes))
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + size
        yield slice(start, end)

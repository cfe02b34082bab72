"""Keys of KV blocks: 32-byte digests of everything that their content depends on."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from blake3 import blake3

from vlmserve.types import KEY_BYTES, ImageSpan

_ROOTS = 64
"""Roots to remember: requests of one model, adapter and salt share theirs."""


class TouchedImage(NamedTuple):
    """Rows ``offset <= row < offset + length`` of an image, which begin at `position` of the block."""

    key: bytes
    offset: int
    position: int
    length: int


@lru_cache(_ROOTS)
def root_key(identity: bytes, *, adapter: bytes = b"", salt: str = "") -> bytes:
    """Return the parent of first blocks. identity: from `cache_identity`. adapter: digest of its content."""
    parts = (identity, adapter, salt.encode())
    return blake3(b"root" + b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()


def answers_key(root: bytes, kind: bytes, content: bytes) -> bytes:
    return blake3(b"answers" + root + struct.pack("<Q", len(kind)) + kind + content).digest()


def adapted_image_key(image_key: bytes, adapter: bytes) -> bytes:
    return blake3(b"adapted" + image_key + adapter).digest()


def cross_key(image_key: bytes, token_ids: Sequence[int]) -> bytes:
    if len(image_key) != KEY_BYTES:
        raise ValueError(f"keys have {KEY_BYTES} bytes")
    return blake3(b"cross" + image_key + array("q", token_ids).tobytes()).digest()


def cross_attention_root(root: bytes, cross: bytes) -> bytes:
    return blake3(b"cross attention" + root + cross).digest()


def block_key(
    parent: bytes, token_ids: Sequence[int], images: Sequence[TouchedImage], *, ahead: Sequence[int] = ()
) -> bytes:
    """ahead: later token ids that the block attends to.

    Placeholder ids do not identify images. Fixed key lengths and length prefixes make the encoding unambiguous. Raises
    ValueError for keys of another length.
    """
    if len(parent) != KEY_BYTES or any(len(image.key) != KEY_BYTES for image in images):
        raise ValueError(f"keys have {KEY_BYTES} bytes")
    hasher = blake3(parent)
    for ids in (token_ids, ahead):
        hasher.update(struct.pack("<Q", len(ids)))
        hasher.update(array("q", ids).tobytes())
    for image in images:
        hasher.update(image.key + struct.pack("<QQQ", image.offset, image.position, image.length))
    return hasher.digest()


def touched_images(spans: Sequence[ImageSpan], start: int, end: int) -> list[TouchedImage]:
    touched = []
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if first < last:
            touched.append(TouchedImage(span.image.key, first - span.start, first - start, last - first))
    return touched

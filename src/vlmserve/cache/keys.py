"""Keys of KV blocks: 32-byte digests of everything that a block's content depends on.

A block's key covers its parent's key, its own token ids, and for every image in it the image's key, the offset into the
image at which the block begins, and which of the block's tokens are the image's. Placeholder tokens are the same for
all images, and a text may contain their id, too. The key of the block in which a bidirectional span begins covers all
of the span. The states that a decoder attends to by cross attention change every token's states, so their key is part
of the root key.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from blake3 import blake3

from vlmserve.types import KEY_BYTES, ImageSpan


class TouchedImage(NamedTuple):
    """An image in a block: rows ``offset <= row < offset + length`` of it are at `position` of the block on."""

    key: bytes
    offset: int
    position: int
    length: int


def root_key(identity: bytes, *, adapter: bytes = b"", salt: str = "") -> bytes:
    """The parent of every first block: one for each model, adapter and tenant.

    identity: of the model and of how its keys and values are stored, from `cache_identity`. adapter: the digest of its
    content, so that blocks of another one are never found by its name.
    """
    parts = (identity, adapter, salt.encode())
    return blake3(b"root" + b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()


def answers_key(root: bytes, kind: bytes, content: bytes) -> bytes:
    """The key of answers to requests that have `content` in common. kind: what that is."""
    return blake3(b"answers" + root + struct.pack("<Q", len(kind)) + kind + content).digest()


def adapted_image_key(image_key: bytes, adapter: bytes) -> bytes:
    """The key of an image whose embeddings are made with an adapter."""
    return blake3(b"adapted" + image_key + adapter).digest()


def cross_key(image_key: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of cross-attention states: of an image, or of a text that was encoded together with it."""
    if len(image_key) != KEY_BYTES:
        raise ValueError(f"keys have {KEY_BYTES} bytes")
    return blake3(b"cross" + image_key + array("q", token_ids).tobytes()).digest()


def cross_attention_root(root: bytes, cross: bytes) -> bytes:
    """The parent of the first blocks of requests that attend to the states with the key `cross`."""
    return blake3(b"cross attention" + root + cross).digest()


def block_key(
    parent: bytes, token_ids: Sequence[int], images: Sequence[TouchedImage], *, ahead: Sequence[int] = ()
) -> bytes:
    """The key of a block with the images in it, in order. ahead: later token ids that the block's tokens attend to.

    All keys have one length and the token ids come with theirs, so no two inputs read alike. Raises ValueError for
    keys of another length.
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
    """The images with a placeholder in ``start <= i < end``."""
    touched = []
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if first < last:
            touched.append(TouchedImage(span.image.key, first - span.start, first - start, last - first))
    return touched

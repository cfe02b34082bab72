"""Encodes messages as frames: msgpack, then each array's memory, uncopied and once per array."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from vlmserve.types import Pixels

Buffer: TypeAlias = "bytes | bytearray | memoryview"
Frames: TypeAlias = "list[bytes | memoryview]"
Message = TypeVar("Message")
_known: set[type] = set()
"""Message types whose fields msgspec has inspected."""
_looking_up = threading.Lock()


def pack(message: Any) -> Frames:
    """Encode a message. Its uint8 and float32 arrays become frames, referenced by index."""
    arrays: list[memoryview] = []
    places: dict[int, int] = {}

    def take_out(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value)} cannot be sent in a message")
        if id(value) not in places:
            arrays.append(np.ascontiguousarray(value, dtype=np.uint8 if value.dtype == np.uint8 else np.float32).data)
            places[id(value)] = len(arrays)
        return (places[id(value)], value.dtype == np.uint8, value.shape)

    return [msgspec.msgpack.encode(message, enc_hook=take_out), *arrays]


def unpack(frames: Sequence[Buffer], kind: type[Message]) -> Message:
    """Decode a message; its arrays are views of `frames`. Raises msgspec.ValidationError."""
    if kind not in _known:
        # msgspec crashes if two threads decode a type's first message.
        with _looking_up:
            msgspec.msgpack.Decoder(kind)
            _known.add(kind)
    arrays: dict[int, Pixels] = {}

    def put_in(_: type, value: Any) -> Pixels:
        index, in_bytes, shape = msgspec.convert(value, tuple[int, bool, list[int]])
        if index not in arrays:
            flat: Pixels = (
                np.frombuffer(frames[index], np.uint8) if in_bytes else np.frombuffer(frames[index], np.float32)
            )
            array = flat.reshape(shape)
            # ZeroMQ packs small frames without alignment, which torch needs.
            arrays[index] = array if array.flags.aligned else array.copy()
        return arrays[index]

    return msgspec.msgpack.decode(frames[0], type=kind, dec_hook=put_in)

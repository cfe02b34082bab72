"""Messages with arrays as frames: one of msgpack, then one for each array, as raw memory.

Arrays are neither copied into the message nor out of it, and one that a message refers to several times is sent once.
"""

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
"""Kinds of messages whose fields msgspec has looked up."""
_looking_up = threading.Lock()


def pack(message: Any) -> Frames:
    """The frames of a message: msgpack, then the uint8 or float32 arrays it refers to by their place in the list."""
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
    """A message of that kind. Its arrays are views of `frames`; what was one array when it was packed is one again.

    Raises msgspec.ValidationError if the frames hold no such message.
    """
    if kind not in _known:
        # msgspec crashes where two threads decode the first message of a kind.
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
            # ZeroMQ packs small frames next to each other, and torch wants its memory aligned.
            arrays[index] = array if array.flags.aligned else array.copy()
        return arrays[index]

    return msgspec.msgpack.decode(frames[0], type=kind, dec_hook=put_in)

"""What the frontend and the engine process say to each other over ZeroMQ.

A message is one msgpack frame, followed by one frame for each pixel array in it: arrays cross as raw memory and are
neither copied into the message nor out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from vlmserve import errors
from vlmserve.types import BlockMap, EngineOutput, EngineRequest, EngineSnapshot, EngineStats, ModelInfo, Pixels

Buffer: TypeAlias = "bytes | bytearray | memoryview"
Frames: TypeAlias = "list[bytes | memoryview]"


class Failure(msgspec.Struct, frozen=True):
    """An error of `vlmserve.errors` on the wire. kind: the name of its class."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: errors.VLMServeError) -> Failure:
        return cls(type(error).__name__, str(error), getattr(error, "param", None))

    def error(self) -> errors.VLMServeError:
        """The error again, as a fresh object of its own class."""
        kind: type[errors.VLMServeError] = getattr(errors, self.kind)
        if issubclass(kind, errors.InvalidRequestError):
            refused: errors.VLMServeError = kind(self.message, param=self.param)
            return refused
        return kind(self.message)


class Add(msgspec.Struct, frozen=True, tag=True):
    """Queue requests. Each is answered with `Accepted` or `Failed`. Arrays that they share cross once."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget requests at once."""

    request_ids: list[str]


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Tell what the engine holds. Answered with `Inspected`, in order."""


class MapBlocks(msgspec.Struct, frozen=True, tag=True):
    """Tell what the KV cache's blocks are in. Answered with `Mapped`, in order."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Exit now."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded. Sent once, first. load_seconds: how long that took."""

    info: ModelInfo
    stats: EngineStats
    load_seconds: float


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """These requests are queued."""

    request_ids: list[str]


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What a step brought. Also sent, empty, when aborts changed the stats."""

    outputs: list[EngineOutput]
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A request that the engine refused."""

    request_id: str
    failure: Failure


class Inspected(msgspec.Struct, frozen=True, tag=True):
    """What the engine held when it read `Inspect`."""

    snapshot: EngineSnapshot


class Mapped(msgspec.Struct, frozen=True, tag=True):
    """The KV cache's blocks when the engine read `MapBlocks`."""

    blocks: BlockMap


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; the process exits after this."""

    failure: Failure


ToEngine: TypeAlias = Add | Abort | Inspect | MapBlocks | Shutdown
FromEngine: TypeAlias = Ready | Accepted | Outputs | Failed | Inspected | Mapped | Fatal

_plain_encoder = msgspec.msgpack.Encoder()
_from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> Frames:
    """The frames of a message: msgpack, then the float32 arrays it refers to by their place in the list."""
    if not isinstance(message, Add):
        return [_plain_encoder.encode(message)]
    arrays: list[memoryview] = []
    places: dict[int, int] = {}

    def take_out(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value)} has no place in a message")
        if id(value) not in places:
            arrays.append(np.ascontiguousarray(value, dtype=np.float32).data)
            places[id(value)] = len(arrays)
        return (places[id(value)], value.shape)

    return [msgspec.msgpack.encode(message, enc_hook=take_out), *arrays]


def decode_to_engine(frames: Sequence[Buffer]) -> ToEngine:
    """A message to the engine. Its arrays are views of `frames`; what was one array when it was sent is one again.

    Raises msgspec.ValidationError if the frames hold no such message.
    """
    arrays: dict[int, Pixels] = {}

    def put_in(_: type, value: Any) -> Pixels:
        index, shape = msgspec.convert(value, tuple[int, list[int]])
        if index not in arrays:
            array: Pixels = np.frombuffer(frames[index], dtype=np.float32).reshape(shape)
            # ZeroMQ packs small frames next to each other, and torch wants its memory aligned.
            arrays[index] = array if array.flags.aligned else array.copy()
        return arrays[index]

    message: ToEngine = msgspec.msgpack.decode(frames[0], type=ToEngine, dec_hook=put_in)
    return message


def decode_from_engine(frame: Buffer) -> FromEngine:
    """A message from the engine; these have no arrays. Raises msgspec.ValidationError if it is none."""
    message: FromEngine = _from_engine_decoder.decode(frame)
    return message

"""What the frontend and the engine process say to each other over ZeroMQ, as `frames`: pixels cross as raw memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from vlmserve import errors
from vlmserve.frames import Buffer, Frames, pack, unpack
from vlmserve.types import AdapterInfo, BlockMap, EngineOutput, EngineRequest, EngineSnapshot, EngineStats, ModelInfo


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
    """Drop requests immediately."""

    request_ids: list[str]


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Asks for the engine's state. Answered with `Inspected`, in order."""


class MapBlocks(msgspec.Struct, frozen=True, tag=True):
    """Asks for the map of the KV cache's blocks. Answered with `Mapped`, in order."""


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load an adapter and serve it under a name. Answered with `AdapterDone` once that is done or has failed. pool: see
    `VLMEngine.load_adapter`."""

    number: int
    name: str
    path: str
    pool: dict[str, str] | None = None


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Serve an adapter no more. Answered with `AdapterDone`."""

    number: int
    name: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Exit now."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How far loading has come, for people. Sent before `Ready`."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded. Sent once, before answers. load_seconds: how long that took."""

    info: ModelInfo
    stats: EngineStats
    load_seconds: float
    adapters: list[AdapterInfo] = []


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


class AdapterDone(msgspec.Struct, frozen=True, tag=True):
    """The adapter of the message with that number is loaded or unloaded, or there is a reason why not.

    adapters: all that are served now.
    """

    number: int
    failure: Failure | None
    adapters: list[AdapterInfo]


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; the process exits after this."""

    failure: Failure


ToEngine: TypeAlias = Add | Abort | Inspect | MapBlocks | LoadAdapter | UnloadAdapter | Shutdown
FromEngine: TypeAlias = Loading | Ready | Accepted | Outputs | Failed | Inspected | Mapped | AdapterDone | Fatal

_plain_encoder = msgspec.msgpack.Encoder()
_from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> Frames:
    """The frames of a message; only `Add` has more than one."""
    return pack(message) if isinstance(message, Add) else [_plain_encoder.encode(message)]


def decode_to_engine(frames: Sequence[Buffer]) -> ToEngine:
    """A message to the engine, whose arrays are views of `frames`.

    Raises msgspec.ValidationError if the frames hold no such message.
    """
    # mypy takes no union for a type.
    message: ToEngine = unpack(frames, ToEngine)  # type: ignore[arg-type]
    return message


def decode_from_engine(frame: Buffer) -> FromEngine:
    """A message from the engine; these have no arrays. Raises msgspec.ValidationError if it is none."""
    message: FromEngine = _from_engine_decoder.decode(frame)
    return message

"""Messages between the frontend and the engine process, sent over ZeroMQ as `frames`. Pixels are raw memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from vlmserve import errors
from vlmserve.frames import Buffer, Frames, pack, unpack
from vlmserve.types import AdapterInfo, BlockMap, EngineOutput, EngineRequest, EngineSnapshot, EngineStats, ModelInfo


class Failure(msgspec.Struct, frozen=True):
    """An error of `vlmserve.errors`. kind: its class name."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: errors.VLMServeError) -> Failure:
        return cls(type(error).__name__, str(error), getattr(error, "param", None))

    def error(self) -> errors.VLMServeError:
        kind: type[errors.VLMServeError] = getattr(errors, self.kind)
        if issubclass(kind, errors.InvalidRequestError):
            refused: errors.VLMServeError = kind(self.message, param=self.param)
            return refused
        return kind(self.message)


class Add(msgspec.Struct, frozen=True, tag=True):
    """Each request is answered with `Accepted` or `Failed`. Shared arrays are sent once."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[str]


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Answered with `Inspected`, in order."""


class MapBlocks(msgspec.Struct, frozen=True, tag=True):
    """Answered with `Mapped`, in order."""


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Answered with `AdapterDone`. pool: see `VLMEngine.load_adapter`."""

    number: int
    name: str
    path: str
    pool: dict[str, str] | None = None


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Answered with `AdapterDone`."""

    number: int
    name: str


class Shutdown(msgspec.Struct, frozen=True, tag=True): ...


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress as text. Sent before `Ready`."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded. Sent once, before answers."""

    info: ModelInfo
    stats: EngineStats
    load_seconds: float
    adapters: list[AdapterInfo] = []


class Accepted(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[str]


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Outputs of a step. Also sent without outputs when aborts changed the stats."""

    outputs: list[EngineOutput]
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    failure: Failure


class Inspected(msgspec.Struct, frozen=True, tag=True):
    snapshot: EngineSnapshot


class Mapped(msgspec.Struct, frozen=True, tag=True):
    blocks: BlockMap


class AdapterDone(msgspec.Struct, frozen=True, tag=True):
    """An adapter was loaded or unloaded, or failed. adapters: all that are served."""

    number: int
    failure: Failure | None
    adapters: list[AdapterInfo]


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or continue. The process exits."""

    failure: Failure


ToEngine: TypeAlias = Add | Abort | Inspect | MapBlocks | LoadAdapter | UnloadAdapter | Shutdown
FromEngine: TypeAlias = Loading | Ready | Accepted | Outputs | Failed | Inspected | Mapped | AdapterDone | Fatal

_plain_encoder = msgspec.msgpack.Encoder()
_from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> Frames:
    return pack(message) if isinstance(message, Add) else [_plain_encoder.encode(message)]


def decode_to_engine(frames: Sequence[Buffer]) -> ToEngine:
    """Arrays are views of `frames`. Raises msgspec.ValidationError."""
    # mypy does not accept a union as a type.
    message: ToEngine = unpack(frames, ToEngine)  # type: ignore[arg-type]
    return message


def decode_from_engine(frame: Buffer) -> FromEngine:
    """Raises msgspec.ValidationError."""
    message: FromEngine = _from_engine_decoder.decode(frame)
    return message

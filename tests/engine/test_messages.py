"""Messages between the processes arrive as they were sent."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import zmq

from vlmserve import errors
from vlmserve.engine.messages import (
    Abort,
    Accepted,
    Add,
    Failed,
    Failure,
    Fatal,
    Inspect,
    Inspected,
    MapBlocks,
    Mapped,
    Outputs,
    Ready,
    Shutdown,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from vlmserve.frames import pack, unpack
from vlmserve.levels import Levels
from vlmserve.types import (
    BlockMap,
    CrossInput,
    EngineOutput,
    EngineRequest,
    EngineSnapshot,
    EngineStats,
    ImageInput,
    ImageSpan,
    ModelInfo,
    Prompt,
    RequestSnapshot,
    RequestTimings,
    SamplingParams,
    Tiling,
    TokenLogprobs,
)

SHAPES = [(1, 3, 4, 4), (2, 3, 28, 28), (1, 3, 5, 7)]


def request_with_pictures() -> EngineRequest:
    generator = np.random.default_rng(0)
    images = [
        ImageInput(bytes([index]) * 32, generator.random(shape, np.float32), 4) for index, shape in enumerate(SHAPES)
    ]
    levels = generator.integers(0, 256, SHAPES[0], np.uint8)
    images[0] = ImageInput(bytes(32), levels, 4, levels=Levels(1 / 255, (0.5, 0.4, 0.3), None))
    spans = tuple(ImageSpan(image, start) for image, start in zip(images, (0, 5, 11), strict=True))
    params = SamplingParams(
        stop=("x",), seed=2**63 - 1, logit_bias={3: -100.0, 70000: 0.5}, repeat_last_n=64, logprobs=0, prompt_logprobs=2
    )
    return EngineRequest("a", Prompt(list(range(20)), spans), params)


@pytest.fixture
def sockets():
    context = zmq.Context()
    one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    one.bind("inproc://test")
    other.connect("inproc://test")
    yield one, other
    context.destroy(linger=0)


def test_images_cross_a_socket_unchanged_beside_the_message(sockets):
    one, other = sockets
    request = request_with_pictures()
    frames = encode(Add([request]))
    assert len(frames) == 1 + len(SHAPES)
    assert len(frames[0]) < 2000
    one.send_multipart(frames, copy=False)
    received = decode_to_engine([frame.buffer for frame in other.recv_multipart(copy=False)])
    assert isinstance(received, Add)
    assert received.requests[0].prompt.token_ids == request.prompt.token_ids
    assert received.requests[0].params == request.params
    for sent, got in zip(request.prompt.images, received.requests[0].prompt.images, strict=True):
        assert (got.start, got.end, got.image.key) == (sent.start, sent.end, sent.image.key)
        assert (got.image.pixels.dtype, got.image.levels) == (sent.image.pixels.dtype, sent.image.levels)
        assert got.image.pixels.flags.aligned
        np.testing.assert_array_equal(got.image.pixels, sent.image.pixels)


def test_the_layout_of_an_image_crosses():
    text = ((0, 5), (3, 6))
    image = ImageInput(b"k" * 32, np.zeros((3, 3, 2, 2), np.float32), 9, (1, 2, 3), 0.5, Tiling(1, 2, 3, 4), text)
    received = decode_to_engine(encode(Add([EngineRequest("a", Prompt([1] * 9, (ImageSpan(image, 0),)))])))
    assert isinstance(received, Add)
    got = received.requests[0].prompt.images[0]
    assert (got.image.grid, got.image.frame_step) == ((1, 2, 3), 0.5)
    assert (got.image.tiling, got.image.text) == (Tiling(1, 2, 3, 4), text)
    assert list(got.placement.runs(0, 9)) == [(1, 3, 0), (4, 9, 2)]


def test_large_images_are_views_of_frames():
    request = request_with_pictures()
    frames = encode(Add([request]))
    sent = request.prompt.images[1].image.pixels
    assert np.shares_memory(np.frombuffer(frames[2], np.float32), sent)
    received = decode_to_engine(frames)
    assert isinstance(received, Add)
    assert np.shares_memory(received.requests[0].prompt.images[1].image.pixels, sent)


def test_arrays_become_plain_float32():
    pixels = np.arange(48, dtype=np.float64).reshape(1, 4, 4, 3).transpose(0, 3, 1, 2)
    prompt = Prompt([1, 2], (ImageSpan(ImageInput(b"k" * 32, pixels, 1), 0),))
    received = decode_to_engine(encode(Add([EngineRequest("a", prompt)])))
    assert isinstance(received, Add)
    np.testing.assert_array_equal(received.requests[0].prompt.images[0].image.pixels, pixels)


def test_shared_images_cross_once():
    request = request_with_pictures()
    sisters = [EngineRequest(name, request.prompt, cache_salt="s") for name in "abcd"]
    image = request.prompt.images[1].image
    equal = ImageInput(image.key, image.pixels.copy(), image.num_tokens)
    other = EngineRequest("e", Prompt([1] * 8, (ImageSpan(equal, 0), ImageSpan(image, 4))))
    frames = encode(Add([*sisters, other]))
    assert len(frames) == 1 + len(SHAPES) + 1
    received = decode_to_engine(frames)
    assert isinstance(received, Add)
    assert [(got.request_id, got.cache_salt) for got in received.requests] == [*((n, "s") for n in "abcd"), ("e", "")]
    for place, span in enumerate(request.prompt.images):
        arrays = [got.prompt.images[place].image.pixels for got in received.requests[:4]]
        assert len({id(array) for array in arrays}) == 1
        np.testing.assert_array_equal(arrays[0], span.image.pixels)
    assert received.requests[4].prompt.images[1].image.pixels is received.requests[0].prompt.images[1].image.pixels
    np.testing.assert_array_equal(received.requests[4].prompt.images[0].image.pixels, image.pixels)


def test_what_a_request_looks_at_crosses_with_it():
    image = ImageInput(b"k" * 32, np.ones((1, 3, 2, 2), np.float32), 5)
    request = EngineRequest("a", Prompt([7], cross=CrossInput(image, [1, 2])))
    received = decode_to_engine(encode(Add([request])))
    assert isinstance(received, Add)
    [got] = received.requests
    assert got.prompt.num_images == 1
    assert got.prompt.cross is not None
    assert (got.prompt.cross.token_ids, got.prompt.cross.image.key) == ([1, 2], image.key)
    np.testing.assert_array_equal(got.prompt.cross.image.pixels, image.pixels)


def test_read_only_images_cross_a_socket(sockets):
    one, other = sockets
    request = request_with_pictures()
    for span in request.prompt.images:
        span.image.pixels.flags.writeable = False
    one.send_multipart(encode(Add([request])), copy=False)
    received = decode_to_engine([frame.buffer for frame in other.recv_multipart(copy=False)])
    assert isinstance(received, Add)
    for sent, got in zip(request.prompt.images, received.requests[0].prompt.images, strict=True):
        np.testing.assert_array_equal(got.image.pixels, sent.image.pixels)


@pytest.mark.parametrize("message", [Abort(["a", "b"]), Inspect(), MapBlocks(), Shutdown()])
def test_messages_to_the_engine(message):
    assert decode_to_engine(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Ready(ModelInfo("m", "llava", 128, 100, "float32", "cpu", 10, 127, 1000, True), EngineStats(), 1.5),
        Accepted(["a"]),
        Outputs([EngineOutput("a", [1, 2], "stop", 5), EngineOutput("b", [])], EngineStats(num_running=1)),
        Outputs([EngineOutput("a", [], "stop", timings=RequestTimings(0.1, 0.2, 0.3, 0.4))], EngineStats()),
        Outputs(
            [
                EngineOutput(
                    "a",
                    [7],
                    logprobs=[TokenLogprobs(7, -0.5, 1, ((7, -0.5), (3, -float("inf"))))],
                    prompt_logprobs=[None, TokenLogprobs(5, -2.0, 9)],
                )
            ],
            EngineStats(),
        ),
        Inspected(EngineSnapshot(EngineStats(steps=3), [RequestSnapshot("a", "preempted", 5, 6, 4, 0, 1, 2)])),
        Mapped(BlockMap(5, 2, [2, 1, 0], [0, 1, 1], [3, 1, 0])),
        Failed("a", Failure("OverloadedError", "full")),
        Fatal(Failure("MissingWeightsError", "no weights")),
    ],
)
def test_messages_from_the_engine(message):
    [frame] = encode(message)
    assert decode_from_engine(frame) == message


@pytest.mark.parametrize(
    "error",
    [
        errors.PromptTooLongError("too long", param="messages"),
        errors.OverloadedError("full"),
        errors.MissingWeightsError("no weights"),
        errors.EngineDeadError("dead"),
    ],
)
def test_errors_keep_class_message_and_field(error):
    again = Failure.of(error).error()
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert getattr(again, "param", None) == getattr(error, "param", None)


def test_what_is_no_message_is_refused():
    with pytest.raises(msgspec.ValidationError):
        decode_to_engine([msgspec.msgpack.encode({"type": "Ready"})])
    with pytest.raises(msgspec.ValidationError):
        decode_from_engine(msgspec.msgpack.encode({"type": "Add"}))


def test_threads_unpack_their_first_message_together() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(20):
                part = msgspec.defstruct("Part", [(f"field{number}", "list[int]", []) for number in range(30)])
                kind = msgspec.defstruct("Kind", [(f"field{number}", list[part], []) for number in range(30)])
                frames, barrier = pack(kind()), threading.Barrier(4)

                def read(_: int, kind=kind, frames=frames, barrier=barrier):
                    barrier.wait()
                    return unpack(frames, kind)

                assert [*pool.map(read, range(4))] == [kind()] * 4
    finally:
        sys.setswitchinterval(interval)

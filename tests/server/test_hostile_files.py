"""Files that take long to decode: the server stays responsive, and other clients' files are decoded meanwhile."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import select
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.media.documents_for_tests import page, pdf_file, slow, square
from tests.media.images_for_tests import encoded, noise
from tests.media.test_decoding import with_scans
from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.process import ServerProcess, settle
from tests.server.test_attacks import ask
from tests.waiting import wait_until

Part = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mock_checkpoint(tmp_path_factory.mktemp("checkpoint"), context=100_000)


def limits(seconds: int) -> list[str]:
    return ["--num-workers", "2", "--video-timeout", str(seconds), "--document-timeout", str(seconds)]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    """Decodes a file for longer than a test takes, unless its client leaves."""
    with ServerProcess(folder, *limits(seconds=300)) as running:
        for part in HONEST.values():
            assert ask(running, question(part)).status_code == 200
        yield running


@pytest.fixture(scope="module")
def impatient(folder: Path) -> Iterator[ServerProcess]:
    """Gives up after a second."""
    with ServerProcess(folder, *limits(seconds=1)) as running:
        yield running


def url_of(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def file_part(data: bytes) -> Part:
    return {"type": "file", "file": {"file_data": url_of(data, "application/octet-stream")}}


def video_part(data: bytes) -> Part:
    return {"type": "video_url", "video_url": {"url": url_of(data, "video/mp4")}}


def question(part: Part, salt: str = "honest") -> Part:
    return {"messages": [{"role": "user", "content": [part]}], "cache_salt": salt, "max_tokens": 1}


def film(size: tuple[int, int], count: int) -> bytes:
    """An MP4 file whose frames repeat one encoded frame, so that large ones take few bytes."""
    av = pytest.importorskip("av")
    if "libx264" not in av.codecs_available:
        pytest.skip("PyAV has no encoder for H.264 here")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.options = {"preset": "ultrafast", "x264-params": "keyint=100000:threads=1:bframes=0"}
        frame = av.VideoFrame.from_image(Image.new("RGB", size, "gray"))
        packets = []
        for number in range(3):
            frame.pts = number
            packets += stream.encode(frame)
        packets += stream.encode()
        for number in range(count):
            packet = av.Packet(bytes(packets[min(number, 2)]))
            packet.pts = packet.dts = number
            packet.time_base, packet.stream, packet.is_keyframe = Fraction(1, 30), stream, number == 0
            container.mux(packet)
    return file.getvalue()


def animation(size: tuple[int, int], count: int) -> bytes:
    """A WebP file that repeats one frame."""
    frames = [Image.new("RGB", size, colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True, method=0)
    first = data.index(b"ANMF")
    frame = data[first : first + 8 + int.from_bytes(data[first + 4 : first + 8], "little")]
    body = data[8:first] + frame * count
    return b"RIFF" + len(body).to_bytes(4, "little") + body


def pages_of_scans(count: int, scans: int) -> bytes:
    """A TIFF file whose pages are one progressive JPEG with a scan that is repeated. libtiff rejects 100 scans."""
    jpeg = encoded(Image.new("RGB", (4000, 3900)), "JPEG", progressive=True)
    jpeg = with_scans(jpeg, scans)
    tags = [(256, 4000), (257, 3900), (258, 8), (259, 7), (262, 6), (273, 8), (277, 3), (278, 3900), (279, len(jpeg))]
    data = b"II*\0" + (8 + len(jpeg)).to_bytes(4, "little") + jpeg
    for number in range(count):
        page = len(tags).to_bytes(2, "little") + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
        following = len(data) + len(page) + 4 if number + 1 < count else 0
        data += page + following.to_bytes(4, "little")
    return data


HONEST = {
    "image": {"type": "image_url", "image_url": {"url": url_of(encoded(noise(60, 40)), "image/png")}},
    "document": file_part(pdf_file([page(square("1 0 0"))])),
}


@cache
def hostile(kind: str) -> Part:
    """A small file that takes minutes to decode."""
    if kind == "document":
        return file_part(slow())
    if kind == "pages":
        return file_part(pages_of_scans(32, 85))
    if kind == "animation":
        return {**file_part(animation((4000, 4000), 19_000)), "pages": "19000"}
    data = film((7680, 4320), 19_000)
    assert len(data) < 1_000_000
    return video_part(data)


def attack(kind: str, part: Part, route: str) -> tuple[Part, str]:
    """Body and path of a request with a hostile file."""
    messages = question(part)["messages"]
    match route:
        case "chat":
            return question(part, "hostile"), "/v1/chat/completions"
        case "tokenize":
            return {"messages": messages}, "/tokenize"
        case "responses":
            assert kind == "document"
            item = {"role": "user", "content": [{"type": "input_file", **part["file"]}]}
            return {"input": [item], "store": False}, "/v1/responses"
    assert kind == "document"
    data = part["file"]["file_data"].partition(",")[2]
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    block = {"type": "document", "source": source}
    return {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1}, f"/v1/{route}"


def unanswered(connections: list[socket.socket]) -> bool:
    return select.select(connections, [], [], 0)[0] == []


@pytest.mark.parametrize("kind", ["video", "document", "animation", "pages"])
def test_hostile_files_hold_up_nobody(server: ServerProcess, kind: str) -> None:
    part = hostile(kind)
    with server.watched(max_seconds=60, max_growth=1_200_000_000), contextlib.ExitStack() as leaving:
        # More than threads. Equal files are decoded once unless their salts differ.
        bodies = [json.dumps(question(part, str(number))).encode() for number in range(3)]
        attacks = [leaving.enter_context(server.sending("/v1/chat/completions", body)) for body in bodies]
        wait_until(lambda: len(server.decoders()) >= 2)
        decoders = server.decoders()
        for one in HONEST.values():
            assert ask(server, question(one, f"during {kind}")).status_code == 200
        assert unanswered(attacks)
        assert all(decoder.is_running() for decoder in decoders)
        assert max(decoder.memory_info().rss for decoder in decoders) < 1_300_000_000
    wait_until(lambda: not server.decoders())


@pytest.mark.parametrize(
    ("kind", "routes"),
    [
        ("video", ["chat", "tokenize"]),
        ("document", ["chat", "tokenize", "responses", "messages"]),
        ("animation", ["chat"]),
        ("pages", ["chat"]),
    ],
)
def test_hostile_files_are_rejected_in_time(impatient: ServerProcess, kind: str, routes: list[str]) -> None:
    part = hostile(kind)
    with ThreadPoolExecutor(4) as pool:
        for answer in pool.map(lambda route: ask(impatient, *attack(kind, part, route)), routes):
            assert answer.status_code == 400
            assert "longer than 1 s" in answer.text
    assert not impatient.decoders()


def test_large_images_hold_up_no_small_one(server: ServerProcess) -> None:
    # More requests than threads that decode, each with images that take seconds.
    large = Image.new("RGB", (5000, 5000))
    parts = []
    for number in range(4):
        large.putpixel((0, 0), (number, 0, 0))
        url = url_of(encoded(large, "WEBP", lossless=True, method=0), "image/webp")
        parts.append({"type": "image_url", "image_url": {"url": url}})
    messages = [{"role": "user", "content": parts}]
    used = server.cpu_seconds
    with contextlib.ExitStack() as leaving:
        bodies = [json.dumps({"messages": messages, "cache_salt": str(number)}).encode() for number in range(4)]
        attacks = [leaving.enter_context(server.sending("/v1/chat/completions", body)) for body in bodies]
        wait_until(lambda: server.cpu_seconds > used + 0.2)  # it decodes
        assert ask(server, question(HONEST["image"], "during")).status_code == 200
        assert unanswered(attacks)
    settle(server)


def test_memory_of_large_images_is_returned(server: ServerProcess) -> None:
    images = [encoded(Image.new("RGB", (7000, 6000), color), "PNG", compress_level=1) for color in ("red", "blue")]
    parts = [{"type": "image_url", "image_url": {"url": url_of(image, "image/png")}} for image in images]
    before = server.memory
    for number in range(2):
        with ThreadPoolExecutor(2) as pool:
            bodies = [question(part, f"round {number}") for part in parts]
            assert [answer.status_code for answer in pool.map(lambda body: ask(server, body), bodies)] == [200] * 2
        wait_until(lambda: server.memory < before + 150_000_000, timeout=30)

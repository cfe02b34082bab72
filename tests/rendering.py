"""Processes that decode files: documents, videos, images."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from PIL import Image

from vlmserve.media import fork_server, isolated_worker
from vlmserve.media.decoding import DecodingMemory
from vlmserve.media.pdf import PDFProcess

_CAPTURED = """
import os, runpy, sys
worker = runpy.run_path(sys.argv[1])
def decode(decoder, stdin, out, *memory):
    with open(sys.argv[2], "rb") as answer:
        os.write(out.fileno(), answer.read())
    stdin.read()
worker["_fork"].__globals__["_decode"] = decode
worker["main"]()
"""


def fork_servers() -> list[psutil.Process]:
    """The children of this process that fork those which decode."""
    servers = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if "isolated_worker" in " ".join(child.cmdline()):
                servers.append(child)
    return servers


def renderers() -> list[psutil.Process]:
    """Processes that have a file open."""
    found = []
    for server in fork_servers():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child for child in server.children() if child.status() != psutil.STATUS_ZOMBIE]
    return found


def rendering() -> bool:
    """Whether a file is open in a process that decodes it."""
    return bool(renderers())


@contextlib.contextmanager
def captured(monkeypatch: pytest.MonkeyPatch, answer: str = "") -> Iterator[Callable[[str], object]]:
    """Every process that decodes a file writes an answer, whatever it is asked, and does not end by itself.

    Yields a function that changes the answer of the processes that start after it.
    """
    script = os.fspath(Path(isolated_worker.__file__))
    with monkeypatch.context() as patch, tempfile.NamedTemporaryFile() as file:
        change = Path(file.name).write_text
        change(answer)
        patch.setattr(fork_server, "COMMAND", [sys.executable, "-c", _CAPTURED, script, file.name])
        fork_server.end_servers()
        yield change
    fork_server.end_servers()


@contextlib.contextmanager
def without_module(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """Decoding processes that start in the block cannot import a module."""
    code = f"import sys, runpy; sys.modules[{name!r}] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    with monkeypatch.context() as patch:
        patch.setattr(fork_server, "COMMAND", [sys.executable, "-c", code, fork_server.COMMAND[-1]])
        fork_server.end_servers()
        yield
    fork_server.end_servers()


def page_image(process: PDFProcess, number: int) -> Image.Image:
    """A page of an open PDF."""
    with process.rendered(number, DecodingMemory(sys.maxsize)) as image:
        return image

"""Files that take long to decode, on the ways to the server that are not chat: uploads, batches, and in `LLM`."""

from __future__ import annotations

import base64
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import psutil
import pytest

from tests.media.documents_for_tests import page, pdf_file, slow, square
from tests.media.images_for_tests import encoded, noise
from tests.media.test_decoding import with_blocks, with_runs
from tests.rendering import renderers, rendering
from tests.server.live import LiveServer
from tests.server.test_batches import content, finished, line, start
from tests.server.test_chat import about, data_url
from tests.server.test_hostile_files import hostile
from tests.waiting import wait_until
from vlmserve import LLM, SamplingParams
from vlmserve.errors import VLMServeError
from vlmserve.server import history
from vlmserve.server.routes import files

LIMIT = 600
"""Seconds after which a file is given up: longer than a test takes."""
LIMITS = {
    "document_timeout": LIMIT, "video_timeout": LIMIT, "decode_timeout": LIMIT, "page_dpi": 36, "num_workers": 2
}  # fmt: skip
PATIENCE = 60.0
"""Seconds after which a request hangs."""


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("history") / "history.db"
    with LiveServer(folder, server={"storage_url": f"sqlite:///{path}"}, media=LIMITS) as running:
        yield running


def file_part(data: bytes) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": base64.b64encode(data).decode()}}


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/x;base64," + base64.b64encode(data).decode()}}


@pytest.mark.parametrize("module", [files, history], ids=["uploads", "uses of uploads"])
def test_slow_files_do_not_block_the_history(server, monkeypatch, module) -> None:
    name = "media_type_of" if module is files else "is_document"
    original, over, opening = getattr(module, name), threading.Event(), threading.Semaphore(0)
    image = encoded(noise(40, 30))
    known = server.openai.files.create(file=("a.png", image), purpose="user_data")

    def open_slowly(data: bytes, limits: Any) -> Any:
        opening.release()
        over.wait(60)
        return original(data, limits)

    monkeypatch.setattr(module, name, open_slowly)
    with ThreadPoolExecutor(8) as threads:
        if module is files:
            create = server.openai.files.create
            late = [threads.submit(create, file=("a.png", image), purpose="user_data") for _ in range(8)]
        else:
            messages = [{"role": "user", "content": [{"type": "file", "file": {"file_id": known.id}}]}]
            late = [threads.submit(server.post, {"messages": messages}) for _ in range(8)]
        try:
            assert opening.acquire(timeout=PATIENCE)
            assert server.openai.with_options(timeout=PATIENCE).files.retrieve(known.id).id == known.id
        finally:
            over.set()
        for one in late:
            one.result(60)


def test_slow_upload_is_rejected_in_time(folder, tmp_path) -> None:
    storage = {"storage_url": f"sqlite:///{tmp_path / 'history.db'}"}
    with LiveServer(folder, server=storage, media={**LIMITS, "decode_timeout": 0.3}) as server:
        with pytest.raises(openai.BadRequestError, match=r"longer than 0\.3 s"):
            server.openai.files.create(file=("a.gif", with_blocks(9_000_000)), purpose="user_data")
        assert not rendering()


@pytest.mark.parametrize(
    "make",
    [lambda: file_part(slow()), lambda: image_part(with_runs(8_000_000)), lambda: hostile("video")],
    ids=["document", "image", "video"],
)
def test_hostile_rows_of_a_batch_hold_up_nobody(server, make) -> None:
    messages = [{"role": "user", "content": [make()]}]
    rows = [{**line(f"row {number}", messages=messages, cache_salt=str(number))} for number in range(3)]
    batch = start(server.openai, rows)
    wait_until(rendering)
    for color in ("red", "green", "blue"):
        answer = server.post({"messages": about(data_url(color)), "max_tokens": 1})
        assert answer.status_code == 200
    assert server.openai.batches.retrieve(batch.id).request_counts.failed == 0, "others waited"

    def ended() -> bool:
        end_renderers()
        return server.openai.batches.retrieve(batch.id).status == "completed"

    wait_until(ended)
    assert server.openai.batches.retrieve(batch.id).request_counts.failed == len(rows)
    errors = content(server.openai, finished(server.openai, batch.id).error_file_id)
    assert all("was killed" in error["response"]["body"]["error"]["message"] for error in errors)
    assert not rendering()


def end_renderers() -> None:
    for process in renderers():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.parametrize("make", [lambda: file_part(slow()), lambda: hostile("video")], ids=["document", "video"])
def test_hostile_file_of_one_thread_delays_no_other(folder, make) -> None:
    one = SamplingParams(max_tokens=1)
    parts = file_part(pdf_file([page(square("1 0 0"))])), make()
    honest, attacking = ([{"role": "user", "content": [part]}] for part in parts)
    with LLM(str(folder), engine="mock", document_timeout=300, video_timeout=300, page_dpi=36) as llm:
        llm.chat(honest, one, use_tqdm=False)
        with ThreadPoolExecutor(1) as threads:
            attack = threads.submit(llm.chat, attacking, one, use_tqdm=False)
            wait_until(lambda: rendering() or attack.done())
            assert len(llm.chat(honest, one, use_tqdm=False)) == 1
            assert not attack.done()
            end_renderers()
            with pytest.raises(VLMServeError):
                attack.result(60)
    assert not rendering()

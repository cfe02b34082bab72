"""A server of several models runs batches whose requests name models."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.scaleout.ondemand.serving import Serving, list_models, make_models
from tests.server.test_batches import jsonl
from tests.waiting import until
from vlmserve.scaleout.ondemand.catalogue import Listed
from vlmserve.scaleout.proxy import forward
from vlmserve.server.batches.rows import OWN_ENDPOINTS
from vlmserve.server.batches.runner import batches_running

NAMES = ("a", "b", "c")
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"), NAMES)


def listed_with(folder: Path, **server: Any) -> list[Listed]:
    return [replace(one, server=one.server.model_copy(update=server)) for one in list_models(folder)]


@contextlib.asynccontextmanager
async def running(folder: Path, history: Path, room: int) -> AsyncIterator[Serving]:
    stored = {"storage_path": str(history), "batch_lease": 1.0}
    async with (
        Serving(listed_with(folder, **stored), room, **stored) as serving,
        batches_running(serving.gateway, dict.fromkeys(OWN_ENDPOINTS, forward)),
    ):
        yield serving


def line(row: int, model: str | None) -> dict[str, Any]:
    body = {"prompt": f"Question {row}?", "max_tokens": 3, **({} if model is None else {"model": model})}
    return {"custom_id": f"{row}", "method": "POST", "url": PATH, "body": body}


async def start(serving: Serving, lines: list[dict[str, Any]]) -> str:
    file = {"file": ("requests.jsonl", jsonl(lines))}
    uploaded = (await serving.client.post("/v1/files", files=file, data={"purpose": "batch"})).json()
    body = {"input_file_id": uploaded["id"], "endpoint": PATH, "completion_window": "24h"}
    return (await serving.client.post("/v1/batches", json=body)).json()["id"]


async def ended(serving: Serving, id: str) -> dict[str, Any]:
    batch: dict[str, Any] = {}

    async def is_over() -> bool:
        batch.update((await serving.client.get(f"/v1/batches/{id}")).json())
        return batch["status"] in ("completed", "failed", "expired", "cancelled")

    await until(is_over)
    return batch


async def answers(serving: Serving, file_id: str) -> list[dict[str, Any]]:
    text = (await serving.client.get(f"/v1/files/{file_id}/content")).text
    return [json.loads(one) for one in text.splitlines()]


async def test_batch_loads_each_model_once(folder, tmp_path):
    async with running(folder, tmp_path / "history.db", room=1) as serving:
        lines = [line(row, NAMES[row % 3]) for row in range(30)]
        batch = await ended(serving, await start(serving, lines))
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 30)
        found = await answers(serving, batch["output_file_id"])
        assert [(one["custom_id"], one["response"]["body"]["model"]) for one in found] == [
            (f"{row}", NAMES[row % 3]) for row in range(30)
        ]
        assert [serving.model(name).loads for name in NAMES] == [1, 1, 1]
        assert (await serving.client.get("/v1/batches")).json()["data"][0]["id"] == batch["id"]


async def test_rows_without_a_known_model_fail(folder, tmp_path):
    async with running(folder, tmp_path / "history.db", room=1) as serving:
        batch = await ended(serving, await start(serving, [line(0, "a"), line(1, "d"), line(2, None)]))
        assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        failed = await answers(serving, batch["error_file_id"])
        assert [one["response"]["status_code"] for one in failed] == [404, 400]


async def test_images_need_a_loaded_model(folder, tmp_path):
    async with running(folder, tmp_path / "history.db", room=1) as serving:
        image = {"file": ("a.png", b"\x89PNG\r\n\x1a\n")}
        answer = await serving.client.post("/v1/files", files=image, data={"purpose": "vision"})
        assert (answer.status_code, "No model is loaded" in answer.text) == (503, True)


async def test_batches_need_a_database(folder):
    async with Serving(list_models(folder)) as serving:
        assert (await serving.ask("a")).status_code == 200
        body = {"input_file_id": "file-1", "endpoint": PATH, "completion_window": "24h"}
        answer = await serving.client.post("/v1/batches", json=body)
        assert (answer.status_code, "--storage-url" in answer.text) == (404, True)

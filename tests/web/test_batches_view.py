"""The view of batches in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.live import QUESTION
from tests.waiting import wait_until

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test installs it")

from playwright.sync_api import Locator, Page, expect


def requests(count: int, **body: Any) -> bytes:
    """A file of requests with the ids r0, r1 ..."""
    rows = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "tiny", "messages": QUESTION, "max_tokens": 4, **body},
        }
        for number in range(count)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def start(page: Page, name: str, content: bytes) -> Locator:
    """Start a batch; its place in the list."""
    page.get_by_label("File of requests").set_input_files(
        {"name": name, "mimeType": "application/jsonl", "buffer": content}
    )
    return page.locator(".panel").filter(has_text=name)


def test_batch_is_started_and_results_are_saved(pixie, visit, tmp_path: Path):
    page = visit(pixie)
    page.get_by_role("link", name="Batches").click()
    rows = requests(3).splitlines()
    rows[1] = rows[1].replace(b'"max_tokens": 4', b'"max_tokens": -4')
    job = start(page, "shop.jsonl", b"\n".join(rows))
    expect(job).to_contain_text("Completed 3 of 3 requests, 1 failed")
    expect(job.get_by_role("progressbar")).to_have_count(0)
    for kind, ids in (("answers", ["r0", "r2"]), ("errors", ["r1"])):
        with page.expect_download() as saved:
            job.get_by_role("button", name=f"Save {kind}").click()
        assert saved.value.suggested_filename == f"shop.{kind}.jsonl"
        saved.value.save_as(tmp_path / kind)
        assert [json.loads(row)["custom_id"] for row in (tmp_path / kind).read_text().splitlines()] == ids
    listed = httpx.get(f"{pixie.url}/v1/batches", timeout=60).json()["data"]
    assert {"name": "shop.jsonl"} in [batch["metadata"] for batch in listed]


def test_without_batches_it_says_so(pixie, visit):
    page = visit(pixie)
    page.route("**/v1/batches?*", lambda route: route.fulfill(json={"data": [], "has_more": False, "last_id": None}))
    page.get_by_label("Question", exact=True).blur()
    page.keyboard.press("b")
    expect(page.get_by_text("There is no batch yet.")).to_be_visible()


def test_invalid_batch_file_shows_its_wrong_lines(pixie, visit):
    page = visit(pixie, "/#/batches")
    job = start(page, "wrong.jsonl", requests(1) + b"{}\n" * 7)
    expect(job).to_contain_text("Failed")
    expect(job).to_contain_text(re.compile(r"Line 2: .*custom_id"))
    expect(job).to_contain_text("and 2 more")


def test_file_rejected_by_the_server_leaves_nothing(pixie, visit):
    page = visit(pixie, "/#/batches", complains="400")
    page.route("**/v1/batches", lambda route: route.fulfill(status=400, json={"error": {"message": "No such luck"}}))
    before = len(httpx.get(f"{pixie.url}/v1/files", timeout=60).json()["data"])
    page.get_by_label("File of requests").set_input_files(
        {"name": "a.jsonl", "mimeType": "application/jsonl", "buffer": requests(1)}
    )
    expect(page.get_by_role("alert")).to_contain_text("No such luck")
    expect(page.get_by_role("button", name="Start a batch")).to_be_enabled()
    assert len(httpx.get(f"{pixie.url}/v1/files", timeout=60).json()["data"]) == before


def test_progress_is_shown_and_a_batch_is_cancelled(slow, visit):
    page = visit(slow, "/#/batches")
    job = start(page, "long.jsonl", requests(400, max_tokens=60, ignore_eos=True))
    expect(job).to_contain_text(re.compile(r"Running [1-9]\d* of 400 requests, about [1-9]\d* (s|min) left"))
    bar = job.get_by_role("progressbar", name="Progress of long.jsonl")
    assert 0 < bar.evaluate("bar => bar.value / bar.max") < 1
    job.get_by_role("button", name="Cancel").click()
    expect(job).to_contain_text(re.compile(r"Cancelled [1-9]\d* of 400 requests"))
    expect(job.get_by_role("button", name="Cancel")).to_have_count(0)
    expect(job.get_by_role("button", name="Save answers")).to_be_visible()


def test_more_than_twenty_are_shown_on_request(slow, visit):
    with httpx.Client(base_url=f"{slow.url}/v1", timeout=60) as client:
        files = {"file": ("one.jsonl", requests(1, max_tokens=1), "application/jsonl")}
        file = client.post("/files", data={"purpose": "batch"}, files=files).json()["id"]
        for number in range(22):
            asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "metadata": {"name": f"many {number}"}}
            batch = client.post("/batches", json=asked).json()["id"]
            wait_until(lambda batch=batch: client.get(f"/batches/{batch}").json()["status"] == "completed")
    page = visit(slow, "/#/batches")
    jobs = page.locator(".panel")
    expect(jobs).to_have_count(20)
    expect(jobs.first).to_contain_text("many 21")
    page.get_by_role("button", name="Show older ones").click()
    expect(page.locator(".panel").filter(has_text="many 0")).to_have_count(1)

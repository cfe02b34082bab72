"""The view of batches in a real browser."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.server.live import QUESTION
from tests.waiting import wait_until

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test installs it")

from playwright.sync_api import Locator, Page, expect

SHAPES = Path(__file__).parents[2] / "examples/shapes.png"


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
    return jobs(page).filter(has_text=name)


def jobs(page: Page) -> Locator:
    """The places of all batches in the list."""
    return page.get_by_role("list", name="Batches").locator("> .panel")


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


def test_folder_is_asked_about_and_answers_are_read(pixie, visit, tmp_path: Path):
    folder = tmp_path / "shelf"
    (folder / "new").mkdir(parents=True)
    shutil.copy(SHAPES, folder / "new/shapes.png")
    shutil.copy(SHAPES.with_suffix(".pdf"), folder / "b.pdf")
    Image.new("RGB", (3000, 2000), "red").save(folder / "a.jpg")
    (folder / "broken.png").write_bytes(b"nothing of that kind")
    (folder / "notes.txt").write_text("no image")
    page = visit(pixie, "/#/batches", complains="400")
    page.get_by_label("Choose a folder to ask about").set_input_files(folder)
    expect(page.get_by_text("3 images and 1 document, ")).to_be_visible()
    page.get_by_label("Question").fill("What colour is the circle?")
    page.get_by_role("button", name="Ask about 4 files").click()
    expect(page.get_by_role("alert")).to_contain_text("broken.png was left out: ")
    job = jobs(page).filter(has_text="shelf.jsonl")
    expect(job).to_contain_text("Completed 3 of 3 requests")
    job.get_by_role("button", name="Read answers").click()
    results = page.get_by_role("list", name="Answers").locator("> li")
    expect(results.locator("h3")).to_have_text(["a.jpg", "b.pdf", "new/shapes.png"])
    expect(results.last).to_contain_text("red")
    expect(results.last.get_by_role("img")).to_have_js_property("naturalWidth", 288)
    width = results.first.get_by_role("img").evaluate("image => image.decode().then(() => image.naturalWidth)")
    assert 100 < width < 3000
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as CSV").click()
    rows = list(csv.DictReader(Path(saved.value.path()).read_text().splitlines()))
    assert [row["id"] for row in rows] == ["a.jpg", "b.pdf", "new/shapes.png"]
    assert rows[-1]["answer"] == results.last.locator(".markdown").inner_text() == "red"


def test_sample_file_is_a_valid_batch(pixie, visit, tmp_path: Path):
    page = visit(pixie, "/#/batches")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save a sample file").click()
    saved.value.save_as(tmp_path / "sample.jsonl")
    page.get_by_label("File of requests").set_input_files(tmp_path / "sample.jsonl")
    job = jobs(page).filter(has_text="sample.jsonl")
    expect(job).to_contain_text(re.compile("Completed 2 of 2 requests, 1 failed"))  # its image is on another host
    job.get_by_role("button", name="Read answers").click()
    results = page.get_by_role("list", name="Answers").locator("> li")
    expect(results.filter(has_text="image").locator(".problem")).to_contain_text("example.com")


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
    expect(jobs(page)).to_have_count(20)
    expect(jobs(page).first).to_contain_text("many 21")
    page.get_by_role("button", name="Show older ones").click()
    expect(jobs(page).filter(has_text="many 0")).to_have_count(1)

"""The live view in a real browser."""

from __future__ import annotations

import re

import pytest

from tests.mock_checkpoint import make_mock_checkpoint
from tests.scaleout.processes import Cluster
from tests.server.live import QUESTION, stream_lines

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test installs it")

from playwright.sync_api import expect


def test_running_requests_and_their_blocks_are_shown(slow, visit):
    page = visit(slow, "/#/live")
    running = page.locator(".tiles .panel").filter(has_text="Running").locator("b")
    expect(running).to_have_text("0")
    with stream_lines(slow.url, {"messages": QUESTION, "ignore_eos": True, "max_tokens": 400, "n": 3}) as lines:
        next(lines)
        expect(running).to_have_text("3")
        rate = page.locator(".tiles .panel").filter(has_text="Generated").locator("b")
        expect(rate).to_have_text(re.compile(r"^[1-9]"))
        held = page.get_by_role("img", name=re.compile(r"Map of the KV cache\. [1-9]\d* of [\d,]+ blocks held"))
        expect(held).to_be_visible()
        expect(page.get_by_role("img", name=re.compile("Requests in the last minutes: running 3"))).to_be_visible()
    expect(running).to_have_text("0")
    latency = page.get_by_role("row", name=re.compile("First token")).first
    expect(latency).to_contain_text(re.compile(r"\d m?s"))


def test_map_uses_the_colours_of_its_legend(slow, visit):
    page = visit(slow, "/#/live")
    with stream_lines(slow.url, {"messages": QUESTION, "ignore_eos": True, "max_tokens": 400}) as lines:
        next(lines)
        page.get_by_role("img", name=re.compile(r"\. [1-9]\d* of [\d,]+ blocks held")).wait_for()
        colours = page.evaluate(
            """() => {
                const canvas = document.querySelector(".map canvas");
                const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
                const found = new Set();
                for (let place = 0; place < pixels.length; place += 4)
                    if (pixels[place + 3] === 255) found.add([...pixels.slice(place, place + 3)].join());
                return [...found];
            }"""
        )
    assert len(colours) >= 2  # free, and at least one that is not


def test_reasons_of_cache_misses_are_shown(pixie, visit):
    # Other tests ask the same server.
    question = {"messages": [{"role": "user", "content": "Who asked this before? " * 9}], "max_tokens": 1}
    details = [pixie.ask(**question).json()["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert details[0]["missed_tokens"]["never_seen"] > 0
    page = visit(pixie, "/#/live")
    misses = page.locator(".rates > div").filter(has_text="Prompt tokens not found")
    expect(misses.locator(".hint")).to_have_text(re.compile(r"[\d,]+ never seen"))


def test_gone_server_is_reported_with_earlier_figures(slow, visit):
    page = visit(slow, "/#/live", complains="net::ERR_FAILED")
    page.locator(".tiles").wait_for()
    page.route("**/live", lambda route: route.abort())
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
    expect(page.locator(".tiles")).to_be_visible()
    page.unroute("**/live")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_missing_files_of_a_new_server_are_explained(slow, visit):
    page = visit(slow, complains="ERR_FAILED|dynamically imported")
    page.route("**/assets/live-*.js", lambda route: route.abort())
    page.get_by_role("link", name="Live").click()
    expect(page.get_by_role("heading", name="This view has failed")).to_be_visible()
    page.unroute("**/assets/live-*.js")
    page.get_by_role("button", name="Load the page again").click()
    page.locator(".tiles").wait_for()


@pytest.mark.parametrize(
    ("status", "words"),
    [("loading", "The model is loading"), ("dead", "The engine has crashed"), ("asleep", "first request")],
)
def test_view_without_an_engine_says_why(slow, visit, status, words):
    page = visit(slow)
    nothing = {"count": 0, "p50": None, "p90": None, "p99": None}
    latencies = {kind: {"60": nothing, "300": nothing} for kind in ("ttft", "tpot", "e2e")}
    body = {"time": 1.0, "status": status, "model": "tiny", "engine": None, "images": None, "blocks": None}
    page.route("**/live", lambda route: route.fulfill(json={**body, "latencies": latencies}))
    page.get_by_role("link", name="Live").click()
    expect(page.get_by_role("main").get_by_role("status")).to_contain_text(words)
    expect(page.locator(".tiles b")).to_have_text([re.compile(r"^\W$")] * 4)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = make_mock_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    with Cluster(folder, 2, engine={"mock_tpot": 0.03}) as running:
        yield running


def test_each_worker_of_a_cluster_is_shown(cluster, visit):
    page = visit(cluster, "/#/live", complains="404")
    expect(page.get_by_role("heading", name="The cluster, live")).to_be_visible()
    expect(page.get_by_role("heading", name="2 workers")).to_be_visible()
    rows = page.locator(".workers tbody tr")
    expect(rows).to_contain_text([re.compile(f"worker-{n}.*tiny.*serving") for n in range(2)])
    with stream_lines(cluster.url, {"messages": QUESTION, "ignore_eos": True, "max_tokens": 400}) as lines:
        next(lines)
        busy = rows.filter(has=page.locator("td:nth-child(4)", has_text="1"))
        expect(busy).to_have_count(1)
        expect(busy.locator("td").nth(4)).to_have_text(re.compile(r"^[1-9]"))
        running = page.locator(".tiles .panel").filter(has_text="Running").locator("b")
        expect(running).to_have_text("1")
        name = busy.get_by_role("button").inner_text()
        other = "worker-1" if name == "worker-0" else "worker-0"
        page.get_by_role("button", name=other).click()
        expect(page.get_by_role("heading", name=f"Worker {other}, live")).to_be_visible()
        expect(running).to_have_text("0")
        page.get_by_role("button", name=name).click()
        expect(running).to_have_text("1")
        page.get_by_role("button", name=name).click()
        expect(page.get_by_role("heading", name="The cluster, live")).to_be_visible()
    page.set_viewport_size({"width": 390, "height": 780})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_worker_that_left_is_shown_no_longer(cluster, visit):
    page = visit(cluster, "/#/live", complains="404")
    page.get_by_role("button", name="worker-1").click()
    expect(page.get_by_role("heading", name="Worker worker-1, live")).to_be_visible()
    cluster.workers["worker-1"][0].close()
    expect(page.get_by_role("heading", name="1 worker")).to_be_visible()
    expect(page.get_by_role("heading", name="The cluster, live")).to_be_visible()

"""The page for everybody: axe's rules, contrasts, small screens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test installs it")
axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright", reason="make test installs axe")

from playwright.sync_api import Page

from tests.web.page import add, answer_of, answering, ask, draw, events

STYLES = Path(__file__).parents[2] / "web/src/styles/base.css"
SHAPES = Path(__file__).parents[2] / "examples/shapes.png"
DOCUMENT = SHAPES.with_suffix(".pdf")
PHONE = {"width": 390, "height": 780}
TEXT, GRAPHICS = 4.5, 3.0
"""What WCAG's level AA wants of a contrast: https://www.w3.org/TR/WCAG22/"""
PAIRS = [
    *(("text", ground, TEXT) for ground in ("ground", "raised", "sunken", "tint", "danger-tint")),
    *(("muted", ground, TEXT) for ground in ("ground", "raised", "sunken", "tint")),
    *(("accent", ground, TEXT) for ground in ("ground", "raised")),
    *(("on-accent", accent, TEXT) for accent in ("accent", "accent-strong")),
    *(("danger", ground, TEXT) for ground in ("ground", "danger-tint")),
    *((f"code-{part}", "raised", TEXT) for part in ("keyword", "string", "number", "comment")),
    *((colour, "ground", GRAPHICS) for colour in ("edge", "series-1", "series-2")),
    *((f"block-{kind}", "block-free", GRAPHICS) for kind in ("held", "shared")),
]


def colours(theme: str) -> dict[str, str]:
    rule = r":root \{(.*?)\n\}" if theme == "light" else r':root\[data-theme="dark"\] \{(.*?)\n\}'
    found = re.search(rule, STYLES.read_text(), re.DOTALL)
    assert found is not None
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", found[1]))


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_that_meet_differ_enough(theme):
    known = colours(theme)
    weak = {}
    for one, other, least in PAIRS:
        lighter, darker = sorted((luminance(known[one]), luminance(known[other])), reverse=True)
        contrast = (lighter + 0.05) / (darker + 0.05)
        if contrast < least:
            weak[one, other] = round(contrast, 2)
    assert weak == {}


def violations(page: Page) -> list[str]:
    found = axe_playwright.Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:200]} {node['failureSummary']}" for one in found for node in one["nodes"]]


@pytest.mark.parametrize(("scheme", "size"), [("light", None), ("dark", PHONE)])
def test_axe_finds_no_fault_in_any_view(pixie, visit, scheme, size):
    page = visit(
        pixie,
        color_scheme=scheme,
        reduced_motion="reduce",
        complains="ERR_FAILED",
        **({"viewport": size} if size else {}),
    )
    found: dict[str, list[str]] = {}

    def look(view: str) -> None:
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        found[view] = violations(page) + ([f"{wide} pixels too wide"] if wide > 0 else [])

    look("empty")
    draw(page)
    look("draw")
    page.get_by_role("button", name="What is in the image?").click()
    answer_of(page, 0)
    marks = [{"bbox_2d": [16, 112, 81, 177], "label": "circle"}, {"point_2d": [240, 250], "label": "triangle"}]
    answering(page, events(json.dumps(marks)))
    ask(page, "Where are they?", SHAPES, DOCUMENT)
    page.locator(".mark").first.wait_for()
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "What is it?", SHAPES)
    page.locator(".turn .problem").wait_for()
    add(page, SHAPES, DOCUMENT)
    look("chat")
    if size:
        page.get_by_role("button", name="Conversations").click()
        look("conversations")
        page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="Settings").click()
    look("settings")
    page.get_by_role("button", name="Done").click()
    page.get_by_role("link", name="Live").click()
    page.locator(".tiles").wait_for()
    look("live")
    page.get_by_role("link", name="Batches").click()
    page.get_by_label("File of requests").set_input_files(
        {"name": f"{'a-long-name-' * 8}.jsonl", "mimeType": "application/jsonl", "buffer": b"{}"}
    )
    page.locator(".panel .problem").wait_for()
    look("batches")
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    look("shortcuts")
    assert {view: problems for view, problems in found.items() if problems} == {}

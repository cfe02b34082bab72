"""What people do on the page."""

from __future__ import annotations

import json
import mimetypes
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page


def answers(page: Page) -> Locator:
    """All answers that have ended."""
    return page.locator(".turn.answer[aria-busy=false]")


def answer_of(page: Page, index: int) -> str:
    """The text of an answer, once it has ended."""
    answer = answers(page).nth(index)
    answer.wait_for()
    return answer.locator(".markdown").inner_text()


def add(page: Page, *images: Any) -> None:
    """Choose images, videos or documents: paths, or files as Playwright describes them."""
    files = [_payload(image) if isinstance(image, Path) else image for image in images]
    page.locator("input[type=file]").set_input_files(files)
    page.get_by_role("button", name="Remove").nth(len(images) - 1).wait_for()


def _payload(path: Path) -> dict[str, Any]:
    kind = mimetypes.guess_type(path.name)[0]
    assert kind is not None
    return {"name": path.name, "mimeType": kind, "buffer": path.read_bytes()}


def ask(page: Page, question: str, *images: Any) -> None:
    """Send a question."""
    if images:
        add(page, *images)
    page.get_by_label("Question", exact=True).fill(question)
    page.get_by_role("button", name="Ask", exact=True).click()


def draw(page: Page) -> None:
    """Open the sheet and draw a red circle and a blue star, each with a click."""
    page.get_by_role("button", name="Draw").click()
    stamp(page, 0.28, 0.3)
    page.get_by_role("button", name="star").click()
    page.get_by_role("button", name="blue").first.click()
    stamp(page, 0.7, 0.65)


def stamp(page: Page, x: float, y: float) -> None:
    """Click on the sheet, at shares of its width and height."""
    sheet = page.locator("canvas").last
    box = sheet.bounding_box()
    assert box is not None
    sheet.click(position={"x": x * box["width"], "y": y * box["height"]})


def events(*texts: str, end: str = "data: [DONE]\n\n", **usage: Any) -> str:
    """A stream of chat completions. usage: of its last chunk, if there is any."""
    chunks = [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in texts]
    if end:
        chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    if usage:
        chunks.append({"choices": [], **usage})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end


def answering(page: Page, body: str) -> None:
    """Let the server's next answers be these events."""
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))

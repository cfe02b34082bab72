"""Make the images of the page that the documents show, with a real server and the built-in model.

    python web/screenshots.py           those that the documents show, into docs/images
    python web/screenshots.py FOLDER    all, to look at what has changed

Needs what `make test` installs, and Chromium.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
from PIL import Image, ImageDraw
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.web.browser import ARGUMENTS, find_chromium
from tests.web.page import answer_of, answering, ask, draw, events

DESKTOP = {"width": 1200, "height": 980}
PHONE = {"width": 390, "height": 780}
SHAPES = ROOT / "examples/shapes.png"
INSPECTION = {
    "How many red circles are there?": "2",
    "Where is the green triangle?": "top right",
    "What is in the bottom right corner?": "a yellow triangle",
}
"""Questions about `parts` with the right answers."""
RIGHT_TO_LEFT = """## סיכום החשבונית

הסכום הכולל הוא **128.40 ₪**, כולל מע״מ (`total_price`).

- קפה: 3 יחידות
- עוגת גבינה: 1 יחידה

| פריט | כמות | מחיר |
| --- | ---: | ---: |
| קפה | 3 | 54.00 |
| עוגת גבינה | 1 | 74.40 |

> הערה: המחיר אינו כולל שירות.

```python
print("שלום")
```
"""
IMAGES = ROOT / "docs/images"
SHOWN = {"chat-light", "chat-dark", "chat-phone", "live-light", "live-phone", "draw-phone"}


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """A server of its own on a free port; its address."""
    command = [sys.executable, "-m", "vlmserve", "serve", "--port", "0", "--storage-url", "memory"]
    flags = ["--kv-cache-memory", "4MiB", "--max-num-seqs", "12", "--no-access-log"]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            found = re.search(r"http://\S+", ready)
            assert found is not None, ready
            yield found[0]
        finally:
            process.terminate()


@contextlib.contextmanager
def under_load(url: str, clients: int) -> Iterator[None]:
    """Clients that ask one question after the other, most of them about the same image."""
    done = threading.Event()
    image = "data:image/png;base64," + base64.b64encode(SHAPES.read_bytes()).decode()
    shown = {"type": "image_url", "image_url": {"url": image}}

    def work(number: int) -> None:
        turn = 0
        while not done.is_set():
            turn += 1
            text = {
                "type": "text",
                "text": f"Question {number} of {turn % 7}. " + "Describe the image. " * (number % 5),
            }
            content = [shown, text] if number % 4 else [text]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 60 + 10 * (turn % 9)}
            httpx.post(f"{url}/v1/chat/completions", json={**body, "ignore_eos": True}, timeout=60)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def batch_of(count: int) -> bytes:
    """A file of requests to the built-in model, the second of which fails."""
    rows = []
    for number in range(count):
        body = {"model": "pixie", "messages": [{"role": "user", "content": f"Question {number}"}], "max_tokens": 60}
        row = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        rows.append(json.dumps({**row, "body": {**body, "temperature": -1} if number == 1 else body}))
    return "\n".join(rows).encode()


def opened(browser: Browser, url: str, scheme: str, size: dict[str, int]) -> Page:
    """The page in a browser that has never seen it."""
    phone = size == PHONE
    context = browser.new_context(
        viewport=size, color_scheme=scheme, has_touch=phone, device_scale_factor=2 if phone else 1
    )
    page = context.new_page()
    page.goto(url)
    return page


def parts() -> dict[str, str | bytes]:
    """Draw a tray with six parts; return the file as Playwright describes it."""
    image = Image.new("RGB", (480, 360), "#e9ecf1")
    draw = ImageDraw.Draw(image)
    for left, top in ((40, 34), (198, 138)):
        draw.ellipse((left, top, left + 84, top + 84), fill="#d81e28")
    for left, top in ((200, 36), (42, 246)):
        draw.rectangle((left, top, left + 80, top + 80), fill="#1f46d2")
    for top, colour in ((32, "#1e9e3a"), (244, "#ffe000")):
        draw.polygon([(398, top), (446, top + 84), (350, top + 84)], fill=colour)
    written = io.BytesIO()
    image.save(written, "PNG")
    return {"name": "parts.png", "mimeType": "image/png", "buffer": written.getvalue()}


def inspect(page: Page, questions: int) -> None:
    """Ask the first questions of `INSPECTION`. Raises ValueError for a wrong answer."""
    for number, (question, right) in enumerate(list(INSPECTION.items())[:questions]):
        ask(page, question, *([] if number else [parts()]))
        if (answer := answer_of(page, number).strip()) != right:
            raise ValueError(f"{question} {answer}")


def read_right_to_left(page: Page) -> None:
    """Ask in Hebrew; the answer is fixed, because the built-in model knows no Hebrew."""
    answering(page, events(RIGHT_TO_LEFT))
    ask(page, "מה הסכום הכולל?")
    answer_of(page, 0)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)

    def shoot(page: Page, name: str) -> None:
        if folder == IMAGES and name not in SHOWN:
            return
        page.wait_for_timeout(400)
        page.screenshot(path=folder / f"{name}.png")

    with serving() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=ARGUMENTS)
        for scheme, size, suffix in (("light", DESKTOP, "light"), ("dark", DESKTOP, "dark"), ("light", PHONE, "phone")):
            page = opened(browser, url, scheme, size)
            shoot(page, f"empty-{suffix}")
            draw(page)
            shoot(page, f"draw-{suffix}")
            page.get_by_role("button", name="Close").click()
            inspect(page, questions=1 if size == PHONE else len(INSPECTION))
            shoot(page, f"chat-{suffix}")
            page.get_by_role("button", name="Settings").click()
            shoot(page, f"settings-{suffix}")
            page.get_by_role("button", name="Done").click()
            page.route("**/v1/chat/completions", lambda route: route.abort())
            ask(page, "Describe the image.")
            page.get_by_text("cannot be reached").first.wait_for()
            shoot(page, f"error-{suffix}")
            page.unroute("**/v1/chat/completions")
            page.get_by_role("link", name="Batches").click()
            for name, count in (("products.jsonl", 3), ("catalogue.jsonl", 4000)):
                file = {"name": name, "mimeType": "application/jsonl", "buffer": batch_of(count)}
                page.get_by_label("File of requests").set_input_files(file)
                page.get_by_role("heading", name=name).first.wait_for()
            page.wait_for_timeout(2500)
            shoot(page, f"batches-{suffix}")
            page.get_by_role("button", name="Cancel catalogue.jsonl").click()
            page.get_by_role("button", name="Save answers of catalogue.jsonl").first.wait_for()
            page.context.close()
            page = opened(browser, url, scheme, size)
            read_right_to_left(page)
            shoot(page, f"right-to-left-{suffix}")
            page.context.close()
        with under_load(url, 16):
            for scheme, size, suffix in (
                ("light", DESKTOP, "light"),
                ("dark", DESKTOP, "dark"),
                ("light", PHONE, "phone"),
            ):
                page = opened(browser, url + "/#/live", scheme, size)
                page.wait_for_timeout(15_000)
                shoot(page, f"live-{suffix}")
                page.set_viewport_size({"width": size["width"], "height": 1500})
                shoot(page, f"live-whole-{suffix}")
                page.context.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)

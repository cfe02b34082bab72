"""The chat page in a real browser, with a real server and a model that takes images."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import av
import httpx
import numpy as np
import pytest
from PIL import Image

from tests.adapters.test_serving import write_adapter
from tests.checkpoints import make_llama
from tests.server.live import LiveServer
from tests.server.test_adapters import ENGINE
from tests.waiting import wait_until

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test installs it")

from playwright.sync_api import Page, expect

from tests.web.page import add, answer_of, answering, answers, ask, draw, events, stamp

SHAPES = Path(__file__).parents[2] / "examples/shapes.png"
DOCUMENT = SHAPES.with_suffix(".pdf")
SUGGESTED = {
    "What is in the image?": "a red circle and a blue star",
    "How many objects are there?": "2",
    "Describe the image.": "a red circle and a blue star",
}
"""Questions that the page offers about its sample, and right answers."""
NOT_READY = {"error": {"message": "The server is still loading pixie; try again soon", "code": "unavailable"}}


def square(colour: str, side: int = 108) -> bytes:
    image = Image.new("RGB", (side, side), "white")
    image.paste(colour, (side // 4, side // 4, 3 * side // 4, 3 * side // 4))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def webm(colours: Sequence[tuple[int, int, int]]) -> bytes:
    """A video of frames of one colour each, 64 pixels wide."""
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as container:
        stream = container.add_stream("libvpx", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for colour in colours:
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), colour, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def test_newcomer_gets_an_answer_in_three_actions(pixie, visit):
    page = visit(pixie)
    page.get_by_role("button", name="Draw").click()
    stamp(page, 0.5, 0.5)
    page.get_by_role("button", name="What is in the image?").click()
    assert answer_of(page, 0) == "a red circle"


def test_built_in_model_names_the_way_to_others(pixie, visit):
    page = visit(pixie)
    [card] = httpx.get(f"{pixie.url}/v1/models", timeout=60).json()["data"]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{**card, "id": "pixie"}]}))
    page.reload()
    welcome = page.locator(".welcome")
    expect(welcome).to_contain_text("names drawn shapes, their colours and places, counts them")
    expect(welcome.locator("code")).to_have_text("vlmserve doctor")


def test_suggestions_about_the_sample_are_answered(pixie, visit):
    page = visit(pixie)
    suggested = page.get_by_role("group", name="Suggested questions").get_by_role("button")
    for number, (question, answer) in enumerate(SUGGESTED.items()):
        page.get_by_role("button", name="Try a sample image").click()
        expect(suggested).to_have_text(list(SUGGESTED))
        page.get_by_role("button", name=question, exact=True).click()
        assert answer_of(page, 0) == answer
        if number + 1 < len(SUGGESTED):
            page.get_by_role("link", name="New conversation").click()


def test_hand_drawn_area_is_seen(pixie, visit):
    page = visit(pixie)
    page.get_by_role("button", name="Draw").click()
    page.get_by_role("button", name="Filled area by hand").click()
    page.get_by_role("group", name="Colour").get_by_role("button", name="green").click()
    box = page.locator("canvas").last.bounding_box()
    corners = [(0.3, 0.3), (0.7, 0.31), (0.71, 0.7), (0.3, 0.69), (0.3, 0.3)]
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in corners]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=5)
    page.mouse.up()
    page.get_by_role("button", name="What is in the image?").click()
    assert answer_of(page, 0) == "a green square"


def test_drawing_works_by_keyboard_with_undo(pixie, visit):
    page = visit(pixie)
    page.get_by_label("Question", exact=True).blur()
    page.keyboard.press("d")
    sheet = page.get_by_label("Sheet to draw on")
    sheet.focus()
    page.keyboard.press("Enter")
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="star").focus()
    page.keyboard.press("Enter")
    sheet.focus()
    page.keyboard.press("Space")
    assert "a red circle at the middle, a red star at the middle left" in page.get_by_role("dialog").inner_text()
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("button", name="Other question").click()
    expect(page.get_by_label("Question", exact=True)).to_be_focused()
    page.keyboard.type("What colour is the circle?")
    page.keyboard.press("Enter")
    assert answer_of(page, 0) == "red"


def test_images_are_chosen_pasted_dropped_and_removed(pixie, visit):
    page = visit(pixie)
    add(page, SHAPES)
    for kind, name, target in (("paste", "pasted.png", "clipboardData"), ("drop", "dropped.png", "dataTransfer")):
        page.evaluate(
            """([kind, name, target, content]) => {
                const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
                const data = new DataTransfer();
                data.items.add(new File([bytes], name, { type: "image/png" }));
                const event = kind === "paste"
                    ? new ClipboardEvent(kind, { bubbles: true, cancelable: true, clipboardData: data })
                    : new DragEvent(kind, { bubbles: true, cancelable: true, dataTransfer: data });
                document.body.dispatchEvent(event);
            }""",
            [kind, name, target, base64.b64encode(square("blue" if kind == "drop" else "red")).decode()],
        )
        page.get_by_role("button", name=f"Open {name}").wait_for()
    page.get_by_role("button", name="Remove shapes.png").click()
    ask(page, "What is in the second image?")
    assert answer_of(page, 0) == "a blue square"


def test_edited_question_is_answered_and_survives_reload(pixie, visit):
    page = visit(pixie)
    ask(page, "What colour is the circle?", SHAPES)
    assert answer_of(page, 0) == "red"
    expect(page.locator(".cost")).to_contain_text("tokens read")
    ask(page, "And the square?")
    answer_of(page, 1)
    page.get_by_role("button", name="Edit the question").first.click()
    page.get_by_label("Edited question").fill("What colour is the triangle?")
    page.get_by_role("button", name="Ask again").click()
    expect(answers(page).locator(".markdown")).to_have_text(["yellow"])
    page.get_by_role("button", name="Answer again").click()
    expect(answers(page).locator(".cost")).to_contain_text("cached")
    page.get_by_label("Question", exact=True).fill("half a que")
    expect(page.locator(".sidebar li")).to_have_count(1)
    page.wait_for_timeout(500)  # drafts are saved a moment after the last key
    page.reload()
    assert answer_of(page, 0) == "yellow"
    expect(page.get_by_label("Question", exact=True)).to_have_value("half a que")
    expect(page.locator(".turn.question img")).to_have_js_property("naturalWidth", 288)


def test_conversations_can_be_renamed_and_deleted(pixie, visit):
    page = visit(pixie)
    ask(page, "What colour is the circle?", SHAPES)
    answer_of(page, 0)
    page.get_by_role("link", name="New conversation").click()
    # Files that are chosen before the page has changed belong to the conversation before.
    expect(page.get_by_role("heading", name="Ask about an image")).to_be_visible()
    ask(page, "How many shapes are there?", SHAPES)
    assert answer_of(page, 0) == "3"
    listed = page.locator(".sidebar li a")
    expect(listed).to_have_text(["How many shapes are there?", "What colour is the circle?"])
    page.get_by_role("button", name="Rename How many").click()
    page.get_by_label("Title").fill("Counting")
    page.keyboard.press("Enter")
    expect(listed.first).to_have_text("Counting")
    page.get_by_role("button", name="Delete Counting").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(listed).to_have_text(["What colour is the circle?"])
    expect(page.get_by_role("heading", name="Ask about an image")).to_be_visible()
    listed.first.click()
    assert answer_of(page, 0) == "red"


def test_conversations_are_searched_exported_and_imported(pixie, visit, tmp_path: Path):
    page = visit(pixie)
    for number, question in enumerate(["What colour is the circle?", "How many shapes are there?"]):
        if number:
            page.get_by_role("link", name="New conversation").click()
            expect(page.get_by_role("heading", name="Ask about an image")).to_be_visible()
            keep_on_server(page)
        ask(page, question, SHAPES)
        answer_of(page, 0)
    listed = page.locator(".sidebar li a")
    expect(page.get_by_role("region", name="Today").locator("li")).to_have_count(2)
    page.get_by_label("Search conversations").fill("RED circle")
    expect(listed).to_have_text(["What colour is the circle?"])
    page.get_by_label("Search conversations").fill("nowhere")
    expect(page.get_by_text("No conversation has these words.")).to_be_visible()
    page.get_by_role("button", name="Export and import").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Export all (2)").click()
    saved.value.save_as(tmp_path / "all.json")
    page.get_by_label("File of conversations").set_input_files(tmp_path / "all.json")
    expect(page.get_by_role("dialog")).to_contain_text("0 conversations added, 2 here already.")
    # The one that the server keeps comes back into the browser.
    page.get_by_role("button", name="Close").click()
    page.get_by_label("Search conversations").fill("")
    page.get_by_role("button", name="Delete How many").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(listed).to_have_count(1)
    page.get_by_role("button", name="Export and import").click()
    page.get_by_label("File of conversations").set_input_files(SHAPES)
    expect(page.get_by_role("alert")).to_contain_text("shapes.png cannot be imported")
    page.get_by_label("File of conversations").set_input_files(tmp_path / "all.json")
    expect(page.get_by_role("dialog")).to_contain_text("1 conversation added, 1 here already.")
    page.get_by_role("button", name="Close").click()
    page.reload()
    expect(listed).to_have_text(["How many shapes are there?", "What colour is the circle?"])
    listed.first.click()
    assert answer_of(page, 0) == "3"
    expect(page.locator(".turn.question img")).to_have_js_property("naturalWidth", 288)
    ask(page, "What colour is the triangle?")
    assert answer_of(page, 1) == "yellow"


def test_long_conversation_opens_at_its_end(pixie, visit):
    page = visit(pixie, viewport={"width": 800, "height": 500})
    answering(page, events("a ", "short ", "answer"))
    for number in range(2):
        ask(page, "A question\nof\nsome\nlines", SHAPES)
        answer_of(page, number)
    at_end = "(turns) => turns.scrollHeight - turns.scrollTop - turns.clientHeight < 2"
    assert page.locator(".turns").evaluate(at_end)
    page.reload()
    answer_of(page, 1)
    wait_until(lambda: page.locator(".turns").evaluate(at_end))


def conversation_of(page: Page) -> str:
    page.wait_for_url("**/#/c/*")
    return page.url.rsplit("/", 1)[-1]


def files_of(server: LiveServer) -> set[str]:
    """The ids of all files that it keeps, those of other tests too."""
    return {file["id"] for file in httpx.get(f"{server.url}/v1/files?limit=10000", timeout=60).json()["data"]}


def items_of(server: LiveServer, conversation: str) -> list[str]:
    listed = httpx.get(f"{server.url}/v1/conversations/{conversation}/items?order=asc", timeout=60).json()["data"]
    return [part["text"] for item in listed for part in item["content"] if "text" in part]


def keep_on_server(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("On the server").check()
    page.get_by_role("button", name="Done").click()


def test_conversation_is_stored_and_opened_elsewhere(pixie, visit):
    before = files_of(pixie)
    page = visit(pixie)
    keep_on_server(page)
    ask(page, "What colour is the circle?", SHAPES)
    answer_of(page, 0)
    ask(page, "How many shapes are there?")
    assert answer_of(page, 1) == "3"
    conversation = conversation_of(page)
    wait_until(lambda: len(items_of(pixie, conversation)) == 4)
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)

    other = visit(pixie, f"/#/c/{conversation}")
    assert (answer_of(other, 0), answer_of(other, 1)) == ("red", "3")
    expect(other.locator(".turn.question img")).to_have_js_property("naturalWidth", 288)
    other.get_by_role("button", name="Edit the question").nth(1).click()
    other.get_by_label("Edited question").fill("What colour is the triangle?")
    other.keyboard.press("Enter")
    expect(answers(other).locator(".markdown")).to_have_text(["red", "yellow"])
    expect(other.get_by_role("button", name="Stop")).to_have_count(0)
    assert items_of(pixie, conversation) == [
        "What colour is the circle?",
        "red",
        "What colour is the triangle?",
        "yellow",
    ]

    other.get_by_role("button", name="Delete").click()
    other.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(other.locator(".sidebar li")).to_have_count(0)
    assert httpx.get(f"{pixie.url}/v1/conversations/{conversation}", timeout=60).status_code == 404
    wait_until(lambda: files_of(pixie) == before)


UPLOAD = """() => {
  const send = XMLHttpRequest.prototype.send;
  XMLHttpRequest.prototype.send = function (body) {
    const total = body.length ?? body.get("file").size;
    this.upload.dispatchEvent(new ProgressEvent("progress", { loaded: total / 4, total }));
    window.release = () => send.call(this, body);
  };
}"""
"""Holds uploads back after a quarter."""


def test_progress_of_an_upload_is_shown(pixie, visit):
    page = visit(pixie)
    keep_on_server(page)
    page.evaluate(UPLOAD)
    ask(page, "What colour is the circle?", SHAPES)
    expect(page.get_by_role("progressbar", name="Sending files: 25%")).to_have_attribute("value", "0.25")
    page.evaluate("() => { window.upload = release; release(); }")
    page.wait_for_function("() => release !== upload")
    page.evaluate("release()")
    assert answer_of(page, 0) == "red"


def test_files_in_the_request_show_their_progress(pixie, visit):
    page = visit(pixie)
    page.evaluate(UPLOAD)
    ask(page, "What colour is the circle?", SHAPES)
    expect(page.get_by_role("progressbar", name="Sending files: 25%")).to_have_attribute("value", "0.25")
    page.evaluate("release()")
    assert answer_of(page, 0) == "red"


def test_document_is_asked_about_by_pages(pixie, visit):
    page = visit(pixie)
    add(page, DOCUMENT)
    page.get_by_label("Pages of shapes.pdf").fill("2")
    ask(page, "What shape is there?")
    assert answer_of(page, 0) == "triangle"
    expect(page.get_by_role("button", name="Open shapes.pdf")).to_contain_text("Pages 2 of 2")
    page.reload()
    page.get_by_role("button", name="Edit the question").click()
    page.get_by_label("Pages of shapes.pdf").fill("1")
    page.get_by_label("Edited question").fill("What colour is the circle?")
    page.get_by_role("button", name="Ask again").click()
    expect(answers(page).locator(".markdown")).to_have_text(["red"])
    page.get_by_role("button", name="Open shapes.pdf").click()
    pages = page.get_by_role("list", name="Pages").locator("img")
    expect(pages).to_have_count(2)
    expect(page.get_by_role("list", name="Pages").get_by_role("listitem")).to_have_text(["1", "2"])
    assert pages.last.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
    with page.expect_download() as saved:
        page.get_by_role("link", name="Save shapes.pdf").click()
    assert Path(saved.value.path()).read_bytes() == DOCUMENT.read_bytes()


def test_document_is_stored_and_shown_elsewhere(pixie, visit):
    before = files_of(pixie)
    page = visit(pixie)
    keep_on_server(page)
    add(page, DOCUMENT)
    page.get_by_label("Pages of shapes.pdf").fill("2")
    ask(page, "What shape is there?")
    assert answer_of(page, 0) == "triangle"
    other = visit(pixie, f"/#/c/{conversation_of(page)}")
    expect(other.get_by_role("button", name="Open shapes.pdf")).to_contain_text("Pages 2")
    other.get_by_role("button", name="Delete").click()
    other.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(other.locator(".sidebar li")).to_have_count(0)
    wait_until(lambda: files_of(pixie) == before)


def test_video_plays_on_the_page_and_is_sent(pixie, visit):
    page = visit(pixie)
    answering(page, events("a red square moves"))
    video = webm([(255, 0, 0), (0, 0, 255)])
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What moves?", {"name": "moves.webm", "mimeType": "video/webm", "buffer": video})
    [shown, _] = sent.value.post_data_json["messages"][0]["content"]
    assert base64.b64decode(shown["video_url"]["url"].removeprefix("data:video/webm;base64,")) == video
    assert answer_of(page, 0) == "a red square moves"
    page.get_by_role("button", name="Open moves.webm").click()
    expect(page.locator(".play")).to_be_attached()
    expect(page.get_by_role("dialog").locator("video")).to_have_js_property("videoWidth", 64)


def test_files_that_no_model_reads_are_told_of(pixie, visit):
    page = visit(pixie)
    page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.items.add(new File(["text"], "notes.txt", { type: "text/plain" }));
            document.body.dispatchEvent(
                new ClipboardEvent("paste", { bubbles: true, cancelable: true, clipboardData: data }));
        }"""
    )
    expect(page.locator(".ask .problem")).to_contain_text("Images, PDF and TIFF documents, and videos")


STREAM = """() => {
  const { open, send } = XMLHttpRequest.prototype;
  XMLHttpRequest.prototype.open = function (method, url) {
    this.isAnswered = !String(url).endsWith("completions");
    open.call(this, method, url);
  };
  XMLHttpRequest.prototype.send = function (body) {
    if (this.isAnswered) return send.call(this, body);
    let text = "";
    const readyState = { value: XMLHttpRequest.HEADERS_RECEIVED };
    const values = { readyState, status: { value: 200 }, responseText: { get: () => text } };
    Object.defineProperties(this, values);
    this.abort = () => this.onabort();
    this.onreadystatechange();
    window.send = (more) => {
      text += more;
      this.onprogress();
    };
  };
}"""


def test_waiting_shows_queue_images_prompt_and_speed(pixie, visit):
    page = visit(pixie)
    page.evaluate(STREAM)
    ask(page, "why?")
    note = page.locator(".thinking")
    expect(note).to_contain_text(re.compile(r"Waiting · \d+ s"))
    for wait, shown in [
        ({"state": "waiting", "place": 3}, "Number 3 in the queue · "),
        ({"state": "images", "images": 1}, "Reading the image · "),
        ({"state": "prompt", "tokens": 512, "total": 2048}, "Reading the prompt: 512 of 2,048 tokens · "),
    ]:
        page.evaluate("text => send(text)", f": {json.dumps(wait)}\n\n: ping\n\n")
        expect(note).to_contain_text(shown)
    expect(note.locator("progress")).to_have_attribute("value", "0.25")
    usage = {"prompt_tokens": 2048, "completion_tokens": 9}
    chunk = {"choices": [{"delta": {"content": "so"}, "finish_reason": None}], "usage": usage}
    page.evaluate("text => send(text)", f"data: {json.dumps(chunk)}\n\n")
    expect(page.locator(".turn.answer .cost")).to_have_text(re.compile(r"9 tokens · [\d.]+ tokens/s"))
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".turn.answer")).to_contain_text("Stopped.")


def test_stopped_answer_keeps_what_had_come(slow, visit):
    page = visit(slow)
    ask(page, "Tell me a story")
    words = page.locator(".turn.answer .markdown")
    expect(words).to_have_text(re.compile(r"\w+ \w+"))
    page.keyboard.press("Escape")
    wait_until(lambda: slow.client.stats.num_running == 0)
    expect(page.get_by_text("Stopped.", exact=True)).to_be_visible()
    text = words.inner_text()
    assert text
    page.reload()
    expect(words).to_have_text(text)


def test_stopped_answer_is_kept_on_the_server(slow, visit):
    page = visit(slow)
    keep_on_server(page)
    ask(page, "Tell me a story")
    expect(page.locator(".turn.answer .markdown")).to_have_text(re.compile(r"\w+ \w+"))
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)
    text = page.locator(".turn.answer .markdown").inner_text()
    question, answer = items_of(slow, conversation_of(page))
    assert (question, answer.strip()) == ("Tell me a story", text)


def test_large_files_shrink_or_are_rejected_kindly(pixie, visit):
    noise = np.random.default_rng(0).integers(0, 256, (900, 1200, 3), np.uint8)
    noise[300:600, 300:600] = (255, 0, 0)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    assert len(file.getvalue()) > 2_000_000
    page = visit(pixie)
    video = {"name": "long.webm", "mimeType": "video/webm", "buffer": bytes(3_000_000)}
    add(page, {"name": "noise.png", "mimeType": "image/png", "buffer": file.getvalue()}, video)
    ask(page, "What is in the image?")
    expect(page.get_by_role("alert")).to_have_text(re.compile(r"The files have \d\.\d MB; this server takes 1\.5 MB"))
    page.get_by_role("button", name="Remove long.webm").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Ask", exact=True).click()
    [shown, _] = sent.value.post_data_json["messages"][0]["content"]
    image = Image.open(io.BytesIO(base64.b64decode(shown["image_url"]["url"].split(",")[1])))
    assert image.width / image.height == pytest.approx(4 / 3, abs=0.01)
    [card] = httpx.get(f"{pixie.url}/v1/models", timeout=60).json()["data"]
    assert image.width * image.height == pytest.approx(2 * card["useful_image_pixels"], rel=0.02)
    assert image.convert("RGB").getpixel((image.width * 3 // 8, image.height // 2)) == pytest.approx(
        (255, 0, 0), abs=20
    )
    answer_of(page, 0)


def test_non_image_file_is_reported(pixie, visit):
    page = visit(pixie, complains="400")
    ask(page, "What is it?", {"name": "broken.png", "mimeType": "image/png", "buffer": b"nothing of that kind"})
    expect(page.locator(".turn .problem")).to_contain_text("The server rejected the request")
    expect(page.locator(".turn .problem")).to_contain_text(re.compile("image|image"))


def test_while_the_server_is_away_nothing_is_lost(pixie, visit):
    page = visit(pixie, complains="net::ERR_FAILED")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "What colour is the circle?", SHAPES)
    expect(page.locator(".turn .problem")).to_contain_text("The server cannot be reached")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Try again").click()
    assert answer_of(page, 0) == "red"


def test_broken_stream_shows_what_had_come(pixie, visit):
    page = visit(pixie)
    answering(page, events("half an", " answer", end=""))
    ask(page, "What colour is the circle?", SHAPES)
    expect(page.locator(".turn .problem")).to_contain_text("The answer was interrupted")
    assert answer_of(page, 0) == "half an answer"


def test_mid_stream_error_is_reported(pixie, visit):
    page = visit(pixie)
    failed = {"error": {"message": "The engine gave up", "code": "generation_failed"}}
    answering(page, events("half", end=f"data: {json.dumps(failed)}\n\n").replace('"finish_reason": "stop"', '"x": 0'))
    ask(page, "What colour is the circle?")
    expect(page.locator(".turn .problem")).to_contain_text("The engine gave up")


def test_response_without_a_body_is_reported(pixie, visit):
    page = visit(pixie)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=204))
    ask(page, "why?")
    expect(page.locator(".turn .problem")).to_contain_text("The answer was interrupted")


def test_question_waits_for_a_loading_server(pixie, visit):
    page = visit(pixie, complains="503")
    asked = 0

    def refuse_once(route) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            route.fulfill(status=503, json=NOT_READY, headers={"Retry-After": "1"})
        else:
            route.continue_()

    page.route("**/v1/chat/completions", refuse_once)
    ask(page, "What colour is the circle?", SHAPES)
    expect(page.get_by_text("Your question is sent once the server is ready")).to_be_visible()
    assert answer_of(page, 0) == "red"
    assert asked == 2


def test_an_overloaded_server_asks_for_patience(pixie, visit):
    page = visit(pixie, complains="429")
    body = {"error": {"message": "5 answers are under way already", "code": "overloaded"}}
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=429, json=body, headers={"Retry-After": "7"})
    )
    ask(page, "What colour is the circle?")
    expect(page.locator(".turn .problem")).to_contain_text("overloaded")
    expect(page.locator(".turn .problem")).to_contain_text("7 s")


def test_server_asks_for_a_key_until_right(folder_with_keys, visit):
    page = visit(folder_with_keys, complains="401")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("needs an API key")
    dialog.get_by_label("Key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator(".banner")).to_contain_text("not valid")
    page.get_by_role("button", name="Enter a key").click()
    dialog.get_by_label("Key").fill("right")
    page.keyboard.press("Enter")
    expect(page.locator(".banner")).to_have_count(0)
    ask(page, "Hello")
    assert answer_of(page, 0)
    page.reload()
    ask(page, "And again")
    assert answer_of(page, 1)


@pytest.fixture(scope="module")
def folder_with_keys(tmp_path_factory):
    from tests.mock_checkpoint import make_mock_checkpoint

    folder = make_mock_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    with LiveServer(folder, server={"api_key": ("right",), "storage_url": "memory"}) as server:
        yield server


def test_markdown_renders_without_loading_remote_content(pixie, visit):
    page = visit(pixie)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = (
        "Some **bold** words.\n\n```python\nprint('hi')\n```\n\n| a | b |\n| - | - |\n| 1 | 2 |\n\n"
        "![spy](https://example.com/spy.png) <img src=x onerror=alert(1)> <script>alert(1)</script>"
    )
    answering(page, events(*re.findall(r".{1,7}", text, re.DOTALL)))
    ask(page, "Anything")
    answer_of(page, 0)
    answer = answers(page)
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("td")).to_have_text(["1", "2"])
    expect(answer.locator(".hljs-string")).to_have_text("'hi'")
    expect(answer.get_by_label("Code in python")).to_be_visible()
    expect(answer.get_by_text("python", exact=True)).to_be_visible()
    expect(answer.locator("img, script")).to_have_count(0)
    page.get_by_role("button", name="Copy the code").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "print('hi')"


def test_formulas_and_tables_are_set_as_written(pixie, visit):
    page = visit(pixie, viewport={"width": 390, "height": 700})
    table = (
        "| date | sum | \u05e9\u05dc\u05d5\u05dd |\n| --- | --- | --- |\n| 2026-11-29 | 1,234.50 EUR | "
        + "x" * 40
        + " |"
    )
    answering(
        page,
        events(
            "It is $5 or $6, with $x^2$, \\(y^2\\) and\n\n\\[ \\frac{1}{2} \\]\n\n$$\n\\frac{3}{4}\n$$\n\n",
            "`$y$`\n\n",
            table,
        ),
    )
    loaded = "performance.getEntriesByType('resource').some(({ name }) => name.includes('/katex-'))"
    assert not page.evaluate(loaded)
    ask(page, "why?")
    answer = page.locator(".turn.answer .markdown")
    expect(answer.locator(".formula math")).to_have_count(4)
    expect(answer.locator(".formula.display .mfrac")).to_have_count(2)
    assert page.evaluate(loaded)
    expect(answer.locator("p").first).to_contain_text("It is $5 or $6, with ")
    expect(answer.locator("code")).to_have_text("$y$")
    height = answer.locator("th").first.evaluate("cell => cell.offsetHeight")
    cells = answer.locator("td").evaluate_all("cells => cells.map((cell) => cell.offsetHeight)")
    assert max(cells) <= height
    assert answer.locator(".scrolls").evaluate("one => one.scrollWidth > one.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_right_to_left_answers_start_at_the_right(pixie, visit):
    page = visit(pixie)
    word = "\u05e9\u05dc\u05d5\u05dd"
    blocks = (
        f"{word} 1",
        f"- {word}",
        f"1. {word}",
        f"> {word}",
        f"| {word} | a |\n| --- | --- |\n| b | 2 |",
        "- left",
    )
    answering(page, events("\n\n".join(blocks)))
    ask(page, "why?")
    answer_of(page, 0)
    answer = page.locator(".turn.answer .markdown")
    direction = "one => getComputedStyle(one).direction"
    found = answer.locator("ul, ol, blockquote, table").evaluate_all(f"all => all.map({direction})")
    assert found == ["rtl", "rtl", "rtl", "rtl", "ltr"]
    space = """one => {
        const text = document.createRange();
        text.selectNodeContents(one);
        return one.getBoundingClientRect().right - text.getBoundingClientRect().right;
    }"""
    assert abs(answer.locator("p").first.evaluate(space)) < 1
    boxes = "all => all.map((one) => one.getBoundingClientRect().right)"
    assert max(answer.locator("ul, ol").evaluate_all(boxes)) <= answer.evaluate(
        "one => one.getBoundingClientRect().right"
    )
    assert (
        answer.locator("li").first.evaluate(
            "one => one.parentElement.getBoundingClientRect().right - one.getBoundingClientRect().right"
        )
        > 10
    )


INVOICE = {
    "id": "A-17",
    "paid": True,
    "tags": ["new"],
    "lines": [{"item": "Ink", "count": 3}, {"item": "Pen", "note": None}],
}


@pytest.mark.parametrize("text", ["Here:\n\n```json\n{}\n```", "{}"], ids=["in code", "alone"])
def test_json_is_shown_as_table_and_text(pixie, visit, text):
    page = visit(pixie)
    answering(page, events(*re.findall(r".{1,9}", text.replace("{}", json.dumps(INVOICE, indent=1)), re.DOTALL)))
    ask(page, "Anything")
    answer_of(page, 0)
    table = answers(page).get_by_role("region", name="Table")
    expect(table.locator("> table > tbody > tr > th")).to_have_text(["id", "paid", "tags", "lines"])
    expect(table.locator("> table > tbody > tr > td").nth(1)).to_have_text("true")
    lines = table.locator("table table")
    expect(lines.locator("th")).to_have_text(["item", "count", "note"])
    expect(lines.locator("td")).to_have_text(["Ink", "3", "", "Pen", "", "null"])
    page.get_by_role("button", name="Show as text").click()
    assert json.loads(answers(page).locator("pre").inner_text()) == INVOICE
    page.get_by_role("button", name="Show as a table").click()
    expect(table).to_be_visible()


def test_boxes_and_points_are_drawn_on_the_image(pixie, visit):
    page = visit(pixie)
    found = [{"bbox_2d": [72, 144, 144, 288], "label": "left"}, {"point_2d": [216, 72], "label": "right"}]
    answering(page, events(f"```json\n{json.dumps(found)}\n```"))
    ask(page, "Where is it?", SHAPES)
    answer_of(page, 0)
    marked = page.get_by_role("img", name="shapes.png with left, right")
    expect(marked.locator(".label")).to_have_text(["left", "right"])

    def place(mark: str) -> list[float]:
        whole, box = (one.bounding_box() for one in (marked.locator("img"), marked.locator(mark)))
        left, top = (box[axis] - whole[axis] for axis in "xy")
        sides = [left, top, left + box["width"], top + box["height"]]
        return [side / whole[size] for side, size in zip(sides, ("width", "height") * 2, strict=True)]

    assert place(".area") == pytest.approx([0.25, 0.5, 0.5, 1], abs=0.01)
    left, top, right, bottom = place(".point")
    assert ((left + right) / 2, (top + bottom) / 2) == pytest.approx((0.75, 0.25), abs=0.01)
    page.get_by_label("Coordinates in").select_option("thousandths")
    assert place(".area") == pytest.approx([0.072, 0.144, 0.144, 0.288], abs=0.01)
    # Further questions are about the same image; answers without marks show none.
    ask(page, "And now?")
    answer_of(page, 1)
    expect(marked).to_have_count(2)
    page.unroute("**/v1/chat/completions")
    ask(page, "What colour is the circle?")
    answer_of(page, 2)
    expect(marked).to_have_count(2)


def test_pixel_boxes_are_drawn_where_they_belong(pixie, visit):
    page = visit(pixie)
    found = json.dumps({"bbox_2d": [50, 100, 200, 200], "label": "middle"})
    before = {"width": 9, "height": 9, "model_width": 9, "model_height": 9, "box": None, "tokens": 4}
    seen = {"width": 288, "height": 288, "model_width": 200, "model_height": 200, "box": [72, 0, 216, 288], "tokens": 4}
    usage = {"prompt_tokens": 9, "completion_tokens": 9}
    answering(page, events(found, usage=usage, image_sizes=[before, seen]))
    ask(page, "Where is it?", SHAPES)
    answer_of(page, 0)
    marked = page.get_by_role("img", name="shapes.png with middle")
    area, whole = marked.locator(".area").bounding_box(), marked.locator("img").bounding_box()
    assert (area["x"] - whole["x"]) / whole["width"] == pytest.approx(0.375, abs=0.01)
    assert area["width"] / whole["width"] == pytest.approx(0.375, abs=0.01)
    assert (area["y"] - whole["y"]) / whole["height"] == pytest.approx(0.5, abs=0.01)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A model with two adapters."""
    base = tmp_path_factory.mktemp("adapted")
    adapters = [f"{name}={write_adapter(base / name, seed)}" for seed, name in enumerate(("formal", "brief"))]
    engine = {**ENGINE, "lora_modules": adapters}
    with LiveServer(make_llama(base / "llama", max_position_embeddings=2048), engine=engine) as server:
        yield server


def test_adapters_are_chosen_and_named_with_answers(adapted, visit):
    page = visit(adapted)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("3")
    page.get_by_role("button", name="Done").click()
    choice = page.get_by_label("The model that answers")
    expect(choice.locator("option")).to_have_text(["tiny", "brief", "formal"])
    expect(choice.locator("optgroup[label=Adapters] option")).to_have_count(2)
    for number, (option, sent_model) in enumerate((("brief", "brief"), ("tiny", None))):
        choice.select_option(option)
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "Hello")
        assert sent.value.post_data_json.get("model") == sent_model
        answer_of(page, number)
        named = re.compile(f"^{option} · ") if sent_model else re.compile(r"^\d")
        expect(answers(page).nth(number).locator(".cost")).to_have_text(named)
    choice.select_option("formal")
    page.reload()
    expect(choice).to_have_value("formal")


def test_what_is_set_is_sent_and_remembered(pixie, visit):
    page = visit(pixie)
    page.get_by_role("button", name="Settings").click()
    [card] = httpx.get(f"{pixie.url}/v1/models", timeout=60).json()["data"]
    usual = card["default_parameters"]
    for label, name in {"Temperature": "temperature", "Top-p": "top_p", "Top-k": "top_k"}.items():
        expect(page.get_by_label(label)).to_have_attribute("placeholder", f"{usual[name]:g}")
    page.get_by_label("System prompt").fill("Answer with a word.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Max tokens").fill("2")
    page.get_by_label("Dark").check()
    page.get_by_role("button", name="Done").click()
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Describe the image.", SHAPES)
    body = sent.value.post_data_json
    assert (body["temperature"], body["max_completion_tokens"]) == (0.5, 2)
    assert body["messages"][0] == {"role": "system", "content": "Answer with a word."}
    assert "top_p" not in body
    expect(page.get_by_text("reached the token limit")).to_be_visible()


def test_it_works_under_a_path_of_a_proxy(pixie, visit):
    page = visit(pixie)

    def forward(route) -> None:
        route.fulfill(response=route.fetch(url=route.request.url.replace("/some/where/", "/")))

    page.route("**/some/where/**", forward)
    page.goto(pixie.url + "/some/where/")
    with page.expect_request("**/some/where/v1/chat/completions"):
        ask(page, "What colour is the circle?", SHAPES)
    assert answer_of(page, 0) == "red"


def test_answers_are_announced_once_they_are_there(pixie, visit):
    page = visit(pixie)
    draw(page)
    page.get_by_role("button", name="What is in the image?").click()
    expect(page.locator(".chat > [aria-live=polite]")).to_have_text(re.compile("red circle and a blue star"))

"""Documents among the parts of messages: where their pages stand, and what is refused where."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_qwen_vl
from tests.frontend.test_requests import TINY, data_url, user
from tests.media.documents_for_tests import encrypted, page, pdf_file, square
from tests.media.images_for_tests import encoded, noise
from tests.media.test_documents import multi_page, pages_as_images
from tests.prompt.tokenizers_for_tests import CHATML_STRINGS, byte_level, write_checkpoint
from vlmserve.errors import InvalidRequestError, TooManyImagesError
from vlmserve.frontend.requests import RequestPreparer, chats_of
from vlmserve.frontend.wire import medium_part, wire_message
from vlmserve.media import documents
from vlmserve.settings.config import MediaConfig

LIMITS = MediaConfig(page_dpi=36, max_document_pages=5, max_documents=2)
PDF = pdf_file([page(square("1 0 0")), page(square("0 0 1", 300)), page(square("0 1 0", 200))])


def file_part(data: bytes, **fields: Any) -> dict[str, Any]:
    url = "data:application/pdf;base64," + base64.b64encode(data).decode()
    return {"type": "file", "file": {"file_data": url, "filename": "a.pdf"}, **fields}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen_vl(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def preparer(folder: Path) -> RequestPreparer:
    return RequestPreparer(folder, LIMITS)


def test_document_prompt_equals_prompt_of_page_images(preparer: RequestPreparer) -> None:
    pages = [{"type": "image", "image": image} for image in pages_as_images(PDF, LIMITS)]
    other = data_url(encoded(noise(60, 60)))
    ours = preparer.chat([user("See", file_part(PDF, pages="3,1"), "and", other, "Hm", file_part(PDF, pages="2"))])
    images = preparer.chat([user("See", pages[2], pages[0], "and", other, "Hm", pages[1])], allow_local=True)
    assert ours.token_ids == images.token_ids
    assert len(ours.images) == 4
    for mine, theirs in zip(ours.images, images.images, strict=True):
        assert (mine.start, mine.image.grid) == (theirs.start, theirs.image.grid)
        assert np.array_equal(mine.image.pixels, theirs.image.pixels)


def test_a_document_comes_in_every_form(preparer: RequestPreparer, tmp_path: Path) -> None:
    path = tmp_path / "a.PDF"
    path.write_bytes(PDF)
    (url_part,) = [file_part(PDF)]
    remote = [
        url_part,
        {"type": "file", "file": {"file_data": base64.b64encode(PDF).decode()}},
        {"type": "file", "file": {"file_url": url_part["file"]["file_data"]}},
        wire_message(user(medium_part(str(path))))["content"][0],
    ]
    local = [medium_part(str(path)), *({"type": "document", "document": source} for source in (str(path), path, PDF))]
    keys = {tuple(span.image.key for span in preparer.chat([user(part)]).images) for part in remote}
    keys |= {tuple(span.image.key for span in preparer.chat([user(part)], allow_local=True).images) for part in local}
    assert len(keys) == 1
    assert len(next(iter(keys))) == 3
    for part in local:
        with pytest.raises(InvalidRequestError, match="type must be text, image_url, video_url, video or file"):
            preparer.chat([user(part)])


def test_conversations_about_one_document_read_it_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(PDF)
    reads: list[object] = []
    opened: list[bytes] = []
    read = documents.read_source

    class Counted(documents.PDFProcess):
        def __init__(self, data: bytes, limits: MediaConfig) -> None:
            opened.append(data)
            super().__init__(data, limits)

    monkeypatch.setattr(documents, "read_source", lambda source, *rest: reads.append(source) or read(source, *rest))
    monkeypatch.setattr(documents, "PDFProcess", Counted)
    preparer = RequestPreparer(folder, LIMITS.model_copy(update={"image_cache_memory": 0}))
    shown = {"type": "document", "document": str(path)}
    first, second = chats_of(preparer, [[user(shown, text)] for text in ("One", "Two")], allow_local=True)
    assert (reads, len(opened)) == ([str(path)], 1)
    assert first.token_ids != second.token_ids
    assert [span.image.key for span in first.images] == [span.image.key for span in second.images]


def test_tiff_file_becomes_a_document_for_servers(preparer: RequestPreparer, tmp_path: Path) -> None:
    path = tmp_path / "scan.tif"
    path.write_bytes(multi_page([noise(60, 60), noise(60, 80)], "TIFF"))
    part = medium_part(str(path), "2")
    sent = wire_message(user(part))["content"][0]
    assert sent["file"]["filename"] == "scan.tif"
    (here,) = preparer.chat([user(part)], allow_local=True).images
    (there,) = preparer.chat([user(sent)]).images
    assert here.image.key == there.image.key


def test_pages_have_the_limits_that_images_have(preparer: RequestPreparer) -> None:
    (large,) = preparer.chat([user(file_part(PDF, pages="1"))]).images
    (small,) = preparer.chat([user(file_part(PDF, pages="1", max_pixels=600))]).images
    assert small.image.num_tokens < large.image.num_tokens


@pytest.mark.parametrize(
    ("part", "param", "message"),
    [
        (file_part(PDF, pages="9"), "file.file_data", "no page 9: the document has 3"),
        (file_part(PDF, pages="x"), "file.file_data", "pages must be like"),
        (file_part(PDF, pages=3), "pages", "must be a string"),
        (file_part(PDF, max_pixels=0), "max_pixels", "positive whole number"),
        (file_part(PDF[:200]), "file.file_data", "broken or truncated"),
        (file_part(encrypted()), "file.file_data", "encrypted"),
        (file_part(b"hello"), "file.file_data", "documents are PDF files"),
        ({"type": "file", "file": {"file_data": "%%%"}}, "file.file_data", "not valid base64"),
        ({"type": "file", "file": {"file_url": "/etc/passwd"}}, "file.file_url", "must be a URL"),
        ({"type": "file", "file": {"file_data": 3}}, "file", "file_data"),
        ({"type": "file", "file": {}}, "file", "file_data"),
        ({"type": "file"}, "file", "file_data"),
    ],
)
def test_a_refusal_names_the_place(preparer: RequestPreparer, part: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        preparer.chat([user("Hello"), user("See", part)])
    assert caught.value.param == f"messages[1].content[1].{param}"


def test_too_many_documents_are_rejected_before_reading(preparer: RequestPreparer) -> None:
    with pytest.raises(TooManyImagesError, match=r"3 documents; at most 2.*--max-documents"):
        preparer.chat([user(file_part(b"x"), file_part(b"x"), file_part(b"x"))])


def test_documents_of_a_request_share_the_page_limit(preparer: RequestPreparer) -> None:
    assert len(preparer.chat([user(file_part(PDF), file_part(PDF, pages="1-2"))]).images) == 5
    with pytest.raises(InvalidRequestError, match="the request has 2 left") as caught:
        preparer.chat([user(file_part(PDF)), user(TINY, file_part(PDF))])
    assert caught.value.param == "messages[1].content[1].file.file_data"


def test_pages_are_not_counted_as_images(folder: Path) -> None:
    preparer = RequestPreparer(folder, LIMITS.model_copy(update={"max_images": 1}))
    assert len(preparer.chat([user(TINY, file_part(PDF))]).images) == 4
    with pytest.raises(TooManyImagesError, match="2 images; at most 1"):
        preparer.chat([user(TINY, TINY, file_part(PDF))])


def test_a_model_without_images_takes_no_documents(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, byte_level(), takes_images=False, chat_template=CHATML_STRINGS)
    with pytest.raises(TooManyImagesError, match="takes no documents"):
        RequestPreparer(folder, LIMITS).chat([user(file_part(b"unread"))])


def test_other_salts_share_no_pages(preparer: RequestPreparer) -> None:
    keys = {preparer.chat([user(file_part(PDF, pages="1"))], cache_salt=salt).images[0].image.key for salt in "ab"}
    assert len(keys) == 2


def test_paths_are_checked_before_anything_is_prepared(preparer: RequestPreparer) -> None:
    with pytest.raises(InvalidRequestError, match="there is no file") as caught:
        preparer.check_files([user({"type": "document", "document": "/nowhere/a.pdf"})])
    assert caught.value.param == "messages[0].content[0].document"


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("https://example.com/a.pdf", "file"),
        ("https://example.com/A.PDF?download=1", "file"),
        ("https://example.com/a.png", "image_url"),
        ("data:application/pdf;base64,AAAA", "file"),
        ("data:image/png;base64,AAAA", "image_url"),
    ],
)
def test_urls_are_documents_by_how_they_end(place: str, kind: str) -> None:
    assert medium_part(place)["type"] == kind

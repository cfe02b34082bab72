"""What becomes a row, and what is asked of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.media.documents_for_tests import page, pdf_file
from vlmserve.batch.rows import Question, Row, digest, read_rows
from vlmserve.errors import ConfigurationError, InvalidImageError


def save_image(path: Path, colour: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path)
    return path


def test_folder_yields_images_of_subfolders_too(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPG", "deeper/c.webp", ".hidden.png"):
        save_image(tmp_path / name)
    (tmp_path / "report.pdf").write_bytes(pdf_file([page()]))
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "drawing.svg").write_text("<svg/>")
    rows = read_rows(str(tmp_path))
    assert [row.id for row in rows] == ["a.JPG", "b.png", "deeper/c.webp", "report.pdf"]
    assert rows[2].images == (str(tmp_path / "deeper" / "c.webp"),)


def test_a_document_gives_its_pages(tmp_path: Path) -> None:
    path = tmp_path / "report.pdf"
    path.write_bytes(pdf_file([page(), page(), page()]))
    rows = read_rows(str(path))
    assert [row.id for row in rows] == ["report.pdf#1", "report.pdf#2", "report.pdf#3"]
    messages = [Question("What is on page {page}?").messages(row) for row in rows]
    assert messages[1][0]["content"] == [
        {"type": "document", "document": path, "pages": "2"},
        {"type": "text", "text": "What is on page 2?"},
    ]
    # All else is the same: text, file, settings.
    same = [digest(row, messages[0], b"") for row in rows]
    assert len(set(same)) == 3
    path.write_bytes(b"%PDF-1.7 broken")
    with pytest.raises(ConfigurationError, match=r"report\.pdf: the document is broken"):
        read_rows(str(path))


def test_a_pattern_gives_files(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.jpg"):
        save_image(tmp_path / name)
    assert [Path(row.id).name for row in read_rows(str(tmp_path / "*.png"))] == ["a.png", "b.png"]


def test_a_list_gives_paths_and_urls(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("one.png\n\n https://example.com/two.png \n")
    rows = read_rows(str(tmp_path / "list.txt"))
    assert [row.id for row in rows] == ["one.png", "https://example.com/two.png"]
    assert [row.images for row in rows] == [(str(tmp_path / "one.png"),), ("https://example.com/two.png",)]


def test_tables_give_columns(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('id,image,product\nx,a.png,"cup, blue"\ny,,plate\n')
    (tmp_path / "rows.jsonl").write_text('{"images": ["a.png", "b.png"], "size": 3}\n\n{"custom_id": "z", "size": 4}\n')
    first, second = read_rows(str(tmp_path / "rows.csv"))
    assert first == Row("x", (str(tmp_path / "a.png"),), {"image": "a.png", "product": "cup, blue"})
    assert second == Row("y", (), {"image": "", "product": "plate"})
    first, second = read_rows(str(tmp_path / "rows.jsonl"))
    assert first.id == "1"
    assert first.images == (str(tmp_path / "a.png"), str(tmp_path / "b.png"))
    assert second == Row("z", (), {"size": 4})


def test_a_byte_order_mark_belongs_to_no_row(tmp_path: Path) -> None:
    request = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}'
    for name, text in [
        ("rows.csv", "id,image\na,a.png\n"),
        ("rows.jsonl", '{"id": "a", "image": "a.png"}\n'),
        ("requests.jsonl", f"{request}\n"),
        ("rows.txt", "a\n"),
    ]:
        (tmp_path / name).write_text(text, "utf-8")
        plain = read_rows(str(tmp_path / name))
        (tmp_path / name).write_text(text, "utf-8-sig")
        assert read_rows(str(tmp_path / name)) == plain
        assert plain[0].id == "a"


@pytest.mark.parametrize("name", ["Image", "IMAGE", " image ", "Images"])
def test_names_of_columns_may_have_capitals(tmp_path: Path, name: str) -> None:
    (tmp_path / "rows.csv").write_text(f"ID,{name},Product\nx,a.png,cup\n")
    [row] = read_rows(str(tmp_path / "rows.csv"))
    assert row == Row("x", (str(tmp_path / "a.png"),), {name: "a.png", "Product": "cup"})
    (tmp_path / "rows.jsonl").write_text(json.dumps({"Custom_ID": "x", name: ["a.png", "b.png"]}))
    [row] = read_rows(str(tmp_path / "rows.jsonl"))
    assert (row.id, len(row.images)) == ("x", 2)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("rows.csv", "a,b\n1,2,3\n", "line 2"),
        ("rows.jsonl", '{"a": 1}\n[2]\n', "line 2"),
        ("rows.jsonl", '{"image": 3}\n', "path or URL"),
        ("rows.csv", "id\nx\nx\n", "two rows have the id 'x'"),
        ("rows.csv", "id,image\n", "no rows"),
        ("rows.xlsx", "?", ".jsonl"),
        ("rows.txt", b"\xff\xfe\xfa", "UTF-8"),
        ("other", "?", ".csv"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path: Path, name: str, content: str | bytes, named: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigurationError, match=r".*" + named.replace(".", r"\.")):
        read_rows(str(path))


def test_nothing_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no file or folder"):
        read_rows(str(tmp_path / "*.png"))
    with pytest.raises(ConfigurationError, match="no rows"):
        read_rows(str(tmp_path))


def test_the_prompt_takes_columns(tmp_path: Path) -> None:
    image = save_image(tmp_path / "a.png")
    row = Row("1", (str(image), "https://example.com/b.png"), {"product": "cup", "size": 3})
    system, user = Question("Is {product} {{{size}}} in {id}?", "Be brief.").messages(row)
    assert system == {"role": "system", "content": "Be brief."}
    assert user["content"] == [
        {"type": "image", "image": image},
        {"type": "image_url", "image_url": {"url": "https://example.com/b.png"}},
        {"type": "text", "text": "Is cup {3} in 1?"},
    ]
    with pytest.raises(InvalidImageError, match=r"gone\.png"):
        Question("?").messages(Row("1", ("gone.png",)))


@pytest.mark.parametrize(("prompt", "named"), [("{colour}", r"\{colour\}"), ("a { b", "braces"), ("{}", r"\{\}")])
def test_prompts_that_fit_no_row_are_refused(prompt: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Question(prompt).check([Row("1", (), {"product": "cup"})])


def test_digests_tell_questions_apart(tmp_path: Path) -> None:
    red, same, blue = (save_image(tmp_path / name, name[:-5]) for name in ("red1.png", "red2.png", "blue1.png"))
    question = Question("{word}", "Be brief.")

    def of(image: Path, word: str = "x", settings: bytes = b"s") -> bytes:
        row = Row("1", (str(image),), {"word": word})
        return digest(row, question.messages(row), settings)

    assert of(red) == of(same)
    assert len({of(red), of(blue), of(red, "y"), of(red, settings=b"t")}) == 4
    row = Row("1", (str(red),), {"word": "x"})
    assert digest(row, Question("{word}").messages(row), b"s") != of(red)


def test_file_requests_are_all_lines_or_none(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    first = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}'
    other = first.replace('"a"', '"b"')
    path.write_text(f"{first}\n\n{other}\n")
    rows = read_rows(str(path))
    assert [row.id for row in rows] == ["a", "b"]
    assert rows[0].request is not None
    assert rows[0].request.body == {"messages": []}
    for second, named in [
        (first, "two rows have the id 'a'"),
        ('{"image": "a.png"}', r"line 2: .*custom_id"),
        (first.replace("POST", "GET"), r"line 2: .*GET"),
        (other.replace("chat/completions", "audio/speech"), r"line 2: .*audio/speech"),
    ]:
        path.write_text(f"{first}\n{second}\n")
        with pytest.raises(ConfigurationError, match=named):
            read_rows(str(path))

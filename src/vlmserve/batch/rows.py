"""Rows of a batch: images in a folder, lines of a file, or requests in OpenAI's batch form."""

from __future__ import annotations

import codecs
import csv
import glob
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any

import msgspec
from blake3 import blake3

from vlmserve.errors import ConfigurationError, InvalidRequestError
from vlmserve.folders import expanded
from vlmserve.frontend.wire import DOCUMENT_ENDINGS, URL_SCHEMES, is_image_name, medium_part
from vlmserve.server.schema.batches import BatchLine, read_line
from vlmserve.settings.config import MediaConfig

IMAGE_COLUMNS = ("image", "images")
"""Names of columns with a row's images, in lower case."""
_ID_COLUMNS = ("id", "custom_id")
_FIELDS = Formatter()


@dataclass(frozen=True)
class Row:
    id: str
    images: tuple[str, ...] = ()
    """Paths or URLs of images and documents."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Other columns of the input, which the prompt may use."""
    request: BatchLine | None = None
    """The whole question, if the input gives it."""
    pages: str | None = None
    """Pages of documents, as requests write them; None: all."""


def read_rows(source: str) -> list[Row]:
    """Read rows from a source.

    A folder or a pattern like ``photos/*.jpg`` has a row per image or document. A document has a row per page. A .txt
    file of paths or URLs, or a .csv or .jsonl file with columns, has a row per line. A .jsonl file may instead have
    OpenAI's batch form.

    Paths are relative to the file. Column "id" or "custom_id" is the row's id (default: its number, from 1). Column
    "image" or "images" names images. Capitals in column names do not matter.

    Raises ConfigurationError for an unreadable source or a repeated id.
    """
    path = expanded(source)
    if path.is_dir():
        rows = [Row(str(file.relative_to(path)), (str(file),)) for file in sorted(path.rglob("*")) if _is_shown(file)]
    elif path.is_file():
        rows = _read_file(path)
    else:
        rows = [Row(name, (name,)) for name in sorted(glob.glob(source, recursive=True)) if Path(name).is_file()]
        if not rows:
            raise ConfigurationError(f"there is no file or folder {source!r}, and no file fits it as a pattern")
    if not rows:
        raise ConfigurationError(f"{source} has no rows: give a folder with images, or a file with a row on each line")
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise ConfigurationError(f"{source}: two rows have the id {row.id!r:.100}")
        seen.add(row.id)
    return rows


def _is_shown(path: Path) -> bool:
    known = is_image_name(path.name) or path.suffix.lower() in DOCUMENT_ENDINGS
    return path.is_file() and known and not path.name.startswith(".")


def _read_file(path: Path) -> list[Row]:
    readers: dict[str, Callable[[Path], Iterable[dict[str, Any]]]] = {
        ".txt": _read_lines, ".csv": _read_csv, ".jsonl": _read_jsonl,
    }  # fmt: skip
    if path.suffix.lower() in DOCUMENT_ENDINGS:
        return _pages(path)
    if _is_shown(path):
        return [Row(path.name, (str(path),))]
    if path.suffix.lower() not in readers:
        raise ConfigurationError(f"{path}: give a folder, an image, or a file that ends in {', '.join(readers)}")
    try:
        if path.suffix.lower() == ".jsonl" and _holds_requests(path):
            return list(_read_requests(path))
        return [_row(path, number, columns) for number, columns in enumerate(readers[path.suffix.lower()](path), 1)]
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: the file is not UTF-8 text") from None
    except csv.Error as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _pages(path: Path) -> list[Row]:
    from vlmserve.media.documents import count_pages

    try:
        count = count_pages(path, MediaConfig.model_validate({}))
    except InvalidRequestError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if count == 1:
        return [Row(path.name, (str(path),))]
    return [
        Row(f"{path.name}#{number}", (str(path),), {"page": number}, pages=str(number))
        for number in range(1, count + 1)
    ]


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8-sig").splitlines():
        if line.strip():
            yield {"id": line.strip(), "image": line.strip()}


def _read_csv(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, restkey="", strict=True)
        for columns in reader:
            if "" in columns:
                raise ConfigurationError(f"{path}: line {reader.line_num} has more values than the heading")
            yield {name: value or "" for name, value in columns.items()}


def _json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbers and bytes of non-empty lines, without a byte order mark."""
    for number, line in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if line.strip():
            yield number, line


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in _json_lines(path):
        try:
            yield msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path}: line {number}: {error}; write a JSON object") from None


def _holds_requests(path: Path) -> bool:
    first = next(_read_jsonl(path), {})
    return isinstance(first.get("body"), dict) and {"custom_id", "method", "url"} <= first.keys()


def _read_requests(path: Path) -> Iterator[Row]:
    for number, line in _json_lines(path):
        try:
            request = read_line(line)
        except InvalidRequestError as error:
            raise ConfigurationError(f"{path}: line {number}: {error}") from None
        yield Row(request.custom_id, request=request)


def _row(path: Path, number: int, columns: dict[str, Any]) -> Row:
    ids = _named(columns, _ID_COLUMNS)
    id_ = next((columns[name] for name in ids if columns[name] not in (None, "")), number)
    images: list[str] = []
    for name in _named(columns, IMAGE_COLUMNS):
        value = columns[name] or []
        named = [value] if isinstance(value, str) else value
        if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
            raise ConfigurationError(f"{path}: row {number}: {name!r} must be a path or URL, or a list of them")
        images += [one if one.startswith(URL_SCHEMES) else str(path.parent / expanded(one)) for one in named]
    return Row(str(id_), tuple(images), {name: columns[name] for name in columns if name not in ids})


def _named(columns: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Find columns in the order of `names`, ignoring capitals and blanks."""
    return [column for name in names for column in columns if column.strip().lower() == name]


@dataclass(frozen=True)
class Question:
    """The question to all rows. prompt: may name columns in braces. system: message."""

    prompt: str
    system: str | None = None

    def check(self, rows: Iterable[Row]) -> None:
        """Raise ConfigurationError for an invalid prompt or a column that a row lacks."""
        try:
            names = {name for _, name, _, _ in _FIELDS.parse(self.prompt) if name is not None}
        except ValueError as error:
            raise ConfigurationError(f"--prompt: {error}; write {{{{ and }}}} for braces") from None
        for row in rows:
            if missing := names - row.columns.keys() - {"id"}:
                raise ConfigurationError(
                    f"--prompt names {{{min(missing)}}}, but row {row.id!r:.100} has no such column; for braces write "
                    f"{{{{ and }}}}"
                )

    def messages(self, row: Row) -> list[dict[str, Any]]:
        """The conversation of a row. Raises InvalidImageError for a missing file."""
        text = _FIELDS.vformat(self.prompt, (), {"id": row.id, **row.columns})
        content = [*(medium_part(place, row.pages) for place in row.images), {"type": "text", "text": text}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": content}]


def digest(row: Row, messages: list[dict[str, Any]], settings: bytes) -> bytes:
    """Identify a question by texts, image contents and the batch's settings.

    messages: of a row without a request. Raises OSError for an unreadable image.
    """
    whole = blake3(settings)
    if row.request is not None:
        whole.update(msgspec.json.encode([row.request.url, row.request.body], order="sorted"))
    if row.pages is not None:
        whole.update(row.pages.encode())
    for image in row.images:
        data = image.encode() if image.startswith(URL_SCHEMES) else Path(image).read_bytes()
        whole.update(blake3(data).digest())
    for message in messages:
        content = message["content"]
        whole.update(msgspec.json.encode(content if isinstance(content, str) else content[-1]))
    return whole.digest()

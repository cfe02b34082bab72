"""Parse the input file of a batch."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from vlmserve.server.schema.batches import LineForm

MOST_ERRORS = 50
"""Maximum errors to report for a file."""


class _Head(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None


class _Checked(LineForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: _Head


class Request(LineForm, frozen=True, kw_only=True):
    """body: JSON, as in the file."""

    body: msgspec.Raw


_CHECKED = msgspec.json.Decoder(_Checked)
_REQUEST = msgspec.json.Decoder(Request)


class WrongInputError(Exception):
    """errors: code, message, param and line of each."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__(errors)
        self.errors = errors


@dataclass(frozen=True)
class Requests:
    data: bytes
    spans: list[tuple[int, int]]
    """Start and end of each line."""
    models: list[str | None]
    """The model that each request names."""

    @property
    def model(self) -> str | None:
        """The model that all requests name."""
        return self.models[0] if len({*self.models}) == 1 else None

    def by_model(self) -> list[int]:
        """All rows, each model's together, so that a server of several models loads each once."""
        first: dict[str | None, int] = {}
        for row, model in enumerate(self.models):
            first.setdefault(model, row)
        return sorted(range(len(self)), key=lambda row: first[self.models[row]])

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, row: int) -> Request:
        start, end = self.spans[row]
        return _REQUEST.decode(memoryview(self.data)[start:end])


def read_requests(data: bytes, endpoint: str, most: int, several_models: bool = False) -> Requests:
    """Parse at most `most` requests, all to `endpoint`, and to one model unless `several_models`.

    Raises WrongInputError. Call it in a thread.
    """
    errors: list[dict[str, Any]] = []
    spans: list[tuple[int, int]] = []
    ids: set[str] = set()
    models: list[str | None] = []

    def wrong(code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        errors.append({"code": code, "message": message, "param": param, "line": line})
        if len(errors) == MOST_ERRORS:
            raise WrongInputError(errors)

    for number, (start, end) in enumerate(_lines(data), 1):
        if not data[start:end].strip():
            continue
        spans.append((start, end))
        if len(spans) > most:
            wrong("too_many_requests", f"The file has more than {most:,} requests, the server's limit", number)
            break
        try:
            line = _CHECKED.decode(memoryview(data)[start:end])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            wrong("invalid_line", f"{error}; a line has custom_id, method (POST), url and body", number)
            continue
        if line.custom_id in ids:
            wrong("duplicate_custom_id", f"Two lines have the id {line.custom_id!r:.100}", number, "custom_id")
        if line.url != endpoint:
            wrong("mismatched_url", f"The batch is for {endpoint}, not {line.url}", number, "url")
        if line.body.stream:
            wrong("invalid_request", "Answers of a batch are not streamed; leave out stream", number, "body.stream")
        ids.add(line.custom_id)
        models.append(line.body.model)
    if len({*models}) > 1 and not several_models:
        names = ", ".join(sorted(f"{name!r:.100}" for name in {*models}))
        wrong("mismatched_model", f"All requests of a batch must name the same model; this one has {names}")
    if not spans:
        wrong("empty_file", "The file has no requests")
    if errors:
        raise WrongInputError(errors)
    return Requests(data, spans, models)


def _lines(data: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each line, without a leading byte order mark."""
    start = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        yield start, end
        start = end + 1


def unanswered(requests: Requests, row: int, code: str, message: str, line_id: str) -> bytes:
    """The error file's line for a request that was not sent."""
    error = {"code": code, "message": message}
    return msgspec.json.encode({"id": line_id, "custom_id": requests[row].custom_id, "response": None, "error": error})

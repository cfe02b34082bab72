"""The file that a batch ends with."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from vlmserve.batch.journal import Result
from vlmserve.batch.rows import Row
from vlmserve.errors import ConfigurationError

FORMATS = (".jsonl", ".csv")
RESERVED = ("id", "answer", "error", "finish_reason")


def check_output(path: Path, rows: Sequence[Row]) -> None:
    """Raise ConfigurationError for a file that no results can be written to, or columns that have their names."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigurationError(f"--output {path}: the name must end in {' or '.join(FORMATS)}")
    for row in rows:
        if taken := row.columns.keys() & {*RESERVED}:
            raise ConfigurationError(f"rename the column {min(taken)!r} of the input: results have one of that name")


def write_results(path: Path, rows: Sequence[Row], results: Sequence[Result], *, parsed: bool) -> None:
    """One line for each row, in their order: its id and columns, the answer, and the error if there is one.

    parsed: answers are JSON; a table has a column for each property of theirs. The file is there whole, or not at all.
    """
    records = [_record(row, result, parsed=parsed) for row, result in zip(rows, results, strict=True)]
    if path.suffix.lower() == ".csv":
        text = _table(records)
    else:
        text = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _record(row: Row, result: Result, *, parsed: bool) -> dict[str, Any]:
    record: dict[str, Any] = {"id": row.id, **({} if row.columns else _images(row)), **row.columns}
    if result.error:
        return record | {"answer": None, "error": result.error}
    answer: Any = result.answer
    if parsed and result.finish_reason == "stop":
        with contextlib.suppress(msgspec.DecodeError):  # a server that ignores schemas
            answer = msgspec.json.decode(answer)
    return record | {"answer": answer, "finish_reason": result.finish_reason}


def _images(row: Row) -> dict[str, Any]:
    return {"image": row.images[0]} if len(row.images) == 1 else {}


def _table(records: Sequence[dict[str, Any]]) -> bytes:
    flat = [_flat(record) for record in records]
    names = dict.fromkeys(name for record in flat for name in record)
    for name in ("finish_reason", "error"):
        names.pop(name, None)
    if any(name.startswith("answer.") for name in names) and all(record.get("answer") is None for record in flat):
        names.pop("answer", None)
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, [*names, "finish_reason", "error"], restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue().encode()


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    answer = record["answer"]
    if isinstance(answer, dict):
        record = {name: value for name, value in record.items() if name != "answer"}
        record |= {f"answer.{name}": value for name, value in answer.items()}
    return {name: _cell(value) for name, value in record.items()}


def _cell(value: Any) -> Any:
    return msgspec.json.encode(value).decode() if isinstance(value, dict | list | bool) else value

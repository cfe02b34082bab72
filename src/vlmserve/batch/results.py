from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from vlmserve.batch.journal import Result
from vlmserve.batch.rows import Row
from vlmserve.errors import ConfigurationError

FORMATS = (".jsonl", ".csv", ".parquet")
RESERVED = ("id", "answer", "error", "finish_reason")


def check_output(path: Path, rows: Sequence[Row]) -> None:
    """Raise ConfigurationError for an unsuitable file or reserved column names."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigurationError(f"--output {path}: the name must end in {', '.join(FORMATS)}")
    if path.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        raise ConfigurationError("--output: Parquet needs PyArrow; run: pip install 'vlmserve[parquet]'")
    for row in rows:
        if taken := row.columns.keys() & {*RESERVED}:
            raise ConfigurationError(f"rename the column {min(taken)!r} of the input: results have one of that name")


def write_results(path: Path, rows: Sequence[Row], results: Sequence[Result], *, parsed: bool) -> None:
    """Write one record per row, in order, atomically: id, columns, answer, any error.

    parsed: all answers are JSON; otherwise only answers to requests for JSON are. Tables get a column for each
    property of JSON answers.
    """
    records = [
        _record(row, result, parsed=parsed or _asks_for_json(row)) for row, result in zip(rows, results, strict=True)
    ]
    match path.suffix.lower():
        case ".csv":
            data = _csv(records)
        case ".parquet":
            data = _parquet(records)
        case _:
            data = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    write_whole(path, data)


def write_whole(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _asks_for_json(row: Row) -> bool:
    wanted = {} if row.request is None else row.request.body.get("response_format")
    return isinstance(wanted, dict) and wanted.get("type") in ("json_schema", "json_object")


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


def _csv(records: Sequence[dict[str, Any]]) -> bytes:
    file = io.StringIO(newline="")
    flat = [{name: _cell(value) for name, value in _flat(record).items()} for record in records]
    writer = csv.DictWriter(file, _columns(flat), restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue().encode()


def _parquet(records: Sequence[dict[str, Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    def column(values: list[Any]) -> Any:
        try:
            return pyarrow.array(values)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):  # mixed types
            return pyarrow.array([None if value is None else str(_cell(value)) for value in values], pyarrow.string())

    flat = [_flat(record) for record in records]
    columns = {name: column([record.get(name) for record in flat]) for name in _columns(flat)}
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def _columns(flat: Sequence[dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for record in flat for name in record)
    for name in ("finish_reason", "error"):
        names.pop(name, None)
    if any(name.startswith("answer.") for name in names) and all(record.get("answer") is None for record in flat):
        names.pop("answer", None)
    return [*names, "finish_reason", "error"]


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """Split an object answer into columns."""
    answer = record["answer"]
    if not isinstance(answer, dict):
        return record
    rest = {name: value for name, value in record.items() if name != "answer"}
    return rest | {f"answer.{name}": value for name, value in answer.items()}


def _cell(value: Any) -> Any:
    return msgspec.json.encode(value).decode() if isinstance(value, dict | list | bool) else value

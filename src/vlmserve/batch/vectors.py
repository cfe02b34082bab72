"""Compute vectors of a batch's rows and write them to a file."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from vlmserve.batch.results import write_whole
from vlmserve.batch.rows import Question, Row
from vlmserve.errors import ConfigurationError, InvalidRequestError
from vlmserve.offline.calls import Embeddable

if TYPE_CHECKING:
    from vlmserve.offline.llm import LLM

FORMATS = (".parquet", ".jsonl")
COLUMNS = ("id", "vector", "error")


class Vector(NamedTuple):
    """A row's vector, float32 ``[dimensions]``, or its error."""

    data: npt.NDArray[np.float32] | None
    error: str | None = None


def check_vectors(path: Path, rows: Sequence[Row], question: Question) -> None:
    """Raise ConfigurationError for an unsuitable output file or rows without content."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigurationError(f"--output {path}: the name must end in {' or '.join(FORMATS)}")
    if path.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        raise ConfigurationError("--output: Parquet needs PyArrow; run: pip install 'vlmserve[parquet]', or use .jsonl")
    if not path.parent.is_dir():
        raise ConfigurationError(f"--output: there is no folder {path.parent}; create it, or give another path")
    question.check(rows)
    for row in rows:
        if row.request is not None:
            raise ConfigurationError("requests are for vlmserve batch; give images, or rows with columns")
        if not row.images and not question.prompt:
            raise ConfigurationError(f"row {row.id!r:.100} has no image; --prompt says which text to embed: '{{text}}'")
        if taken := row.columns.keys() & {*COLUMNS}:
            raise ConfigurationError(f"rename the column {min(taken)!r} of the input: results have one of that name")


def embed_rows(
    llm: LLM,
    rows: Sequence[Row],
    question: Question,
    dimensions: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> list[Vector]:
    """Embed each row's images and prompt. advance: called after each row."""

    vectors: list[Vector] = []
    prompts: list[Embeddable] = []
    places: list[int] = []
    for place, row in enumerate(rows):
        vectors.append(Vector(None))
        try:
            prompts.append(_prompt(row, question))
            places.append(place)
        except InvalidRequestError as error:
            vectors[place] = Vector(None, str(error))
            advance()
    outcomes = llm.embed(prompts, use_tqdm=False, stream=True, on_error="return", dimensions=dimensions)
    for place, outcome in zip(places, outcomes, strict=True):
        if isinstance(outcome, InvalidRequestError):
            vectors[place] = Vector(None, str(outcome))
        else:
            found = outcome.outputs
            vectors[place] = Vector(found.data if found.error is None else None, found.error)
        advance()
    return vectors


def _prompt(row: Row, question: Question) -> Embeddable:
    messages = question.messages(row)
    [*media, text] = messages[-1]["content"]
    if not media and question.system is None:
        return str(text["text"])
    messages[-1]["content"] = [*media, text] if text["text"] else media
    return messages


def write_vectors(path: Path, rows: Sequence[Row], vectors: Sequence[Vector]) -> None:
    """Write one record per row, in order, atomically: id, columns, vector, error."""
    records = []
    for row in rows:
        image = {"image": row.images[0]} if len(row.images) == 1 and not row.columns else {}
        records.append({"id": row.id, **image, **row.columns})
    if path.suffix.lower() == ".parquet":
        write_whole(path, _parquet(records, vectors))
        return
    lines = [
        msgspec.json.encode({**record, "vector": None if data is None else data.tolist(), "error": error}) + b"\n"
        for record, (data, error) in zip(records, vectors, strict=True)
    ]
    write_whole(path, b"".join(lines))


def _parquet(records: Sequence[dict[str, Any]], vectors: Sequence[Vector]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: pyarrow.array([_cell(record.get(name)) for record in records]) for name in names}
    columns["vector"] = pyarrow.array([vector.data for vector in vectors], pyarrow.list_(pyarrow.float32()))
    columns["error"] = pyarrow.array([vector.error for vector in vectors], pyarrow.string())
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def _cell(value: Any) -> str | None:
    """Convert a value to text, because a column has one type."""
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()

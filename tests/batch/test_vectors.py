"""Vectors of folders and files, and the files that they are written to."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from tests.mock_checkpoint import make_mock_checkpoint
from vlmserve import LLM
from vlmserve.batch.rows import Question, Row, read_rows
from vlmserve.batch.vectors import check_vectors, embed_rows
from vlmserve.cli.vectors import run
from vlmserve.errors import ConfigurationError
from vlmserve.settings.config import EngineConfig, MediaConfig

NOTHING = Question("")
OUTPUT = Path("a.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_mock_checkpoint(tmp_path_factory.mktemp("mock"))


@pytest.fixture
def images(tmp_path) -> Path:
    for colour in ("blue", "red"):
        Image.new("RGB", (40, 30), colour).save(tmp_path / f"{colour}.png")
    return tmp_path


def test_rows_have_the_vectors_of_their_content(folder, images):
    llm = LLM(str(folder), engine="mock")
    rows = [
        *read_rows(str(images)),
        Row("gone", (str(images / "gone.png"),), {"text": "a"}),
        Row("text", (), {"text": "hello"}),
    ]
    plain, asked = embed_rows(llm, rows[:3], NOTHING), embed_rows(llm, rows[2:], Question("{text}"))
    shown = [{"role": "user", "content": [{"type": "image", "image": rows[0].images[0]}]}]
    direct = [one.outputs.data for one in llm.embed([shown, "hello"], use_tqdm=False)]
    assert (plain[0].data == direct[0]).all()
    assert not np.allclose(plain[0].data, plain[1].data)
    assert (plain[2].data, asked[0].data) == (None, None)
    assert "gone.png" in (plain[2].error or "")
    assert (asked[1].data == direct[1]).all()


@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_the_command_writes_a_row_for_each_image(folder, images, ending):
    (images / "broken.png").write_bytes(b"no image")
    output = images / f"vectors{ending}"
    engine = EngineConfig(model=str(folder), engine="mock")
    arguments = (engine, MediaConfig(), str(images), "", None, output)
    assert not run(*arguments, dimensions=8, overwrite=False)
    if ending == ".parquet":
        records = parquet.read_table(output).to_pylist()
    else:
        records = [msgspec.json.decode(line) for line in output.read_bytes().splitlines()]
    assert [record["id"] for record in records] == ["blue.png", "broken.png", "red.png"]
    assert [record["error"] is None for record in records] == [True, False, True]
    assert [record["vector"] and len(record["vector"]) for record in records] == [8, None, 8]
    with pytest.raises(ConfigurationError, match="--overwrite"):
        run(*arguments, dimensions=8, overwrite=False)


@pytest.mark.parametrize(
    ("output", "row", "question", "message"),
    [
        (Path("missing/a.jsonl"), Row("1", ("a.png",)), NOTHING, "there is no folder missing"),
        (Path("a.csv"), Row("1", ("a.png",)), NOTHING, "must end in .parquet or .jsonl"),
        (OUTPUT, Row("1", (), {"text": "a"}), NOTHING, "has no image; --prompt says which text"),
        (OUTPUT, Row("1", (), {"text": "a"}), Question("{other}"), "no such column"),
        (OUTPUT, Row("1", ("a.png",), {"vector": "a"}), NOTHING, "rename the column 'vector'"),
    ],
)
def test_impossible_outputs_are_explained(output, row, question, message):
    with pytest.raises(ConfigurationError) as error:
        check_vectors(output, [row], question)
    assert message in str(error.value)

"""A batch from rows to the file of results: repeated, interrupted, failed and asked again."""

from __future__ import annotations

import csv
import random
import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.batch import interrupted
from tests.batch.answering import Shouting
from tests.forking import ForkedProcess
from vlmserve.batch.journal import Journal, Result
from vlmserve.batch.rows import Question, Row
from vlmserve.batch.run import Summary, journal_path, run_batch
from vlmserve.errors import ConfigurationError
from vlmserve.server.schema.batches import read_line
from vlmserve.types import Grammar, SamplingParams

GREEDY = SamplingParams(temperature=0)
WORD = Question("say {word}")


def rows_of(*words: str) -> list[Row]:
    return [Row(str(number), (), {"word": word}) for number, word in enumerate(words)]


def lines(path: Path) -> list[dict[str, object]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def test_results_are_in_the_order_of_rows(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    summary = run_batch(rows_of("a", "b", "a"), WORD, GREEDY, output, Shouting)
    assert summary == Summary(rows=3, asked=2, resumed=0, repeated=1, failed=0)
    assert lines(output) == [
        {"id": str(number), "word": word, "answer": f"SAY {word.upper()}", "finish_reason": "stop"}
        for number, word in enumerate("aba")
    ]
    assert not journal_path(output).exists()


def test_drawn_answers_are_asked_for_each_row(tmp_path: Path) -> None:
    answers = Shouting()
    run_batch(rows_of("a", "a"), WORD, SamplingParams(temperature=1), tmp_path / "out.jsonl", lambda: answers)
    assert answers.asked == ["say a", "say a"]
    seeded = Shouting()
    run_batch(rows_of("a", "a"), WORD, SamplingParams(temperature=1, seed=3), tmp_path / "b.jsonl", lambda: seeded)
    assert seeded.asked == ["say a"]


def test_failed_rows_are_asked_again_and_no_others(tmp_path: Path) -> None:
    output, rows = tmp_path / "out.jsonl", [*rows_of("a", "b", "c"), Row("gone", ("gone.png",), {"word": "d"})]
    summary = run_batch(rows, WORD, GREEDY, output, lambda: Shouting(broken=["say b"]))
    assert summary.failed == 2
    assert [line.get("error") for line in lines(output)] == [
        None,
        "broken",
        None,
        "there is no image or document 'gone.png'; give the path of a file or a URL",
    ]
    with pytest.raises(ConfigurationError, match="--overwrite"):
        run_batch(rows, WORD, GREEDY, output, Shouting)
    again = Shouting()
    summary = run_batch(rows[:3], WORD, GREEDY, output, lambda: again, retry=True)
    assert again.asked == ["say b"]
    assert summary == Summary(rows=3, asked=1, resumed=2, repeated=0, failed=0)
    assert [line["answer"] for line in lines(output)] == ["SAY A", "SAY B", "SAY C"]
    with pytest.raises(ConfigurationError, match="no row in it has failed"):
        run_batch(rows[:3], WORD, GREEDY, output, Shouting, retry=True)


def test_another_question_takes_no_earlier_answer(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with Journal(journal_path(output)) as journal:
        journal.add(bytes(32), Result("of something else", "stop"))
    summary = run_batch(rows_of("a"), WORD, GREEDY, output, Shouting)
    assert summary.resumed == 0
    assert lines(output)[0]["answer"] == "SAY A"


class Objects(Shouting):
    """Answers with JSON."""

    def answer(self, asks):  # type: ignore[no-untyped-def]
        for number, _ in enumerate(asks):
            yield number, Result('{"colour": "red", "sizes": [1, 2]}', "stop" if number else "length")


class Whole(Shouting):
    """Answers with JSON that is never cut off."""

    def answer(self, asks):  # type: ignore[no-untyped-def]
        for number, _ in enumerate(asks):
            yield number, Result('{"colour": "red"}', "stop")


def test_answers_with_a_schema_are_objects_and_columns(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, grammar=Grammar.json({"type": "object"}))
    run_batch(rows_of("a", "b"), WORD, params, tmp_path / "out.jsonl", Objects)
    first, second = lines(tmp_path / "out.jsonl")
    assert first["answer"] == '{"colour": "red", "sizes": [1, 2]}'  # cut off: it may be no JSON
    assert second["answer"] == {"colour": "red", "sizes": [1, 2]}
    run_batch(rows_of("a", "b"), WORD, params, tmp_path / "out.csv", Objects)
    with (tmp_path / "out.csv").open(newline="") as file:
        cut, row = csv.DictReader(file)
    assert cut["answer"] == '{"colour": "red", "sizes": [1, 2]}'
    assert row["word"] == "b"
    assert row["answer.colour"] == "red"
    assert row["answer.sizes"] == "[1,2]"
    rows = [*rows_of("a", "b")[1:], Row("gone", ("gone.png",), {"word": "c"})]
    run_batch([rows_of("z")[0], *rows], WORD, params, tmp_path / "some.csv", Objects)
    heading = (tmp_path / "some.csv").read_text().splitlines()[0]
    assert heading == "id,word,answer,answer.colour,answer.sizes,finish_reason,error"
    run_batch(rows, WORD, params, tmp_path / "one.csv", Whole)
    heading = (tmp_path / "one.csv").read_text().splitlines()[0]
    assert heading == "id,word,answer.colour,finish_reason,error"


def test_parquet_has_the_types_of_values(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    params = SamplingParams(temperature=0, grammar=Grammar.json({"type": "object"}))
    rows = [Row("a", (), {"word": "a", "size": 1, "mixed": 1}), Row("b", (), {"word": "b", "size": 2, "mixed": [2]})]
    run_batch([*rows, Row("gone", ("gone.png",), {"word": "c"})], WORD, params, tmp_path / "out.parquet", Objects)
    table = parquet.read_table(tmp_path / "out.parquet")
    assert [str(field.type).partition("<")[0] for field in table.schema] == [
        "string", "string", "int64", "string", "string", "string", "list", "string", "string",
    ]  # fmt: skip
    first, second, third = table.to_pylist()
    assert first["answer"] == '{"colour": "red", "sizes": [1, 2]}'
    assert second == {
        "id": "b", "word": "b", "size": 2, "mixed": "[2]", "answer": None, "answer.colour": "red",
        "answer.sizes": [1, 2], "finish_reason": "stop", "error": None,
    }  # fmt: skip
    assert third["error"].startswith("there is no image")


def test_parquet_without_its_library_is_refused_kindly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmserve.batch.results.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'vlmserve\[parquet\]'"):
        run_batch(rows_of("a"), WORD, GREEDY, tmp_path / "out.parquet", Shouting)


def test_requests_are_asked_once_if_they_are_equal(tmp_path: Path) -> None:
    def request(id_: str, **fields: object) -> Row:
        content = [{"type": "text", "text": "a"}]
        body = {"messages": [{"role": "user", "content": content}], **fields}
        line = {"custom_id": id_, "method": "POST", "url": "/v1/chat/completions", "body": body}
        return Row(id_, request=read_line(msgspec.json.encode(line)))

    answers = Shouting()
    rows = [request("1", temperature=0), request("2", temperature=0), request("3", temperature=0, max_tokens=3)]
    rows += [request("4"), request("5"), request("6", seed=1), request("7", seed=1)]
    summary = run_batch(rows, None, GREEDY, tmp_path / "out.jsonl", lambda: answers)
    assert summary == Summary(rows=7, asked=5, resumed=0, repeated=2, failed=0)
    assert lines(tmp_path / "out.jsonl")[6] == {"id": "7", "answer": "A", "finish_reason": "stop"}


def test_unwritable_outputs_are_rejected_before_any_request(tmp_path: Path) -> None:
    def never() -> Shouting:
        raise AssertionError

    for output, rows, named in [
        (tmp_path / "out.xlsx", rows_of("a"), ".jsonl, .csv, .parquet"),
        (tmp_path / "out.csv", [Row("1", (), {"word": "a", "answer": "b"})], "rename the column 'answer'"),
    ]:
        with pytest.raises(ConfigurationError, match=named):
            run_batch(rows, WORD, GREEDY, output, never)


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.add(b"a", Result("one", "stop"))
        journal.add(b"b", Result("two", "stop"))
    path.write_bytes(path.read_bytes()[:-5])
    with Journal(path) as journal:
        assert journal.results == {b"a": Result("one", "stop")}
        journal.add(b"c", Result("three", "stop"))
    with Journal(path) as journal:
        assert journal.results == {b"a": Result("one", "stop"), b"c": Result("three", "stop")}
        with pytest.raises(ConfigurationError, match="another process"):
            Journal(path)
    path.write_bytes(b"?\n" + path.read_bytes())
    with pytest.raises(ConfigurationError, match="damaged"):
        Journal(path)


def test_killed_batches_go_on_where_they_were(tmp_path: Path) -> None:
    source, output = tmp_path / "rows.csv", tmp_path / "out.jsonl"
    source.write_text("word\n" + "".join(f"word{number % 450}\n" for number in range(500)))
    kept, moments, journal_file = 0, random.Random(0), journal_path(output)

    def written() -> int:
        return journal_file.stat().st_size if journal_file.exists() else 0

    for attempt in range(10):
        process = ForkedProcess(interrupted.run, source, output)
        process.stdout.readline()
        before = written()
        while attempt % 2 and written() <= before:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.005)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(moments.uniform(0.01, 0.06))
        process.close()
        with Journal(journal_file) as journal:
            assert len(journal.results) >= kept
            kept = len(journal.results)
        assert not output.exists()
    assert kept > 0
    for whole in (output, tmp_path / "whole.jsonl"):
        process = ForkedProcess(interrupted.run, source, whole)
        assert process.wait() == 0
        process.close()
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert [line["id"] for line in lines(output)] == [str(number) for number in range(1, 501)]

"""The command as a person types it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.live import LiveServer
from vlmserve.cli import app


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    with LiveServer(make_mock_checkpoint(tmp_path_factory.mktemp("checkpoint"))) as server:
        yield server


def loadtest(*arguments: object):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["loadtest", *map(str, arguments)])


SMALL = ("--num-prompts", 5, "--random-input-len", 8, "--random_output_len", 3)


def test_the_report_is_shown_and_written(mock, tmp_path):
    files = [tmp_path / "reports" / f"report.{kind}" for kind in ("json", "md", "html")]
    outputs = [word for file in files for word in ("--output", file)]
    result = loadtest(mock.url, *SMALL, *outputs, "--save-detailed", "--goodput", "e2el:60000", "ttft:60000")
    assert result.exit_code == 0, result.output
    for words in ("Time to first token", "5 of 5", "Within TTFT", "p99", "client"):
        assert words in result.stdout
    report = json.loads(files[0].read_text())
    assert (report["num_good"], len(report["requests"]), report["goodput"]["count"]) == (5, 5, 5)
    assert "| Time to first token |" in files[1].read_text()
    assert "<!doctype html>" in files[2].read_text()


def test_test_without_successes_exits_with_status_1(mock):
    result = loadtest(mock.url, *SMALL, "--request-timeout", "0.000001")
    assert result.exit_code == 1
    assert "timeout" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("localhost",), "http://127.0.0.1:8000"),
        (("http://127.0.0.1:9", "--output", "a.pdf"), ".html"),
        (("http://127.0.0.1:9", "--request-rate", "0"), "--request-rate"),
        (("http://127.0.0.1:9", "--extra-body", "{"), "not JSON"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(arguments, words):
    result = loadtest(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_nobody_there_is_one_line_and_status_1():
    result = loadtest("http://127.0.0.1:9")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "there is no server at http://127.0.0.1:9" in result.stderr


def test_a_servers_settings_do_not_count(mock, monkeypatch):
    monkeypatch.setenv("VLMSERVE_SEED", "7")
    result = loadtest(mock.url, *SMALL)
    assert result.exit_code == 0

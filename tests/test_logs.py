"""Logs as JSON, in processes of their own: how a process logs is said once."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys

import pytest

from vlmserve.logs import JsonFormatter, log_format_in_use, process_below


def lines_of(program: str, log_format: str = "json") -> list[str]:
    """What a program that has set up logging writes to standard error."""
    start = f"import logging\nfrom vlmserve.logs import *\nset_up_logging({log_format!r}, 'engine')\n"
    done = subprocess.run([sys.executable, "-c", start + program], capture_output=True, text=True, timeout=120)
    assert done.stdout == ""
    return done.stderr.splitlines()


def objects_of(program: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines_of(program)]


def test_a_log_line_is_a_json_object():
    [line] = objects_of("logging.getLogger('vlmserve.eyes').warning('%d images', 3)")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(line.pop("time")))
    assert line == {"level": "warning", "logger": "vlmserve.eyes", "process": "engine", "message": "3 images"}


def test_fields_are_the_objects_own():
    [line] = objects_of("logging.warning('a', extra={'fields': {'status': 200, 'path': '/é\\n', 'more': {1, 2}}})")
    assert (line["status"], line["path"], line["message"]) == (200, "/é\n", "a")
    assert isinstance(line["more"], list | str)


def test_a_traceback_stays_within_its_line():
    [line] = objects_of("try:\n  1 / 0\nexcept ZeroDivisionError:\n  logging.exception('broken')")
    assert (line["level"], line["message"], line["error_type"]) == ("error", "broken", "ZeroDivisionError")
    assert str(line["traceback"]).startswith("Traceback (most recent call last)")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        pytest.param("raise ValueError('nobody')", "ValueError: nobody", id="uncaught"),
        pytest.param(
            "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()",
            "ZeroDivisionError",
            id="uncaught in a thread",
        ),
        pytest.param("import warnings\nwarnings.warn('old')", "old", id="a warning"),
        pytest.param(
            "library = logging.getLogger('library')\nlibrary.propagate = False\n"
            "library.addHandler(logging.StreamHandler())\nlibrary.warning('by itself')",
            "by itself",
            id="a library with a handler of its own",
        ),
    ],
)
def test_warnings_are_json_objects_too(program, said):
    [line] = lines_of(program)
    assert said in json.dumps(json.loads(line))


def test_a_logger_that_is_kept_silent_remains_so():
    assert objects_of("logging.getLogger('a').propagate = False\nlogging.getLogger('a').info('b')") == []


@pytest.mark.parametrize(
    ("log_format", "line"),
    [
        ("text", r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d WARNING engine seen"),
        ("short", r"\d\d:\d\d:\d\d engine seen"),
    ],
)
def test_text_has_the_time_and_the_message(log_format, line):
    program = "logging.warning('%s', 'seen', extra={'fields': {'a': 1}})\nassert log_format_in_use() == "
    [written] = lines_of(f"{program}{log_format!r}", log_format)
    assert re.fullmatch(line, written)


def test_child_processes_are_named_after_their_parent():
    [named] = lines_of("logging.warning(process_below('rank 1'))", "short")
    assert named.endswith("engine engine rank 1")
    program = "import logging\nfrom vlmserve.logs import *\n"
    program += "set_up_logging('short', '100%s')\nlogging.warning('seen')\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stderr.endswith(" 100%s seen\n")
    assert process_below("engine") == "engine"


def test_the_lowest_level_is_settable():
    program = "import logging\nfrom vlmserve.logs import *\nset_up_logging('short', level=level_number('warning'))\n"
    program += "logging.info('not this'); logging.warning('this')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert re.fullmatch(r"\S+ this\n", done.stderr)


def test_unserializable_values_are_logged_as_text():
    record = logging.LogRecord("a", logging.INFO, "", 0, "broken \udc80", (), None)
    record.fields = {"path": "\udc80", "value": object()}
    line = json.loads(JsonFormatter("server").format(record))
    assert line["value"].startswith("<object")


def test_an_unconfigured_process_logs_text():
    assert log_format_in_use() == "text"

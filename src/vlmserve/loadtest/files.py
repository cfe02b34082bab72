"""Reports as JSON, Markdown, and a self-contained HTML page."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import jinja2
import msgspec
from markupsafe import Markup

from vlmserve.errors import ConfigurationError
from vlmserve.loadtest.report import Report
from vlmserve.loadtest.tables import NAMES, Table, headline, tables

_PAGE = files("vlmserve.loadtest") / "page"


def as_json(report: Report) -> str:
    """All figures in milliseconds, except single requests in seconds."""
    return msgspec.json.format(msgspec.json.encode(report, enc_hook=list)).decode() + "\n"


def as_markdown(report: Report) -> str:
    lines = [
        f"# Load test of {_escaped(report.model)}",
        "",
        f"{report.url}, {report.started}, {report.seconds:.1f} s. vlmserve {report.version}; {report.machine}.",
        "",
        *(f"> **{_escaped(warning)}**\n" for warning in report.warnings),
        *(f"> {_escaped(note)}\n" for note in report.notes),
        *(line for table in tables(report) for line in _markdown_table(table)),
        "Workload `" + report.workload + "`: `" + msgspec.json.encode(report.settings).decode() + "`",
    ]
    return "\n".join(lines) + "\n"


def as_html(report: Report) -> str:
    """A self-contained page with tables and scripted plots."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    plots = {
        "series": report.series,
        "histograms": {name: shape for name, shape in report.histograms.items() if shape is not None},
        "points": report.points,
        "trials": report.trials,
        "names": NAMES,
    }
    # Escape "<", so that no text can end the script element.
    data = msgspec.json.encode(plots).decode().replace("<", "\\u003c")
    return environment.from_string(_read("report.html.jinja")).render(
        report=report,
        headline=headline(report),
        tables=list(tables(report)),
        settings={name: _plain(value) for name, value in report.settings.items()},
        data=Markup(data),
        styles=Markup(_read("uPlot.min.css") + _read("report.css")),
        scripts=[Markup(_read(name)) for name in ("uPlot.iife.min.js", "report.js")],
    )


WRITERS = {".json": as_json, ".md": as_markdown, ".html": as_html}


def check_paths(paths: list[Path]) -> None:
    """Raise ConfigurationError for unwritable paths, before the test."""
    for path in paths:
        if path.suffix not in WRITERS:
            raise ConfigurationError(f"--output {path}: the name must end in {', '.join(WRITERS)}")
        if path.is_dir():
            raise ConfigurationError(f"--output {path}: this is a folder")


def write(report: Report, path: Path) -> None:
    """Write in the format of the suffix. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(WRITERS[path.suffix](report), "utf-8")


def _read(name: str) -> str:
    return (_PAGE / name).read_text("utf-8")


def _plain(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _escaped(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")


def _markdown_table(table: Table) -> list[str]:
    rules = ["---" if place < table.words else "---:" for place in range(len(table.headings))]
    rows = [table.headings, tuple(rules), *table.rows]
    return [f"## {table.title}", "", *("| " + " | ".join(map(_escaped, row)) + " |" for row in rows), ""]

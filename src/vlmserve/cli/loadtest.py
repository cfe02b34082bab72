from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from vlmserve.loadtest.files import check_paths, write
from vlmserve.loadtest.perform import perform
from vlmserve.loadtest.settings import TestConfig
from vlmserve.loadtest.tables import headline, tables

if TYPE_CHECKING:
    from vlmserve.loadtest.report import Report
    from vlmserve.loadtest.run import Counts


def run_loadtest(config: TestConfig, paths: list[Path], *, detailed: bool) -> bool:
    """Print and write the report; False if no request succeeded."""
    check_paths(paths)
    with _bar() as bar, _fast_loop() as runner:
        report = runner.run(perform(config, bar, detailed=detailed))
    show(report, Console())
    for path in paths:
        write(report, path)
        Console(stderr=True).print(f"Written into {path}", markup=False, highlight=False)
    return report.num_good > 0


def show(report: Report, console: Console) -> None:
    console.print(Text(f"{report.model} at {report.url}", style="bold"))
    console.print("   ".join(f"{name} [bold]{value}[/]" for name, value in headline(report)), highlight=False)
    for table in tables(report):
        shown = Table(title=table.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        for place, heading in enumerate(table.headings):
            shown.add_column(heading, justify="left" if place < table.words else "right", overflow="fold")
        for row in table.rows:
            shown.add_row(*map(Text, row))
        console.print(shown)
    for text, style in [*((note, "yellow") for note in report.notes), *((text, "red") for text in report.warnings)]:
        console.print(Text(text, style=style))


class _Bar:
    """A progress bar, drawn without a thread."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def stage(self, text: str, total: int | None) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(text, total=total, state="")
        self._progress.refresh()

    def advance(self, done: int, counts: Counts | None) -> None:
        assert self._task is not None
        state = ""
        if counts is not None:
            failed = f", [red]{counts.failed} failed[/]" if counts.failed else ""
            state = f"{counts.running} running, {counts.tokens:,} tokens{failed}"
        self._progress.update(self._task, completed=done, state=state)
        self._progress.refresh()


@contextlib.contextmanager
def _bar() -> Iterator[_Bar]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as bar:
        yield _Bar(bar)


def _fast_loop() -> asyncio.Runner:
    if sys.platform == "win32":
        return asyncio.Runner()
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)

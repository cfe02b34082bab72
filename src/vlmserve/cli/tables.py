"""Tables, tab-separated for other programs, and progress bars."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table


def add_bar(progress: Progress, text: str) -> Callable[[int, int], None]:
    """Add a progress bar; return a function that shows done and total."""
    task = progress.add_task(text, total=None)
    return lambda done, total: progress.update(task, completed=done, total=total)


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = ()) -> None:
    """Print a table without cutting names. right: headings of right-aligned columns."""
    if not sys.stdout.isatty():
        for row in (headings, *rows):
            print("\t".join(row))
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, no_wrap=True, justify="right" if heading in right else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table, width=max(console.width, console.measure(table).maximum), crop=False)

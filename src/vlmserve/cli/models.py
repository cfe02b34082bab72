"""`vlmserve models`: what it shows on a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vlmserve.config import BUILT_IN_MODEL
from vlmserve.models import catalogue


def show_models(*, as_markdown: bool) -> None:
    """Print the short names, then the families."""
    if as_markdown:
        print(catalogue.markdown(), end="")
        return
    short = Table(*catalogue.NAME_HEADINGS, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    name, repository, *_ = short.columns
    # Names are to be typed, so nothing may be cut off.
    name.no_wrap, repository.overflow = True, "fold"
    for column in short.columns[3:]:
        column.justify = "right"
    for row in catalogue.name_rows():
        short.add_row(*row)
    families = Table(*catalogue.FAMILY_HEADINGS, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    families.columns[1].no_wrap = True
    for entry in catalogue.family_rows():
        families.add_row(*entry)
    console = Console(highlight=False)
    console.print(short)
    console.print(
        "GB of weights: the KV cache comes on top, and vlmserve doctor says what fits. "
        f"{BUILT_IN_MODEL}, with 12 MB, is built in."
    )
    console.print(families)
    console.print(
        "Give serve, ask or chat a short name, a local folder or a Hugging Face id with one of these architectures in "
        "its config.json, or a .gguf file."
    )

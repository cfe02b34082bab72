"""``vlmserve embed``: embeddings of images and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmserve.cli.fields import LOCAL_FIELDS
from vlmserve.cli.options import command
from vlmserve.settings.config import EngineConfig, MediaConfig


@command((*LOCAL_FIELDS, "pooling"))
def embed(
    engine: EngineConfig,
    media: MediaConfig,
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="Folder of images and documents, or another input of batch.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Vectors: .parquet or .jsonl.")],
    prompt: Annotated[str, typer.Option(help="Text of each row; {name} inserts a column (default: none).")] = "",
    system: Annotated[str | None, typer.Option(help="System message: the model's instruction.")] = None,
    dimensions: Annotated[
        int | None, typer.Option(metavar="INT", min=1, help="Leading elements of vectors to keep (default: all).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite the vectors.")] = False,
) -> None:
    """Embed each image of a folder, or each row of a file.

    The exit status is 1 if a row failed.

    Example: vlmserve embed photos --output vectors.parquet
    """
    from vlmserve.cli.vectors import run

    if not run(engine, media, source, prompt, system, output, dimensions=dimensions, overwrite=overwrite):
        raise typer.Exit(1)

"""``vlmserve embed``: vectors of images and rows."""

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
        str, typer.Argument(metavar="INPUT", help="A folder of images and documents, or another input of batch.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Vectors: .parquet or .jsonl.")],
    prompt: Annotated[
        str, typer.Option(help="Text of each row; {name} stands for the column of that name. Default: none.")
    ] = "",
    system: Annotated[str | None, typer.Option(help="A system message: the model's instruction.")] = None,
    dimensions: Annotated[
        int | None, typer.Option(metavar="INT", min=1, help="Leading elements of vectors to keep (default: all).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of vectors.")] = False,
) -> None:
    """Write the vector of each image of a folder, or of each row of a file.

    For example: vlmserve embed photos --output vectors.parquet. The exit status is 1 if a row failed.
    """
    from vlmserve.cli.vectors import run

    if not run(engine, media, source, prompt, system, output, dimensions=dimensions, overwrite=overwrite):
        raise typer.Exit(1)

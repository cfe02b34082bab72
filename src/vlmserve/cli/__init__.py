"""The commands; each is a thin call into a room below, loaded when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmserve.cli.options import command
from vlmserve.config import BUILT_IN_MODEL, EngineConfig, MediaConfig, ServerConfig
from vlmserve.errors import ConfigurationError

app = typer.Typer(
    help="Answer questions about pictures, for many users at once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
evaluations = typer.Typer(help="Measure how well a model answers.", no_args_is_help=True)
app.add_typer(evaluations, name="eval")

LOCAL_FIELDS = (
    "model", "revision", "engine", "device", "dtype", "max_model_len", "kv_cache_memory", "num_threads",
)  # fmt: skip
"""Settings that matter where one person asks one thing at a time."""

Url = Annotated[str | None, typer.Option(help="Ask the server at this URL instead of loading a model.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Longest answer; default: as long as it gets.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")]


@app.command()
@command()
def serve(
    engine: EngineConfig,
    media: MediaConfig,
    server: ServerConfig,
    model: Annotated[str, typer.Argument(help=str(EngineConfig.model_fields["model"].description))] = BUILT_IN_MODEL,
) -> None:
    """Serve a model over an OpenAI-compatible API."""
    from vlmserve.server import run

    run.serve(engine, media, server)


@app.command()
@command(LOCAL_FIELDS)
def ask(
    engine: EngineConfig,
    media: MediaConfig,
    words: Annotated[list[str], typer.Argument(metavar="[PICTURE]... QUESTION", help="Paths or URLs, then words.")],
    url: Url = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
) -> None:
    """Ask one question about any number of pictures: vlmserve ask photo.png "What is this?" """
    from vlmserve.cli.answers import open_answers, picture_part
    from vlmserve.types import SamplingParams

    *pictures, question = words
    if Path(question).is_file():
        raise ConfigurationError(f"the last word is the question, but {question!r} is a file")
    parts = [*map(picture_part, pictures), {"type": "text", "text": question}]
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    answers = open_answers(engine, media, url)
    for piece in answers.stream([{"role": "user", "content": parts}], params):
        typer.echo(piece, nl=False)
    typer.echo()


@app.command()
@command(LOCAL_FIELDS)
def chat(
    engine: EngineConfig,
    media: MediaConfig,
    url: Url = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
) -> None:
    """Talk in the terminal; /image PATH shows a picture."""
    import contextlib

    from rich.console import Console

    from vlmserve.cli.answers import open_answers
    from vlmserve.cli.chat import TerminalChat
    from vlmserve.types import SamplingParams

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  importing it gives input() line editing and a history

    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    TerminalChat(open_answers(engine, media, url), params, Console()).run()


@app.command()
@command()
def version() -> None:
    """Print the version."""
    import vlmserve

    typer.echo(vlmserve.__version__)


@app.command()
@command()
def models() -> None:
    """List the built-in model and the architectures that can be served."""
    from rich.console import Console
    from rich.table import Table

    from vlmserve.models.registry import ARCHITECTURES, LLAVA
    from vlmserve.models.spec import FAMILIES

    table = Table("Model", "Sees pictures", "What it is")
    table.add_row(BUILT_IN_MODEL, "yes", "built in: a small LLaVA for simple pictures", end_section=True)
    for model_type, architecture in sorted(ARCHITECTURES.items(), key=lambda item: item[1]):
        sees = architecture == LLAVA
        what = f"CLIP tower, projector, and a decoder: {', '.join(sorted(FAMILIES))}" if sees else "text only"
        table.add_row(architecture, "yes" if sees else "no", f"model_type {model_type}: {what}")
    console = Console()
    console.print(table)
    console.print(
        "Give serve, ask or chat a local folder or a Hugging Face id with one of these in its config.json.",
        highlight=False,
    )

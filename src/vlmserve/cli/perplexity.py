from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vlmserve.cli.tables import add_bar
from vlmserve.engine.loading import load
from vlmserve.errors import ConfigurationError
from vlmserve.models.hub import resolve_model
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.settings.config import EngineConfig
from vlmserve.tools.perplexity import perplexity, python_manual


def run_perplexity(
    config: EngineConfig, schemes: Sequence[str], text: Path | None, num_tokens: int | None, window: int
) -> None:
    words = python_manual() if text is None else _read(text)
    folder = resolve_model(config.model, config.revision, config.mmproj)
    token_ids = Tokenizer.from_folder(folder).encode(words)[:num_tokens]
    table = Table("weights", "perplexity", "change")
    losses: list[float] = []
    with Progress(console=Console(stderr=True)) as progress:
        for scheme in schemes:
            bar = add_bar(progress, scheme)
            model = load(config.model_copy(update={"quantize": scheme}), folder)
            result = perplexity(model, token_ids, window=window, progress=bar)
            losses.append(result.value)
            change = f"{losses[-1] / losses[0] - 1:+.2%}" if len(losses) > 1 else ""
            table.add_row("plain" if scheme == "none" else scheme, f"{result.value:.4f}", change)
    console = Console()
    source = "Python's manual" if text is None else text.name
    console.print(
        f"[bold]{config.model}[/]: {result.num_tokens} tokens of {source}, {window} at a time", highlight=False
    )
    console.print(table)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ConfigurationError(f"--text {path}: the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"--text {path}: the file is not text in UTF-8") from None

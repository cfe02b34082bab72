from __future__ import annotations

import mimetypes
import sys
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

import typer

from vlmserve.cli.answers import ShownThoughts, describes, open_answers
from vlmserve.errors import ConfigurationError
from vlmserve.frontend.wire import URL_SCHEMES, is_image_name, medium_part
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.types import SamplingParams

_LONGEST_PATH = 4096
"""Characters. Linux rejects longer paths."""
_STDIN = "-"


@dataclass(frozen=True)
class Question:
    """Images, documents and a text, which may be empty."""

    media: list[dict[str, Any]]
    text: str

    @classmethod
    def read(cls, words: list[str], pages: str | None = None) -> Question:
        """Separate files and URLs from the text, which comes first or last; ``-`` reads it from stdin.

        pages: of documents. Raises InvalidImageError for a missing file, ConfigurationError for several texts.
        """
        texts = [word for word in words if not _is_medium(word)]
        if len(texts) > 1:
            raise ConfigurationError(
                f"one of {texts[0]!r} and {texts[-1]!r} must be a file or a URL; quote a question of several words"
            )
        media = [medium_part(expanduser(word), pages) for word in words if word not in texts]
        text = texts[0] if texts else ""
        return cls(media, sys.stdin.read().strip() if text == _STDIN else text)


def _is_medium(word: str) -> bool:
    if word.startswith(URL_SCHEMES) or (len(word) <= _LONGEST_PATH and Path(expanduser(word)).is_file()):
        return True
    kind = mimetypes.guess_type(word)[0] or ""
    return len(word.split()) == 1 and (is_image_name(word) or kind.startswith("video/") or kind == "application/pdf")


def print_answer(
    engine: EngineConfig, media: MediaConfig, url: str | None, question: Question, params: SamplingParams
) -> None:
    from rich.console import Console

    if not question.text and (url is not None or not describes(engine)):
        raise ConfigurationError('there is no question, only files: vlmserve ask photo.png "What is this?"')
    answers = open_answers(engine, media, url)
    parts = [*question.media, {"type": "text", "text": question.text}]
    thoughts = ShownThoughts(Console(stderr=True))
    for piece in answers.stream([{"role": "user", "content": parts}], params, on_thought=thoughts.show):
        thoughts.end()
        typer.echo(piece, nl=False)
    thoughts.end()
    typer.echo()

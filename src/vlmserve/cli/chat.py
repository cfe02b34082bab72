from __future__ import annotations

import contextlib
from collections.abc import Callable
from os.path import expanduser
from typing import TYPE_CHECKING, Any

from vlmserve.cli.answers import ServerAnswers, ShownThoughts, open_answers
from vlmserve.errors import VLMServeError
from vlmserve.frontend.wire import medium_part
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from vlmserve.offline.llm import LLM

HELP = """\
/image PATH  send an image with the next message (also a URL; may be repeated)
/clear       start a new conversation
/help        show this
/quit        leave (Ctrl-D does too; Ctrl-C stops an answer)"""
LEAVING = ("/quit", "/exit", "/bye")
"""/quit, and the same command of other programs."""


def run_chat(engine: EngineConfig, media: MediaConfig, url: str | None, params: SamplingParams) -> None:
    from rich.console import Console

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  importing it gives input() line editing and a history

    TerminalChat(open_answers(engine, media, url), params, Console()).run()


class TerminalChat:
    def __init__(
        self,
        answers: LLM | ServerAnswers,
        params: SamplingParams,
        console: Console,
        read_line: Callable[[str], str] = input,
    ) -> None:
        self._answers = answers
        self._params = params
        self._console = console
        self._read_line = read_line
        self._messages: list[dict[str, Any]] = []
        self._images: list[dict[str, Any]] = []

    def run(self) -> None:
        """Run until /quit, end of input, or Ctrl-C at the prompt."""
        self._say("Ask something; /image PATH sends an image, /help lists all commands.", "dim")
        while True:
            try:
                line = self._read_line("> ").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if line in LEAVING:
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/clear":
            self._messages, self._images = [], []
            self._say("A new conversation.", "dim")
        elif word == "/help":
            self._say(HELP)
        elif word != "/image":
            self._say(f"There is no command {word}; /help lists them all.", "red")
        elif not rest.strip():
            self._say("Write a path or a URL: /image PATH.", "red")
        else:
            self._attach(rest.strip())

    def _attach(self, place: str) -> None:
        try:
            self._images.append(medium_part(expanduser(_unquoted(place))))
        except VLMServeError as error:
            self._say(str(error), "red")
        else:
            self._say("It goes with your next message.", "dim")

    def _answer(self, text: str) -> None:
        """Stream an answer. Drop a rejected message; keep an interrupted answer."""
        question = {"role": "user", "content": [*self._images, {"type": "text", "text": text}]}
        pieces: list[str] = []
        thoughts = ShownThoughts(self._console)
        stream = self._answers.stream([*self._messages, question], self._params, on_thought=thoughts.show)
        self._images = []
        try:
            for piece in stream:
                thoughts.end()
                pieces.append(piece)
                self._console.out(piece, end="", highlight=False)
            self._console.print()
        except KeyboardInterrupt:
            self._say("\n(stopped)", "dim")
        except VLMServeError as error:
            self._say(str(error), "red")
            return
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()
        self._messages += [question, {"role": "assistant", "content": "".join(pieces)}]

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False)


def _unquoted(place: str) -> str:
    """Unquote the path of a file dropped on the terminal."""
    if len(place) > 1 and place[0] == place[-1] and place[0] in "'\"":
        return place[1:-1]
    return place.replace("\\ ", " ")

"""A server from its settings, as a program or as a function for a process of its own."""

from __future__ import annotations

import json
import sys
from typing import Any

from vlmserve.errors import VLMServeError
from vlmserve.server.run import serve
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig


def run(engine: dict[str, Any], server: dict[str, Any], in_thread: bool = False) -> None:
    """Serve; an error is shown by its class, and ends the process. in_thread: run the engine in a thread."""
    if in_thread:
        from tests.engine_thread import run_engines_in_threads

        run_engines_in_threads()
    try:
        serve(EngineConfig(**engine), MediaConfig(), ServerConfig(**server))
    except VLMServeError as error:
        print(type(error).__name__, error)
        sys.exit(1)


def command(arguments: list[str]) -> None:
    """Run the command ``vlmserve``."""
    from vlmserve.cli import app  # which the frontend does without

    app(arguments, prog_name="vlmserve")


if __name__ == "__main__":
    run(*json.loads(sys.argv[1]))

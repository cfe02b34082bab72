"""Messages to the person at the terminal, and exit statuses."""

from __future__ import annotations

import logging

from vlmserve.errors import CapacityError, ConfigurationError, VLMServeError
from vlmserve.logs import log_format_in_use

FAILED = 1
WRONG_USE = 2


def exit_status(error: VLMServeError) -> int:
    """`WRONG_USE` if the command line is wrong on any machine."""
    is_wrong = isinstance(error, ConfigurationError) and not isinstance(error, CapacityError)
    return WRONG_USE if is_wrong else FAILED


def report(message: str) -> None:
    """Print a red line to stderr, or JSON if the server logs JSON."""
    if log_format_in_use() == "json":
        logging.getLogger("vlmserve").critical(message)
        return
    _line(f"Error: {message}", "red")


def note(message: str) -> None:
    _line(f"Note: {message}", "yellow")


def _line(text: str, style: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)

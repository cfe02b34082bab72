"""What commands tell the person at the terminal beside their results, and with what status they end."""

from __future__ import annotations

import logging

from vlmserve.errors import CapacityError, ConfigurationError, VLMServeError
from vlmserve.logs import log_format_in_use

FAILED = 1
WRONG_USE = 2


def exit_status(error: VLMServeError) -> int:
    """The status that a command ends with after an error: `WRONG_USE` if its line is wrong on any machine."""
    is_wrong = isinstance(error, ConfigurationError) and not isinstance(error, CapacityError)
    return WRONG_USE if is_wrong else FAILED


def report(message: str) -> None:
    """One red line on the error stream; of a server whose log is JSON, one more line of that."""
    if log_format_in_use() == "json":
        logging.getLogger("vlmserve").critical(message)
        return
    _line(f"Error: {message}", "red")


def note(message: str) -> None:
    """One yellow line on the error stream, of something that a person should know."""
    _line(f"Note: {message}", "yellow")


def _line(text: str, style: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)

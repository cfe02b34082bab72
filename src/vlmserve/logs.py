"""Logging as text, or as JSON lines with a record's ``extra={"fields": {...}}``."""

from __future__ import annotations

import json
import logging
import sys
import threading
import types
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "short", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
_TEXT_FORMATS = {
    "text": ("%(asctime)s %(levelname)s {process}%(message)s", "%Y-%m-%d %H:%M:%S"),
    "short": ("%(asctime)s {process}%(message)s", "%H:%M:%S"),
}
"""Formats of a line and of its time."""
_UNNAMED = "server"
"""The process whose lines have no name."""


class JsonFormatter(logging.Formatter):
    log_format: LogFormat = "json"

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self.process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["error_type"] = record.exc_info[0].__name__
            line["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    def __init__(self, log_format: Literal["text", "short"], process: str) -> None:
        line, time = _TEXT_FORMATS[log_format]
        self.log_format: LogFormat = log_format
        self.process = process
        shown = "" if process == _UNNAMED else f"{process} ".replace("%", "%%")
        super().__init__(line.format(process=shown), time)


class _WithoutHandlers(logging.Logger):
    """Passes a library's records to the root logger, although the library installs a handler."""

    _has_refused = False
    _propagates = True

    def addHandler(self, hdlr: logging.Handler) -> None:
        self._has_refused = True

    @property
    def propagate(self) -> bool:
        return self._propagates or self._has_refused

    @propagate.setter
    def propagate(self, wanted: bool) -> None:
        self._propagates = wanted


def set_up_logging(log_format: LogFormat, process: str = _UNNAMED, level: int = logging.INFO) -> None:
    """Log to stderr. Call it before anything logs. process: named in text unless it is the server."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(log_format, process))
    logging.basicConfig(level=level, handlers=[handler])
    # No format uses these, and each slows every line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    if log_format == "json":
        _catch_other_lines()


def log_format_in_use() -> LogFormat:
    formatter = _formatter()
    return "text" if formatter is None else formatter.log_format


def process_below(name: str) -> str:
    """Return the name of a process that this one starts."""
    formatter = _formatter()
    return name if formatter is None or formatter.process == _UNNAMED else f"{formatter.process} {name}"


def _formatter() -> JsonFormatter | TextFormatter | None:
    formatters = (handler.formatter for handler in logging.getLogger().handlers)
    return next((one for one in formatters if isinstance(one, JsonFormatter | TextFormatter)), None)


def level_number(level: LogLevel) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


def _catch_other_lines() -> None:
    """Log Python's warnings, uncaught exceptions, and the output of libraries' handlers."""
    logging.setLoggerClass(_WithoutHandlers)
    logging.captureWarnings(True)

    def uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
            return
        logging.getLogger(__name__).critical("Uncaught exception", exc_info=(kind, error, trace))

    def uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and not issubclass(arguments.exc_type, SystemExit):
            uncaught(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)

    sys.excepthook = uncaught
    threading.excepthook = uncaught_in_thread

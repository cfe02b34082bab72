"""Regular expressions of module names in an adapter's configuration."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Mapping, Sequence

from pydantic_core import SchemaError, SchemaValidator, core_schema

from vlmserve.errors import AdapterError

MAX_PATTERN = 500
"""Maximum characters of a pattern."""
MAX_SECONDS = 5.0
"""Maximum CPU time for all patterns of one field."""


class ModulePatterns:
    """PEFT's `rank_pattern` or `alpha_pattern`: numbers by pattern of module names.

    Rust's regex crate matches untrusted patterns in linear time, without lookaround and backreferences.
    """

    def __init__(self, field: str, values: Mapping[str, float]) -> None:
        """field: name for errors. Raises AdapterError for a pattern that does not compile."""
        self._field, self._seconds = field, 0.0
        self._known: dict[str, float | None] = {}
        self._patterns: Sequence[tuple[SchemaValidator, float]] = []
        start = time.thread_time()
        compiled = []
        for pattern, value in values.items():
            compiled.append((self._compiled(pattern), value))
            self._check_time(start)
        self._patterns = compiled
        self._seconds = time.thread_time() - start

    def value(self, module: str, default: float) -> float:
        """The number of the first pattern that matches the module's name or the part after one of its dots; else
        `default`.
        """
        if module not in self._known:
            self._known[module] = self._find(module)
        found = self._known[module]
        return default if found is None else found

    def _find(self, module: str) -> float | None:
        start = time.thread_time()
        try:
            for pattern, value in self._patterns:
                if pattern.isinstance_python(module):
                    return value
                self._check_time(start)
            return None
        finally:
            self._seconds += time.thread_time() - start

    def _compiled(self, pattern: str) -> SchemaValidator:
        if len(pattern) > MAX_PATTERN:
            raise AdapterError(
                f"{self._field}: {pattern!r:.50} has {len(pattern):,} characters; at most {MAX_PATTERN} are allowed"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)  # set operators mean something else in Rust
                re.compile(pattern)
            return SchemaValidator(
                core_schema.str_schema(pattern=rf"^(?:.*\.)?(?:{pattern})$", regex_engine="rust-regex")
            )
        except (re.error, RecursionError, OverflowError, FutureWarning) as error:
            raise AdapterError(f"{self._field}: {pattern!r:.50} is no regular expression: {error!s:.60}") from error
        except SchemaError as error:
            reason = "is too large" if "size limit" in str(error) else "uses lookaround, a backreference or the like"
            raise AdapterError(
                f"{self._field}: {pattern!r:.50} {reason}; patterns are those of Rust's regex crate"
            ) from error

    def _check_time(self, start: float) -> None:
        if self._seconds + time.thread_time() - start > MAX_SECONDS:
            raise AdapterError(f"{self._field}: its patterns take longer than {MAX_SECONDS:.0f} s; write fewer")

#!/usr/bin/env python3
"""Check habits in tests: sleeps, long names, and private attributes of other modules.

.ci/habits.py             # fails if a file has more of one than .ci/habits.json allows
.ci/habits.py --accept    # stores lower counts in .ci/habits.json

Each count in .ci/habits.json has a reason.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import ratchet

ROOT = Path(__file__).parent.parent
COUNTS = ROOT / ".ci/habits.json"
MAX_NAME_WORDS = 8
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_fields_", "_exit", "_getframe"}
"""Documented names of the standard library."""
ACCESSORS = (
    "setattr getattr delattr hasattr getattr_static attrgetter methodcaller object patch __getattribute__"
).split()
"""Functions that take names of attributes; `object` is that of `mock.patch`."""


def habits(text: str) -> Counter[str]:
    """Count the habits in one file."""
    tree = ast.parse(text)
    own = set(defined(tree)) | PUBLIC
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            words = node.name.removeprefix("test_").split("_")
            found["long name"] += node.name.startswith("test_") and len(words) > MAX_NAME_WORDS
        elif isinstance(node, ast.Call):
            found["sleep"] += sleeps(node)
        elif isinstance(node, ast.ImportFrom):
            found["private attribute"] += sum(is_private(alias.name) for alias in node.names)
        found["private attribute"] += sum(
            is_private(name) and (name not in own or is_inherited(node)) for name in accessed(node)
        )
    return +found


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that the file itself defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and of_itself(node) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def is_private(name: str) -> bool:
    return bool(re.match(r"__?[a-zA-Z]", name)) and not name.endswith("__")


def of_itself(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def sleeps(call: ast.Call) -> bool:
    """Whether it waits for a time. `asyncio.sleep(0)` lets other tasks run and counts as none."""
    name = ast.unparse(call.func)
    return name in ("time.sleep", "asyncio.sleep", "sleep") and ast.unparse(call)[len(name) :] != "(0)"


def accessed(node: ast.AST) -> Iterator[str]:
    """Names of attributes that code gets or sets, also by `setattr("module._name", ...)` or `vars(thing)["_name"]`."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Subscript):
        mapping = ast.unparse(node.value)
        if mapping.startswith("vars(") or mapping.endswith(".__dict__"):
            yield from named(node.slice)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ACCESSORS:
        for argument in node.args:
            yield from named(argument)


def named(argument: ast.expr) -> Iterator[str]:
    """The attribute that a string names."""
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        yield argument.value.rpartition(".")[2]


def is_inherited(node: ast.AST) -> bool:
    """Whether it is an attribute of `super()`."""
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()"


def in_tests() -> dict[str, int]:
    """Counts by file and habit."""
    return {
        f"{path.relative_to(ROOT).as_posix()}: {habit}": count
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if "node_modules" not in path.parts
        for habit, count in sorted(habits(path.read_text("utf-8")).items())
    }


def without_reason() -> list[str]:
    """Lines for stored counts without a reason."""
    stored: dict[str, object] = json.loads(COUNTS.read_text("utf-8"))
    return [
        f"{name}: {COUNTS.name} gives no reason"
        for name, entry in stored.items()
        if not (isinstance(entry, dict) and entry.get("reason"))
    ]


if __name__ == "__main__":
    sys.exit(ratchet.check(COUNTS, in_tests(), problems=without_reason()))

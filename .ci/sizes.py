#!/usr/bin/env python3
"""Check the sizes of files, functions and classes in src.

.ci/sizes.py             # fails if one is over its limit and larger than .ci/sizes.json allows
.ci/sizes.py --accept    # stores smaller sizes in .ci/sizes.json
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import ratchet

ROOT = Path(__file__).parent.parent
SIZES = ROOT / ".ci/sizes.json"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_METHODS = 20
CORE = ("scheduler", "cache", "runner", "engine", "models", "frontend", "server")
"""Packages whose classes have at most `MAX_METHODS` methods."""


def excesses(name: str, text: str) -> dict[str, int]:
    """Sizes over a limit in one file. name: its path below src/vlmserve."""
    found = {f"{name}: lines": text.count("\n")} if text.count("\n") > MAX_FILE_LINES else {}
    for qualified, node in definitions(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) for member in node.body)
            if methods > MAX_METHODS and name.startswith(CORE):
                found[f"{name}: methods of {qualified}"] = methods
        elif not any("triton" in ast.unparse(decorator) for decorator in node.decorator_list):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found[f"{name}: lines of {qualified}"] = lines
    return found


def definitions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Each class and function below a node, with its qualified name."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
            yield from definitions(child, f"{prefix}{child.name}.")
        else:
            yield from definitions(child, prefix)


def limit(name: str) -> int:
    if name.endswith(": lines"):
        return MAX_FILE_LINES
    return MAX_METHODS if ": methods of " in name else MAX_FUNCTION_LINES


def in_src() -> dict[str, int]:
    source = ROOT / "src/vlmserve"
    return {
        size: count
        for path in sorted(source.rglob("*.py"))
        for size, count in excesses(path.relative_to(source).as_posix(), path.read_text("utf-8")).items()
    }


if __name__ == "__main__":
    sys.exit(ratchet.check(SIZES, in_src(), limit))

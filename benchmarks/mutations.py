"""Whether tests notice faults: random mutations of the scheduler, caches, sampling and keys, made by cosmic-ray.

    make mutations                              # 200 mutations; prints those that no test notices
    make mutations ARGS="--count 20 --seed 2"

Each mutation is made in a copy of the repository. It survives if all tests of its package pass that reach the mutated
line. A test that crashes, hangs or cannot be imported has noticed it. `mutations.toml` names mutations that change
nothing.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import importlib.util
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track

from benchmarks.command import keep, show_rows

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "src/vlmserve/scheduler": ("tests/scheduler",),
    "src/vlmserve/cache": ("tests/cache", "tests/scheduler/test_prefix_caching.py"),
    "src/vlmserve/sampling": ("tests/sampling",),
    "src/vlmserve/media/keys.py": ("tests/media/test_keys.py",),
    "src/vlmserve/scaleout/keys.py": ("tests/scaleout/test_keys.py",),
}
"""Sources, and the tests that should notice their mutations."""
LIBRARIES = (
    "coverage", "pytest", "hypothesis", "torch", "transformers", "llguidance", "tokenizers", "httpx", "typer.testing",
)  # fmt: skip
"""What the processes import once, before any test."""
MOST_SECONDS = 900
"""Processor seconds for the tests of a package."""
EQUIVALENT = Path(__file__).with_suffix(".toml")
"""Mutations that change nothing, each with `path`, `original` and `mutated` (lines of code) and a `reason`."""
LEFT_OUT = ("AddNot", "RemoveDecorator", "Is_Eq", "IsNot_NotEq", "Eq_Is", "NotEq_IsNot")
"""Ends of names of operators whose mutants are equal to the original, or that any test notices."""


class Mutation(NamedTuple):
    source: str
    """A key of `PACKAGES`."""
    path: str
    line: int
    operator: str
    text: str
    """The mutated module."""


def annotated(tree: ast.AST) -> set[tuple[int, int]]:
    """Lines and columns in annotations, which are not evaluated."""
    places = set()
    for node in ast.walk(tree):
        for value in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            for part in ast.walk(value) if isinstance(value, ast.AST) else ():
                if isinstance(part, ast.BinOp):
                    places |= {(part.left.end_lineno or 0, (part.left.end_col_offset or 0) + 1)}
                elif isinstance(part, ast.expr):
                    places.add((part.lineno, part.col_offset))
    return places


def _operators(path: Path) -> list[list[tuple[str, int, int]]]:
    """For each place that can be mutated: the operators, each with the number of its occurrence and the line."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    skipped = annotated(ast.parse(path.read_text("utf-8")))
    nodes = list(ast_nodes(get_ast_from_path(path)))
    found = defaultdict(list)
    for name in operator_names():
        kind = get_operator(name)
        if name.endswith(LEFT_OUT) or kind.arguments():
            continue
        operator = kind()
        positions = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, start in enumerate(positions):
            if start not in skipped:
                found[start].append((name, occurrence, start[0]))
    return list(found.values())


def sampled(count: int, seed: int) -> Iterator[Mutation]:
    """Mutations at distinct random places."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    chosen = random.Random(seed)
    places = []
    for source in PACKAGES:
        paths = [ROOT / source] if source.endswith(".py") else sorted((ROOT / source).rglob("*.py"))
        places += [(source, path, operators) for path in paths for operators in _operators(path)]
    for source, path, operators in chosen.sample(places, min(count, len(places))):
        name, occurrence, line = chosen.choice(operators)
        text = mutate_code(path.read_text("utf-8"), get_operator(name)(), occurrence)
        yield Mutation(source, path.relative_to(ROOT).as_posix(), line, name.partition("/")[2], text)


def changed_lines(mutation: Mutation) -> tuple[str, str]:
    """The lines that differ, before and after."""
    original = (ROOT / mutation.path).read_text("utf-8").splitlines()
    lines = list(difflib.unified_diff(original, mutation.text.splitlines(), n=0, lineterm=""))[2:]
    return (
        "\n".join(line[1:].strip() for line in lines if line.startswith("-")),
        "\n".join(line[1:].strip() for line in lines if line.startswith("+")),
    )


class Reached(NamedTuple):
    """What tests reach without a mutation."""

    seconds: Mapping[str, float]
    """Processor seconds of each test."""
    lines: Mapping[str, Mapping[str, Sequence[str]]]
    """Tests that reach a line, by path and line. The test "" means that an import reaches it."""

    def tests(self, mutation: Mutation) -> list[str] | None:
        """The tests to run, quick ones first. None: all, since an import runs the mutated line."""
        reached = self.lines.get(mutation.path, {})
        begin = statement(ast.parse((ROOT / mutation.path).read_text("utf-8")), mutation.line)
        found = {test for line in range(begin, mutation.line + 1) for test in reached.get(str(line), ())}
        return None if "" in found else sorted(found, key=lambda test: self.seconds[test])


def statement(tree: ast.AST, line: int) -> int:
    """The line in which the innermost statement around `line` begins."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.stmt))
    return max((node.lineno for node in found if node.lineno <= line <= (node.end_lineno or 0)), default=line)


class Folder:
    """A copy of the repository, and a process that runs tests in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("mutation_process.py")), *LIBRARIES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Generated examples are the same in every run.
            env={**os.environ, "OMP_NUM_THREADS": "1", "CI": "true"},
        )

    def record(self, source: str) -> Reached:
        """What the tests of a source reach. Raises SystemExit if they fail."""
        target = self.path / "reached.json"
        if self._call("record", str(self.path), PACKAGES[source], MOST_SECONDS, [source], str(target)):
            raise SystemExit(f"tests of {source} fail without a mutation: correct them first")
        return Reached(**json.loads(target.read_text()))

    def survives(self, mutation: Mutation, reached: Reached) -> bool:
        """Whether no test that reaches it notices it."""
        path, tests = self.path / mutation.path, reached.tests(mutation)
        if tests == []:
            return True
        seconds = sum(reached.seconds[test] for test in reached.seconds if tests is None or test in tests)
        original = path.read_text("utf-8")
        try:
            write(path, mutation.text)
            return not self._call("run", str(self.path), tests or PACKAGES[mutation.source], round(30 + 3 * seconds))
        finally:
            write(path, original)

    def close(self) -> None:
        self._process.communicate()

    def _call(self, *arguments: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


def write(path: Path, text: str) -> None:
    """Write a module. Python would keep what it compiled in the same second from text of the same length."""
    path.write_text(text, "utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def copy(folder: Path) -> None:
    """Copy what git knows, and the compiled kernels."""
    known = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in [*known.split("\0")[:-1], *(str(one.relative_to(ROOT)) for one in ROOT.glob("src/**/_native*.so"))]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def run(mutations: Sequence[Mutation], processes: int, console: Console) -> list[Mutation]:
    """Those that survive."""
    with tempfile.TemporaryDirectory(prefix="vlmserve-mutations-") as place, ExitStack() as ending:
        free: queue.Queue[Folder] = queue.Queue()
        for number in range(processes):
            path = Path(place, str(number))
            copy(path)
            folder = Folder(path)
            ending.callback(folder.close)
            free.put(folder)

        def with_folder(function: Callable[..., Any], *arguments: Any) -> Any:
            folder = free.get()
            try:
                return function(folder, *arguments)
            finally:
                free.put(folder)

        with ThreadPoolExecutor(processes) as pool:
            sources = sorted({mutation.source for mutation in mutations})
            recorded = pool.map(functools.partial(with_folder, Folder.record), sources)
            reached = dict(zip(sources, recorded, strict=True))

            def try_one(mutation: Mutation) -> bool:
                survived = with_folder(Folder.survives, mutation, reached[mutation.source])
                if survived:
                    show(mutation, console)
                return survived

            outcomes = track(pool.map(try_one, mutations), "mutations", len(mutations), console=console)
            return [mutation for mutation, survived in zip(mutations, outcomes, strict=True) if survived]


def show(mutation: Mutation, console: Console) -> None:
    """Print a mutation."""
    console.print(f"\n{mutation.path}:{mutation.line} {mutation.operator}", highlight=False)
    for sign, lines in zip("-+", changed_lines(mutation), strict=True):
        for line in lines.splitlines():
            console.print(f"{sign} {line}", markup=False, highlight=False)


def report(
    mutations: Sequence[Mutation], survivors: Sequence[Mutation], reasons: Mapping[Mutation, str]
) -> dict[str, Any]:
    """What tests notice, for each source. `reasons` says which survivors change nothing, and why."""
    rows = []
    for source in (*PACKAGES, "all"):
        made = [one for one in mutations if source in (one.source, "all")]
        left = [one for one in survivors if source in (one.source, "all")]
        equal = sum(one in reasons for one in left)
        if made:
            share = round(100 * (len(made) - len(left)) / max(len(made) - equal, 1), 1)
            name = source if source == "all" else f"`{source}`"
            rows.append([name, len(made), len(made) - len(left), equal, len(left) - equal, share])
    columns = ["Source", "Mutations", "Noticed", "Equal", "Survived", "Noticed, percent of those that differ"]
    notes = [f"`{Path(one.path).name}`, `{changed_lines(one)[1]}`: {why}" for one, why in reasons.items()]
    return {"columns": columns, "rows": rows, "notes": "\n".join(f"- {note}" for note in notes)}


def equivalent(survivors: Sequence[Mutation]) -> dict[Mutation, str]:
    """The survivors that `EQUIVALENT` names, with their reasons. Spaces make no difference."""

    def key(*texts: str) -> tuple[str, ...]:
        return tuple("".join(text.split()) for text in texts)

    entries = tomllib.loads(EQUIVALENT.read_text("utf-8"))["equivalent"]
    reasons = {key(one["path"], one["original"], one["mutated"]): one["reason"] for one in entries}
    found = {one: reasons.get(key(one.path, *changed_lines(one))) for one in survivors}
    return {one: reason for one, reason in found.items() if reason is not None}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutations", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args()
    console = Console()
    mutations = list(sampled(options.count, options.seed))
    survivors = run(mutations, options.processes, console)
    found = report(mutations, survivors, equivalent(survivors))
    show_rows(found)
    keep(found, options)


if __name__ == "__main__":
    main()

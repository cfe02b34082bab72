"""Whether tests notice faults: random mutations of the scheduler, caches, sampling and keys, made by cosmic-ray.

    make mutations                              # 200 mutations; prints those that no test notices
    make mutations ARGS="--count 20 --seed 2"

Each mutation is made in a copy of the repository. The package's own tests run first, then the fast tests of `WIDER`. A
mutation survives if all pass. A test that crashes, hangs or cannot be imported has noticed it.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track

from benchmarks.command import keep

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "src/vlmserve/scheduler": ("tests/scheduler",),
    "src/vlmserve/cache": ("tests/cache", "tests/scheduler/test_prefix_caching.py"),
    "src/vlmserve/sampling": ("tests/sampling",),
    "src/vlmserve/media/keys.py": ("tests/media/test_keys.py",),
    "src/vlmserve/scaleout/keys.py": ("tests/scaleout/test_keys.py",),
}
"""Sources, and the tests that should notice their mutations."""
WIDER = ("tests/engine", "tests/media", "tests/frontend", "tests/scaleout")
TIMEOUT = 900.0
"""Seconds for the tests of one mutation."""
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


def passes(folder: Path, tests: Sequence[str]) -> bool:
    """Whether tests pass on the sources in a copy of the repository."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--fast", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def survives(mutation: Mutation, folder: Path) -> bool:
    """Whether no test notices it."""
    path = folder / mutation.path
    original = path.read_text("utf-8")
    path.write_text(mutation.text, "utf-8")
    try:
        return passes(folder, PACKAGES[mutation.source]) and passes(folder, WIDER)
    finally:
        path.write_text(original, "utf-8")


def copy(folder: Path) -> None:
    """Copy what git knows, and the compiled kernels."""
    known = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in [*known.split("\0")[:-1], *(str(one.relative_to(ROOT)) for one in ROOT.glob("src/**/_native*.so"))]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def run(mutations: Sequence[Mutation], processes: int, console: Console) -> list[Mutation]:
    """Those that survive."""
    with tempfile.TemporaryDirectory(prefix="vlmserve-mutations-") as place:
        free: queue.Queue[Path] = queue.Queue()
        for number in range(processes):
            folder = Path(place, str(number))
            copy(folder)
            free.put(folder)
        first = [test for tests in PACKAGES.values() for test in tests]
        if not passes(folder, sorted({*first, *WIDER})):
            raise SystemExit("the tests fail without a mutation: correct them first")

        def try_one(mutation: Mutation) -> bool:
            folder = free.get()
            try:
                return survives(mutation, folder)
            finally:
                free.put(folder)

        with ThreadPoolExecutor(processes) as pool:
            outcomes = track(pool.map(try_one, mutations), "mutations", len(mutations), console=console, transient=True)
            return [mutation for mutation, survived in zip(mutations, outcomes, strict=True) if survived]


def report(mutations: Sequence[Mutation], survivors: Sequence[Mutation]) -> dict[str, Any]:
    """The share that tests notice, for each source."""
    rows = []
    for source in PACKAGES:
        made = sum(one.source == source for one in mutations)
        left = sum(one.source == source for one in survivors)
        if made:
            rows.append([f"`{source}`", made, made - left, round(100 * (made - left) / made)])
    made, left = len(mutations), len(survivors)
    rows.append(["all", made, made - left, round(100 * (made - left) / made)])
    return {"columns": ["Source", "Mutations", "Noticed", "Noticed, percent"], "rows": rows}


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
    for one in survivors:
        console.print(f"\n{one.path}:{one.line} {one.operator}", highlight=False)
        original = (ROOT / one.path).read_text("utf-8").splitlines()
        for line in list(difflib.unified_diff(original, one.text.splitlines(), n=1, lineterm=""))[2:]:
            console.print(line, markup=False, highlight=False)
    found = report(mutations, survivors)
    console.print(f"\nTests noticed {found['rows'][-1][2]} of {len(mutations)} mutations.")
    keep(found, options)


if __name__ == "__main__":
    main()

"""Write docs/results from benchmarks/results: a page with tables and a plot for each suite, and the README's plot.

    python -m benchmarks.report            write the pages
    python -m benchmarks.report --stale    list results whose files changed since they were measured

A result is ``benchmarks/results/SUITE/MACHINE/DATE-REVISION.json``, or DATE-REVISION.NAME.json; `Result` lists the
fields. ``machines.toml`` describes the machines, ``suites.toml`` the suites and the files that their results depend on.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
PAGES = ROOT / "docs/results"
README = ROOT / "README.md"
BEGIN, END = "<!-- results: begin -->\n", "<!-- results: end -->\n"
STALE, CURRENT = "stale", "current"

Table = tuple[Sequence[str], Sequence[Sequence[Any]]]


class Result(NamedTuple):
    """One run. columns and rows hold what was measured; a row begins with its name."""

    path: Path
    title: str
    command: str
    model: str
    weights: str
    """"published" or "random", with the number of layers where it is not the model's own."""
    versions: Mapping[str, str]
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    exact: bool = True
    """Whether the code that ran was that of the revision; else the revision is the closest known commit."""
    notes: str = ""
    plot: Sequence[str] = ()
    """Columns with numbers that the suite's plot shows."""
    targets: Sequence[Mapping[str, Any]] = ()
    """With keys target, reached and met."""
    summary: Sequence[Mapping[str, Any]] = ()
    """Ratios for the README, with keys what, ratio and than."""

    @property
    def suite(self) -> str:
        return self.path.parent.parent.name

    @property
    def machine(self) -> str:
        return self.path.parent.name

    @property
    def date(self) -> str:
        return self.path.stem[:10]

    @property
    def revision(self) -> str:
        return self.path.stem[11:].partition(".")[0]


def results(folder: Path = RESULTS) -> list[Result]:
    """All results, the newest of each suite and machine first. Raises ValueError for a name of another form."""
    found = []
    for path in sorted(folder.glob("*/*/*.json"), reverse=True):
        if re.fullmatch(r"\d{4}-\d\d-\d\d-[0-9a-f]{7,40}(\.[a-z0-9-]+)?", path.stem) is None:
            raise ValueError(f"{path}: the name must be DATE-REVISION.json")
        found.append(Result(path=path, **json.loads(path.read_text("utf-8"))))
    return sorted(found, key=lambda one: (one.suite, one.machine))


def settings(name: str) -> Mapping[str, Any]:
    return tomllib.loads((RESULTS / f"{name}.toml").read_text("utf-8"))


def state(result: Result, files: Sequence[str]) -> str:
    """How many of the files that the result depends on changed since its revision, or that the revision is unknown."""

    def count(*command: str) -> int | None:
        done = subprocess.run(["git", *command, "--", *files], cwd=ROOT, capture_output=True)
        return len(done.stdout.splitlines()) if done.returncode == 0 else None

    total = count("ls-tree", "-r", "--name-only", result.revision)
    changed = count("diff", "--name-only", "--no-renames", "--diff-filter=MDT", result.revision, "HEAD")
    if total is None or changed is None:
        return f"{STALE}: the revision is unknown"
    if not total:
        return f"{STALE}: its files had other names"
    return f"{STALE}: {changed} of its {total} files changed since" if changed else CURRENT


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Lines of Markdown. Columns of numbers are aligned to the right."""
    numeric = [all(isinstance(row[at], int | float | None) for row in rows) for at in range(len(columns))]
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join('---:' if one else '---' for one in numeric)} |"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)


def page(suite: str, found: Sequence[Result], states: Mapping[Path, str]) -> str:
    """The page of a suite."""
    about, machines = settings("suites")[suite], settings("machines")
    lines = [f"# {about['title']}", "", "`python -m benchmarks.report` writes this page.", "", about["about"], ""]
    if any(result.plot for result in found):
        lines += [f"![{about['title']}]({suite}.svg)", ""]
    for result in found:
        lines += [f"## {result.title}", ""]
        lines += table(result.columns, result.rows)
        lines += ["", *([result.notes, ""] if result.notes else [])]
        place = "at" if result.exact else "near"
        facts = [
            ("Model", f"{result.model}, {result.weights} weights" if result.weights else result.model),
            ("Machine", machines[result.machine]["name"]),
            ("Measured", f"{result.date} {place} revision {result.revision}, {states[result.path]}"),
            ("Versions", ", ".join(f"{name} {version}" for name, version in result.versions.items())),
            ("Command", f"`{result.command}`"),
        ]
        lines += [f"- {name}: {value}" for name, value in facts if value]
        lines.append("")
        if result.targets:
            rows = [[one["target"], one["reached"], "yes" if one["met"] else "no"] for one in result.targets]
            lines += [*table(["Target", "Reached", "Met"], rows), ""]
    return "\n".join(lines)


def bars(rows: Sequence[tuple[str, float]], title: str, line: float | None = None) -> str:
    """An SVG with a bar for each row. line: a value at which to draw a vertical line."""
    left, width, height = 360, 360, 22
    scale = width / max([value for _, value in rows] + [line or 0])
    drawn = []
    for at, (name, value) in enumerate(rows):
        y = 34 + at * height
        colour = "#2e7d5b" if line is None or value >= line else "#b3543e"
        drawn.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{html.escape(name)}</text>')
        drawn.append(f'<rect x="{left}" y="{y + 2}" width="{value * scale:.1f}" height="14" fill="{colour}"/>')
        drawn.append(f'<text x="{left + value * scale + 6:.1f}" y="{y + 13}">{_cell(value)}</text>')
    bottom = 40 + len(rows) * height
    if line is not None:
        x = left + line * scale
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="30" y2="{bottom - 4}" stroke="#888" stroke-dasharray="3"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 80} {bottom}" font-size="12" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="#fff"/><g fill="#222">'
        f'<text x="8" y="20" font-weight="bold">{html.escape(title)}</text>\n' + "\n".join(drawn) + "\n</g></svg>\n"
    )


def plot(suite: str, found: Sequence[Result]) -> str | None:
    """The plot of a suite: each row of each result that names columns to plot."""
    machines = settings("machines")
    rows = []
    for result in found:
        for column in result.plot:
            at = result.columns.index(column)
            for row in result.rows:
                if isinstance(row[at], int | float):
                    rows.append((f"{machines[result.machine]['short']}: {row[0]}, {column}", row[at]))
    return bars(rows, settings("suites")[suite]["plot"]) if rows else None


def summary(found: Sequence[Result]) -> str:
    """The README's plot of ratios, with its range, dates, machines and pages."""
    shown = [result for result in found if result.summary]
    ratios = [one["ratio"] for result in shown for one in result.summary]
    dates = sorted({result.date for result in shown})
    machines, suites = settings("machines"), settings("suites")
    names = dict.fromkeys(machines[result.machine]["short"] for result in shown)
    pages = dict.fromkeys(f"[{suites[result.suite]['title']}](docs/results/{result.suite}.md)" for result in shown)
    return (
        f"![Rate of vlmserve divided by the rate of another engine: {min(ratios)}x to {max(ratios)}x]"
        "(docs/results/comparison.svg)\n\n"
        f"Measured {' to '.join(dict.fromkeys([dates[0], dates[-1]]))} on {' and '.join(names)}: {', '.join(pages)}.\n"
    )


def comparison(found: Sequence[Result]) -> str:
    """The README's plot of ratios."""
    machines = settings("machines")
    rows = [
        (f"{one['what']}, {machines[result.machine]['short']}, {one['than']}", one["ratio"])
        for result in found
        for one in result.summary
    ]
    return bars(rows, "vlmserve's rate divided by the other engine's rate", line=1)


def index(found: Sequence[Result]) -> str:
    """The page that lists suites, machines and missed targets."""
    machines = settings("machines")
    lines = ["# Results", "", "`python -m benchmarks.report` writes these pages from `benchmarks/results`.", ""]
    lines += [
        "A result is *stale* when a file that it depends on changed after its revision. "
        "The page says how many changed: the fewer, the more likely its figures still hold.",
        "",
    ]
    lines += ["*Near* a revision: the run recorded no revision, and this commit is the closest to its date.", ""]
    lines += [f"- [{about['title']}]({suite}.md)" for suite, about in settings("suites").items()]
    rates = [[one["name"], one["memory_gb_s"], one["gflop_s"]] for one in machines.values()]
    lines += ["", "## Machines", "", *table(["Machine", "Memory, GB/s", "GEMM, GFLOP/s"], rates)]
    lines += ["", "Other guests share the CPU machines, so rates vary between runs. Ratios compare interleaved runs."]
    missed = [
        [one["target"], one["reached"], machines[result.machine]["short"], f"[{result.suite}]({result.suite}.md)"]
        for result in found
        for one in result.targets
        if not one["met"]
    ]
    lines += ["", "## Missed targets", "", *table(["Target", "Reached", "Machine", "Page"], missed), ""]
    return "\n".join(lines)


def files() -> dict[Path, str]:
    """All generated files and what they should hold."""
    suites = settings("suites")
    found = results()
    states = {one.path: state(one, suites[one.suite]["files"]) for one in found}
    written = {PAGES / "README.md": index(found), PAGES / "comparison.svg": comparison(found)}
    for suite in suites:
        own = [one for one in found if one.suite == suite]
        written[PAGES / f"{suite}.md"] = page(suite, own, states)
        if (drawn := plot(suite, own)) is not None:
            written[PAGES / f"{suite}.svg"] = drawn
    before, rest = README.read_text("utf-8").split(BEGIN)
    written[README] = before + BEGIN + summary(found) + END + rest.split(END)[1]
    return written


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stale", action="store_true", help="list stale results and write nothing")
    if parser.parse_args().stale:
        suites = settings("suites")
        for one in results():
            if (found := state(one, suites[one.suite]["files"])) != CURRENT:
                print(f"{one.path.relative_to(ROOT)}, {found}: {one.command}")
        return 0
    PAGES.mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The pages of results hold what benchmarks/results says."""

from __future__ import annotations

import json
import re
import subprocess
import xml.dom.minidom
from pathlib import Path

import pytest

from benchmarks import report


def _without_marks(text: str) -> str:
    """A page without the marks that depend on later commits."""
    return re.sub(rf", ({report.STALE}: .*|{report.CURRENT})$", "", text, flags=re.MULTILINE)


def test_pages_agree_with_results() -> None:
    files = report.files()
    differing = [
        str(path.relative_to(report.ROOT))
        for path, text in files.items()
        if not path.is_file() or _without_marks(path.read_text("utf-8")) != _without_marks(text)
    ]
    assert differing == [], "write them with: python -m benchmarks.report"
    pages = {*report.PAGES.glob("*.md"), *report.PAGES.glob("*.svg")}
    assert pages == {path for path in files if path != report.README}


def test_results_name_known_machines_and_suites() -> None:
    machines, suites = report.settings("machines"), report.settings("suites")
    for result in report.results():
        assert result.machine in machines
        assert result.suite in suites
        assert result.weights in ("published", "random", "")
        assert all(len(row) == len(result.columns) for row in result.rows), result.path
        assert set(result.plot) <= set(result.columns)


def test_suites_depend_on_existing_files() -> None:
    for suite in report.settings("suites").values():
        assert [name for name in suite["files"] if not (report.ROOT / name).exists()] == []


def test_changed_value_changes_the_page(tmp_path: Path) -> None:
    first = report.results()[0]
    changed = first._replace(rows=[["other", *row[1:]] for row in first.rows])
    states = {first.path: report.CURRENT}
    assert report.page(first.suite, [changed], states) != report.page(first.suite, [first], states)


def test_unknown_revision_is_stale() -> None:
    result = report.results()[0]
    unknown = result._replace(path=Path("a/b/2026-01-01-0000000.json"))
    assert report.state(unknown, ["README.md"]) == "stale: the revision is unknown"


def test_state_counts_changed_and_deleted_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        owner = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        return subprocess.run(
            ["git", *owner, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    for name in ("changed", "deleted", "kept"):
        (tmp_path / name).write_text(name)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    revision = git("rev-parse", "HEAD")
    (tmp_path / "changed").write_text("otherwise")
    (tmp_path / "deleted").unlink()
    (tmp_path / "new").write_text("new")
    git("add", ".")
    git("commit", "--quiet", "--message", "second")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    result = report.results()[0]._replace(path=Path(f"a/b/2026-01-01-{revision}.json"))
    assert report.state(result, ["."]) == "stale: 2 of its 3 files changed since"
    assert report.state(result, ["kept", "new"]) == report.CURRENT
    assert report.state(result, ["new"]) == "stale: its files had other names"


def test_result_of_another_name_fails(tmp_path: Path) -> None:
    path = tmp_path / "suite/machine/today.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({}))
    with pytest.raises(ValueError, match="DATE-REVISION"):
        report.results(tmp_path)


def test_plot_is_valid_svg() -> None:
    drawn = report.bars([("a <b>", 0.5), ("c", 2)], "d & e", line=1)
    assert len(xml.dom.minidom.parseString(drawn).getElementsByTagName("rect")) == 3


def test_summary_gives_range_dates_and_pages() -> None:
    found = [one for one in report.results() if one.summary]
    text = report.summary(found)
    ratios = [one["ratio"] for result in found for one in result.summary]
    assert f"{min(ratios)}x to {max(ratios)}x" in text
    assert f"{min(one.date for one in found)} to {max(one.date for one in found)}" in text
    assert all(f"docs/results/{result.suite}.md" in text for result in found)


def test_page_says_which_revisions_are_approximate() -> None:
    first = report.results()[0]
    for exact, word in ((True, "at"), (False, "near")):
        text = report.page(first.suite, [first._replace(exact=exact)], {first.path: report.CURRENT})
        assert f"{first.date} {word} revision {first.revision}" in text

"""A release is made by one command, in a repository like this one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci/release.py"
CHANGELOG = "# Changelog\n\n## [0.1.0] - 2026-01-01\n\n- The first.\n"
FILES = ("src/vlmserve/__init__.py", "CITATION.cff", "deploy/helm/vlmserve/Chart.yaml")


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def release(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *words], cwd=folder, capture_output=True, text=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG, "utf-8")
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes/README.md").write_text("How to write changes.\n", "utf-8")
    (tmp_path / "changes/flag.md").write_text("Something.\n", "utf-8")
    git(tmp_path, "init", "--quiet")
    for name, value in {"user.name": "A", "user.email": "a@example.com", "commit.gpgsign": "false"}.items():
        git(tmp_path, "config", name, value)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "All")
    git(tmp_path, "tag", "--no-sign", "v0.1.0")
    return tmp_path


def test_a_release_has_its_version_and_notes(repository: Path) -> None:
    done = release(repository, "0.2.0")
    assert done.returncode == 0, done.stderr
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "log", "--format=%s", "-1").strip() == "Release 0.2.0"
    assert '__version__ = "0.2.0"' in (repository / FILES[0]).read_text("utf-8")
    citation, chart = (yaml.safe_load((repository / name).read_text("utf-8")) for name in FILES[1:])
    assert citation["version"] == chart["appVersion"] == "0.2.0"
    changelog = (repository / "CHANGELOG.md").read_text("utf-8")
    assert changelog.startswith(
        f"# Changelog\n\n## [0.2.0] - {citation['date-released']}\n\n- Something.\n\n## [0.1.0] - 2026-01-01\n"
    )
    assert sorted(path.name for path in (repository / "changes").iterdir()) == ["README.md"]
    assert release(repository, "--notes", "0.2.0").stdout == "- Something.\n"
    tagged = git(repository, "for-each-ref", "--format=%(contents)", "refs/tags/v0.2.0")
    assert tagged.startswith("vlmserve 0.2.0\n\n- Something.")
    again = release(repository, "0.3.0")
    assert (again.returncode, again.stderr) == (1, "No release: changes has no changes\n")


@pytest.mark.parametrize(
    ("version", "message"), [("0.1.0", "is not newer than 0.1.0"), ("1.0", "is not a version like 1.2.3")]
)
def test_versions_that_cannot_be_released(repository: Path, version: str, message: str) -> None:
    done = release(repository, version)
    assert done.returncode == 1
    assert message in done.stderr
    assert git(repository, "log", "--format=%s").split() == ["All"]


def test_changes_that_are_not_committed_are_not_released(repository: Path) -> None:
    (repository / "new.txt").write_text("new", "utf-8")
    done = release(repository, "0.2.0")
    assert (done.returncode, "not committed" in done.stderr) == (1, True)


def test_change_of_two_lines_fails(repository: Path) -> None:
    (repository / "changes/flag.md").write_text("One.\nTwo.\n", "utf-8")
    git(repository, "commit", "--quiet", "--all", "--message", "Two lines")
    done = release(repository, "0.2.0")
    assert (done.returncode, "must have one line" in done.stderr) == (1, True)


def test_each_release_dates_the_citation(repository: Path) -> None:
    before = yaml.safe_load((repository / "CITATION.cff").read_text("utf-8"))
    for version in ("0.2.0", "0.3.0"):
        (repository / "changes/flag.md").write_text("Something.\n", "utf-8")
        git(repository, "add", ".")
        git(repository, "commit", "--quiet", "--allow-empty", "--message", "Change")
        assert release(repository, version).returncode == 0
        cited = yaml.safe_load((repository / "CITATION.cff").read_text("utf-8"))
        assert before.keys() | {"date-released"} == cited.keys()
        assert cited["version"] == version


def test_citation_has_no_date_before_its_release() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    dated = f"## [{cited['version']}] - {cited.get('date-released')}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert dated == ("date-released" in cited)


def test_section_without_date_gets_released(repository: Path) -> None:
    text = "# Changelog\n\n## [0.2.0]\n\n- Planned.\n"
    (repository / "CHANGELOG.md").write_text(text, "utf-8")
    git(repository, "commit", "--quiet", "--all", "--message", "Plan")
    assert release(repository, "0.2.0").returncode == 0
    assert release(repository, "--notes", "0.2.0").stdout == "- Something.\n\n- Planned.\n"

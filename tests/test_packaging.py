"""What is published: the wheel has every file, and workflows call what exists."""

from __future__ import annotations

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import vlmserve
from tests.ci_scripts import load

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def test_the_wheel_has_every_file_of_the_package() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "src/vlmserve"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    data = [
        f"src/{package.replace('.', '/')}/{pattern}"
        for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
    ]
    sources = ["src/vlmserve/kernels/csrc/*.h", "src/vlmserve/kernels/csrc/*.cpp"]
    left_out = [name for name in tracked if not any(fnmatch(name, one) for one in [*data, *sources, "*.py"])]
    assert len(tracked) > 400
    assert left_out == []


def test_wheel_is_tried_without_settings_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLMSERVE_PORT", "HF_HOME", "XDG_CACHE_HOME", "PYTHONPATH"):
        monkeypatch.setenv(name, "/elsewhere")
    environment = load("wheel")["environment"](tmp_path)
    assert "/elsewhere" not in environment.values()
    assert (environment["HOME"], environment["HF_HUB_OFFLINE"]) == (str(tmp_path), "1")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_what_exists(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert {"name", "permissions", "jobs"} <= workflow.keys()
    for name, job in workflow["jobs"].items():
        if called := job.get("uses"):
            assert (ROOT / called).is_file(), called
            continue
        assert "timeout-minutes" in job, name
        needed = job.get("needs", [])
        assert {*([needed] if isinstance(needed, str) else needed)} <= workflow["jobs"].keys()
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert set(re.findall(r"\bmake ([a-z]+)", step.get("run", ""))) <= TARGETS
            for script in re.findall(r"(?<!\S)(\.ci/\w+(?:\.py)?)", step.get("run", "")):
                assert (ROOT / script).is_file(), script


def test_workflows_test_every_version_that_is_promised() -> None:
    classifiers = " ".join(PROJECT["project"]["classifiers"])
    promised = set(re.findall(r"Python :: (3\.\d+)", classifiers))
    tests = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text("utf-8"))["jobs"]
    oldest = {step["with"]["python-version"] for step in tests["all"]["steps"] if "with" in step}
    assert oldest | set(tests["python"]["strategy"]["matrix"]["python"]) == promised
    types = re.search(r"for version in ([\d. ]+);", (ROOT / "Makefile").read_text("utf-8"))
    assert types is not None
    assert set(types[1].split()) == promised


def test_the_site_has_every_page() -> None:
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    nav = re.findall(r": (\S+\.md)$", settings.partition("\nnav:\n")[2].partition("\nnot_in_nav:")[0], re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(nav) == sorted({*pages, "index.md"})


def test_the_reference_has_what_the_package_offers() -> None:
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference.md").read_text("utf-8"), re.MULTILINE)
    described = {getattr(import_module(module), name) for module, _, name in (path.rpartition(".") for path in named)}
    offered = {getattr(vlmserve, name) for name in vlmserve.__all__ if name != "__version__"}
    assert offered <= described
    # Base classes have the calls that several classes share.
    assert all(
        any(issubclass(other, one) for other in offered if isinstance(other, type)) for one in described - offered
    )

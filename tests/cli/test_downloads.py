"""`vlmserve pull`, `list` and `rm` with a hub in a thread and a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from tests.hub import REPOSITORY, serving_hub
from vlmserve.cli import app
from vlmserve.models import names


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with serving_hub() as url:
        yield url


@pytest.fixture(autouse=True)
def cache(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    template = "HUGGINGFACE_CO_URL_TEMPLATE"
    for name, value in (
        ("HF_HUB_CACHE", str(tmp_path / "hub")),
        ("ENDPOINT", hub),
        ("HF_HUB_OFFLINE", False),
        (template, getattr(constants, template).replace(constants.ENDPOINT, hub)),
    ):
        monkeypatch.setattr(constants, name, value)
    return tmp_path / "hub"


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, words)
    return result.exit_code, result.stdout, result.stderr


def test_pulled_model_is_listed_and_removed(cache: Path) -> None:
    status, shown, _ = run("pull", REPOSITORY)
    assert (status, "0.02 GB" in shown) == (0, True)
    assert [row.split("\t")[:2] for row in run("list")[1].splitlines()] == [["Name", "GB"], [REPOSITORY, "0.02"]]
    assert run("rm", REPOSITORY)[0::2] == (2, "Error: give --yes to remove a model without a question\n")
    assert run("rm", "--yes", REPOSITORY)[:2] == (0, f"{REPOSITORY}: 0.02 GB removed\n")
    assert run("list")[1:] == ("Name\tGB\tLast used\n", "No model is downloaded. Get one: vlmserve pull NAME\n")
    assert not list(cache.rglob("*.safetensors"))


def test_downloads_have_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, errors = run("pull", REPOSITORY)
    assert status == 0, errors
    monkeypatch.setitem(names.REPOSITORIES, "tiny:1b", REPOSITORY)
    assert run("list")[1].splitlines()[1].startswith("tiny:1b\t")
    assert run("rm", "--yes", "tiny:1b")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rm", "qwen3-vl:2b", "--yes"], "qwen3-vl:2b is not downloaded; vlmserve list shows what is"),
        (["rm", f"{REPOSITORY}:Q4_K_M", "--yes"], f"vlmserve removes whole repositories: vlmserve rm {REPOSITORY}"),
        (["rm", "pixie", "--yes"], "pixie is built in and cannot be removed"),
        (["pull", "owner/other"], "owner/other is not a local folder and not on the Hugging Face hub"),
    ],
)
def test_wrong_name_is_explained(words: list[str], message: str) -> None:
    status, _, errors = run("pull", REPOSITORY)
    assert status == 0, errors
    status, _, errors = run(*words)
    assert (status, errors.splitlines()[-1].startswith(f"Error: {message}")) == (1, True), errors

"""Models in folders and files, and the memory that each is expected to take."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.mock_checkpoint import make_mock_checkpoint
from tests.scaleout.ondemand.serving import make_models
from vlmserve.cli import app
from vlmserve.errors import ConfigurationError
from vlmserve.scaleout.ondemand import run
from vlmserve.scaleout.ondemand.catalogue import PROCESSES, Listed, check_names, expect, find_models
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig


def found(folder: Path) -> dict[str, str]:
    listed = find_models(str(folder), EngineConfig(), MediaConfig(), ServerConfig())
    return {model.name: Path(model.engine.model).name for model in listed}


def test_folders_and_gguf_files_are_models(tmp_path):
    make_models(tmp_path, ["second", "first"])
    (tmp_path / "empty").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "config.json").touch()
    for name in ("small-Q4_K_M.gguf", "mmproj-small.gguf", "notes.txt"):
        (tmp_path / name).touch()
    for number in (1, 2):
        (tmp_path / f"large-0000{number}-of-00002.gguf").touch()
    assert found(tmp_path) == {
        "first": "first",
        "large": "large-00001-of-00002.gguf",
        "second": "second",
        "small-Q4_K_M": "small-Q4_K_M.gguf",
    }


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_folder_without_models_is_an_error(tmp_path, name):
    with pytest.raises(ConfigurationError, match="--models-dir"):
        found(tmp_path / name)


def test_one_draft_model_is_not_for_all(tmp_path):
    make_models(tmp_path, ["first"])
    with pytest.raises(ConfigurationError, match=r"--draft-model is for one model.*\[model\.NAME\]"):
        find_models(str(tmp_path), EngineConfig(draft_model="small"), MediaConfig(), ServerConfig())


def test_names_are_unique():
    models = [Listed("a", EngineConfig(), MediaConfig(), ServerConfig()) for _ in range(2)]
    with pytest.raises(ConfigurationError, match="two models are called a"):
        check_names(models)


def test_served_names_are_unique():
    server = ServerConfig(served_model_name=("c",))
    models = [Listed(name, EngineConfig(), MediaConfig(), server) for name in "ab"]
    with pytest.raises(ConfigurationError, match="two models are called c"):
        check_names(models)


def test_names_of_adapters_are_known():
    engine = EngineConfig(model="base", lora_modules=("poems=/adapters/poems",))
    model = Listed("a", engine, MediaConfig(), ServerConfig(served_model_name=("b",)))
    assert model.names == ("a", "b", "base", "poems")


def test_expected_memory_counts_caches(tmp_path):
    make_mock_checkpoint(tmp_path)
    engine = EngineConfig(model=str(tmp_path), engine="mock", kv_cache_memory=2**30, encoder_cache_memory=2**20)
    expected = expect(Listed("a", engine, MediaConfig(image_cache_memory=2**21), ServerConfig()))
    assert expected.growth == 2**30 + 2**20 + 2**21
    assert expected.total == expected.growth + PROCESSES


@pytest.fixture
def served(monkeypatch):
    """What the command serves."""
    calls = []
    monkeypatch.setattr(run, "serve", lambda *arguments: calls.append(arguments))
    return calls


def test_sections_of_a_file_are_models(tmp_path, served):
    path = tmp_path / "vlmserve.toml"
    path.write_text(
        "[engine]\nmax_model_len = 100\n"
        '[model.small]\nmodel = "pixie"\n'
        '[model.large]\nmodel = "b"\nmax_model_len = 200\n'
    )
    answer = CliRunner().invoke(app, ["serve", "--config", str(path), "--models-memory", "3GiB"])
    assert answer.exit_code == 0, answer.output
    [(listed, models, _)] = served
    assert [(one.name, one.engine.model, one.engine.max_model_len) for one in listed] == [
        ("small", "pixie", 100),
        ("large", "b", 200),
    ]
    assert models.models_memory == 3 * 2**30


def test_model_beside_several_is_an_error(tmp_path, served):
    make_models(tmp_path, ["a"])
    answer = CliRunner().invoke(app, ["serve", "pixie", "--models-dir", str(tmp_path)])
    assert (answer.exit_code, served) == (2, [])
    assert "leave it out" in " ".join(answer.output.split())


def test_section_without_a_model_is_an_error(tmp_path, served):
    path = tmp_path / "vlmserve.toml"
    path.write_text("[model.small]\nmax_model_len = 200\n")
    answer = CliRunner().invoke(app, ["serve", "--config", str(path)])
    assert answer.exit_code == 2
    assert "[model.small]" in answer.output


def test_keys_of_one_model_are_an_error(tmp_path, served):
    path = tmp_path / "vlmserve.toml"
    path.write_text('[model.small]\nmodel = "pixie"\napi_key = "secret"\n')
    answer = CliRunner().invoke(app, ["serve", "--config", str(path)])
    assert (answer.exit_code, served) == (2, [])
    assert "[server]" in answer.output
    assert "secret" not in answer.output


def test_memory_of_one_model_is_an_error(served):
    answer = CliRunner().invoke(app, ["serve", "pixie", "--models-memory", "1GiB"])
    assert (answer.exit_code, served) == (2, [])
    assert "--models-dir" in answer.output

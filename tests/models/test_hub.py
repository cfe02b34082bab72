from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from vlmserve.errors import CheckpointNotFoundError, MissingWeightsError
from vlmserve.models import hub
from vlmserve.models.hub import resolve_model


def checkpoint(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        (folder / name).write_bytes(b"{}")
    return folder


def answer_with(monkeypatch: pytest.MonkeyPatch, result: Path | Exception) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://example.invalid"))


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "config.json", "model.safetensors")
    assert resolve_model(str(folder)) == folder


def test_pixie_is_in_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(checkpoint(tmp_path, "config.json", "model.safetensors"))
    assert hub.built_in_folder().parts[-3:] == ("vlmserve", "pixie", "model")
    folder = checkpoint(tmp_path / "built-in", "config.json", "model.safetensors")
    monkeypatch.setattr(hub, "built_in_folder", lambda: folder)
    assert resolve_model("pixie") == folder


def test_an_installation_without_pixie_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "built_in_folder", lambda: tmp_path / "missing")
    with pytest.raises(CheckpointNotFoundError, match="missing from this installation"):
        resolve_model("pixie")


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "~/missing-model", "../a/b", "missing/"])
def test_a_missing_path_is_not_asked_of_hubs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = answer_with(monkeypatch, Path("unused"))
    with pytest.raises(CheckpointNotFoundError, match="there is no folder"):
        resolve_model(name)
    assert calls == []


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "model.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="is a file"):
        resolve_model(str(folder / "model.safetensors"))


def test_a_folder_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"config\.json"):
        resolve_model(str(checkpoint(tmp_path, "model.safetensors")))


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(MissingWeightsError, match=r"no \*\.safetensors"):
        resolve_model(str(checkpoint(tmp_path, "config.json")))


def test_weights_in_another_format_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingWeightsError, match=r"give its own path \(model\.gguf\)"):
        resolve_model(str(checkpoint(tmp_path, "config.json", "model.gguf")))


def test_pytorch_files_are_downloaded_if_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "config.json", "pytorch_model.bin")
    assert resolve_model(str(folder)) == folder
    calls = answer_with(monkeypatch, folder)
    assert resolve_model("owner/model") == folder
    assert ["*.bin" in call["allow_patterns"] for call in calls] == [False, True]
    checkpoint(folder, "model.safetensors")
    calls = answer_with(monkeypatch, folder)
    resolve_model("owner/model")
    assert ["*.bin" in call["allow_patterns"] for call in calls] == [False]


def test_a_repository_is_downloaded_at_its_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "config.json", "model.safetensors")
    calls = answer_with(monkeypatch, folder)
    assert resolve_model("owner/model", "v1", progress=False) == folder
    assert (calls[0]["name"], calls[0]["revision"]) == ("owner/model", "v1")
    assert "*.safetensors" in calls[0]["allow_patterns"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError("gated", response=response(403)), "HF_TOKEN"),
        (errors.RepositoryNotFoundError("none", response=response(404)), "not on the Hugging Face hub"),
        (errors.RevisionNotFoundError("none", response=response(404)), "no revision 'v1'"),
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        (errors.LocalEntryNotFoundError("no network"), "cannot be reached"),
        (httpx.ConnectError("connection refused"), "connection refused"),
        (OSError("disk full"), "disk full"),
    ],
)
def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    answer_with(monkeypatch, error)
    with pytest.raises(CheckpointNotFoundError, match=message):
        resolve_model("owner/model", "v1")


def test_an_unknown_name_says_what_names_are() -> None:
    with pytest.raises(CheckpointNotFoundError, match="owner/name"):
        resolve_model("not a model!")


def test_offline_without_a_cached_copy_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointNotFoundError, match="not in the local cache"):
        resolve_model("owner/model")

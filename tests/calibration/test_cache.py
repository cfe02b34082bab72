"""Calibration at load: the result is that of the command, is kept, and is made once."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from tests.checkpoints import make_llama
from tests.gguf_files import write_gguf
from tests.models.test_quantized import GROUPS_FIT
from tests.paged import PagedRun
from vlmserve.calibration import process, quantizing
from vlmserve.engine import calibrated
from vlmserve.engine.loading import load
from vlmserve.errors import ConfigurationError, ModelLoadError
from vlmserve.kernels.extension import supported_isas
from vlmserve.models import quantized
from vlmserve.offline.llm import LLM
from vlmserve.settings.config import EngineConfig
from vlmserve.settings.quantization import QuantizationConfig

OPTIONS: dict[str, Any] = {"quantize": "int4", "quantize_method": "gptq", "kv_cache_memory": "1MiB"}


def nothing(done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "plain", **GROUPS_FIT)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    data = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    data.write_text('{"prompt": "a b c d"}\n{"prompt": "e f g"}\n')
    return OPTIONS | {"quantize_calibration": str(data)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "vlmserve" / "quantized"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[calibrated.Job]:
    """What was made, in this process instead of another one."""
    made: list[calibrated.Job] = []

    def run(job: calibrated.Job) -> None:
        made.append(job)
        process.make_copy(job, nothing)

    monkeypatch.setattr(calibrated, "run_job", run)
    return made


def weights_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_process_output_is_reused_by_next_start(
    folder: Path, options: dict[str, Any], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(folder), **options)
    made = calibrated.calibrated_copy(config, folder)
    how = QuantizationConfig(method="gptq", scheme="int4", calibration=options["quantize_calibration"])
    quantizing.quantize_checkpoint(folder, tmp_path / "out", how, "auto", nothing)
    assert weights_of(made) == weights_of(tmp_path / "out")
    monkeypatch.setattr(calibrated, "run_job", None)
    assert calibrated.calibrated_copy(config, folder) == made
    answers = [
        LLM(str(model), **own).generate([{"prompt_token_ids": [5, 6, 7, 8]}])[0].outputs[0].token_ids
        for model, own in ((folder, options), (tmp_path / "out", {"kv_cache_memory": "1MiB"}))
    ]
    assert answers[0] == answers[1]


def test_gguf_files_are_calibrated_dequantized(
    options: dict[str, Any], cache: Path, runs: list[calibrated.Job], tmp_path: Path
) -> None:
    folder = make_llama(tmp_path / "folder", **GROUPS_FIT)
    path = write_gguf(folder, tmp_path / "model.gguf", types="F32")
    models = [load(EngineConfig(model=str(one), **options | {"dtype": "float32"})) for one in (folder, path)]
    tokens = torch.arange(5, 45)
    with torch.inference_mode():
        expected, actual = (
            PagedRun(model, [model.embed(tokens)]).finish([40])[0] for model in (one.language_model for one in models)
        )
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    load(EngineConfig(model=str(path), **options))
    assert len(runs) == 2


def test_other_weights_settings_and_data_are_other_copies(
    folder: Path, options: dict[str, Any], cache: Path, runs: list[calibrated.Job], tmp_path: Path
) -> None:
    data = tmp_path / "prompts.jsonl"
    others: list[dict[str, Any]] = [
        {}, {"quantize_group_size": 64, "quantize_layers": ("*.down_proj=int8",)}, {"quantize_method": "awq"},
        {"quantize_calibration": str(data)},
    ]  # fmt: skip
    for text in ("a b c", "d e f"):
        data.write_text(f'{{"prompt": "{text}"}}\n')
        for other in others:
            load(EngineConfig(model=str(folder), **options | other))
    assert len(runs) == len({run.place for run in runs}) == 5
    elsewhere = tmp_path / "moved"
    shutil.copytree(folder, elsewhere)
    load(EngineConfig(model=str(elsewhere), **options))
    assert len(runs) == 5
    make_llama(elsewhere, **GROUPS_FIT, seed=1)
    load(EngineConfig(model=str(elsewhere), **options))
    assert len(runs) == 6


def test_other_kernels_are_another_copy(
    folder: Path, options: dict[str, Any], cache: Path, runs: list[calibrated.Job]
) -> None:
    for kernels in ("torch", "torch", "auto"):
        calibrated.calibrated_copy(EngineConfig(model=str(folder), kernels=kernels, **options), folder)
    assert [job.kernels for job in runs] == (["torch", "auto"] if supported_isas() else ["torch"])


def test_two_that_start_at_once_make_one_copy(
    folder: Path, options: dict[str, Any], cache: Path, runs: list[calibrated.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    both = threading.Barrier(2, timeout=60)
    quantize_checkpoint, run = process.quantize_checkpoint, calibrated.run_job

    def slowly(*arguments: Any) -> Any:
        made.append(arguments[1])
        return quantize_checkpoint(*arguments)

    def run_together(job: calibrated.Job) -> None:
        both.wait()
        run(job)

    monkeypatch.setattr(process, "quantize_checkpoint", slowly)
    monkeypatch.setattr(calibrated, "run_job", run_together)
    config = EngineConfig(model=str(folder), **options)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(calibrated.calibrated_copy(config, folder))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found[0] == found[1]
    assert {path.suffix for path in cache.iterdir()} == {"", ".lock"}


def test_what_was_interrupted_goes_on(
    folder: Path, options: dict[str, Any], cache: Path, runs: list[calibrated.Job]
) -> None:
    config = EngineConfig(model=str(folder), **options)

    class Interrupted(Exception):
        pass

    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise Interrupted

    copy = calibrated.calibrated_copy(config, folder)
    shutil.rmtree(copy)
    with pytest.raises(Interrupted):
        process.make_copy(runs[0], interrupt)
    seen: list[int] = []
    process.make_copy(runs[0], lambda done, total: seen.append(done))
    assert seen[0] == 2
    assert copy.is_dir()


@pytest.mark.parametrize("full", ["before", "on the way"])
def test_full_disk_error_names_a_remedy(
    folder: Path,
    options: dict[str, Any],
    cache: Path,
    runs: list[calibrated.Job],
    monkeypatch: pytest.MonkeyPatch,
    full: str,
) -> None:
    config = EngineConfig(model=str(folder), **options)

    def save(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        if full == "before":
            patch.setattr(quantizing.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        else:
            patch.setattr(quantized, "save_file", save)
        with pytest.raises(ConfigurationError, match=r"the disk with .* (is full|has 0 MB free)"):
            load(config)
    assert load(config).weight_bytes > 0


def test_unwritable_cache_is_an_error(
    folder: Path, options: dict[str, Any], tmp_path: Path, runs: list[calibrated.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(ConfigurationError, match=r"cannot be written: .*Not a directory; set HF_HOME"):
        load(EngineConfig(model=str(folder), **options))


def test_process_errors_reach_the_engine(
    folder: Path, options: dict[str, Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrated, "run_job", lambda job: calibrated.check_answer(process.attempt(job), 1))
    wrong = options | {"quantize_layers": ("*.nothing=int8",)}
    with pytest.raises(ConfigurationError, match=r"no layer of this model has a name like \*\.nothing"):
        load(EngineConfig(model=str(folder), **wrong))
    with pytest.raises(ModelLoadError, match="ended with status -9"):
        calibrated.check_answer(b"", -9)

"""Figures of a model beside what the machine can do."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.checkpoints import make_llama, make_llava
from vlmserve.cli import app
from vlmserve.kernels.extension import supported_isas
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.registry import load_model
from vlmserve.settings.config import EngineConfig
from vlmserve.tools.bench import bench, measure_limits, memory_bandwidth, product_rate


@pytest.fixture(scope="module", autouse=True)
def limits_measured_once() -> Iterator[None]:
    """What the machine can do is measured for seconds, and is the same for all reports."""
    with pytest.MonkeyPatch.context() as patch:
        for measure in (memory_bandwidth, product_rate):
            patch.setattr(f"vlmserve.tools.bench.{measure.__name__}", functools.cache(measure))
        yield


def test_bench_measures_each_scheme_and_load(tmp_path: Path) -> None:
    folder = make_llava(tmp_path)
    config = EngineConfig(model=str(folder), device="cpu", kv_cache_memory="16MiB")
    report = bench(config, folder, schemes=("none", "int8"), at_once=(1, 3), prompt_len=9, long_prompt_len=40, steps=2)
    kinds = [("prefill", 1), ("decode", 1), ("decode", 3), ("vision", 1)]
    assert [(figure.weights, figure.what, figure.at_once) for figure in report.figures] == [
        (weights, *kind) for weights in ("none", "int8") for kind in kinds
    ]
    for figure in report.figures:
        assert min(figure.rate, figure.milliseconds, figure.of_bandwidth, figure.of_flops) > 0


def test_slow_prompts_leave_steps_to_measure(tmp_path: Path) -> None:
    folder = make_llama(tmp_path)
    config = EngineConfig(
        model=str(folder), device="cpu", kv_cache_memory="16MiB", step_seconds=1e-6, max_num_batched_tokens=16
    )
    sizes = {"prompt_len": 9, "long_prompt_len": 40, "steps": 2}
    report = bench(config, folder, schemes=("none",), at_once=(12,), **sizes)
    assert [(figure.what, figure.at_once) for figure in report.figures] == [("prefill", 1), ("decode", 12)]


def test_kernels_are_compared_in_the_same_type(tmp_path: Path) -> None:
    folder = make_llama(tmp_path, dtype=torch.bfloat16)
    config = EngineConfig(model=str(folder), device="cpu", kv_cache_memory="16MiB")
    kernels = (*supported_isas(), "torch")
    sizes = {"at_once": (1,), "prompt_len": 9, "long_prompt_len": 40, "steps": 2}
    report = bench(config, folder, schemes=("none",), kernels=kernels, **sizes)
    assert [figure.kernels for figure in report.figures] == [name for name in kernels for _ in range(2)]
    assert report.dtype == bench(config, folder, schemes=("none",), **sizes).dtype


def test_figures_count_what_is_moved_and_multiplied(tmp_path: Path) -> None:
    # Sizes that no kernel has to pad.
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = make_llama(tmp_path, tie_word_embeddings=True, vocab_size=384, **shape)
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", kv_cache_memory="16MiB")
    report = bench(config, folder, schemes=("none",), at_once=(2,), prompt_len=9, long_prompt_len=40, steps=2)
    prefill, decode = report.figures
    seconds = decode.milliseconds / 1e3
    assert decode.rate == pytest.approx(2 / seconds)
    # A tied table is read once, as the output head; norms and products are all that multiplies.
    moved = decode.of_bandwidth * report.limits.bytes_per_s * seconds
    keys_and_values = 2 * 9 * 2 * 3 * 2 * 16 * 4
    assert moved == pytest.approx(4 * report.num_parameters + keys_and_values, rel=0.05)
    # Queries with keys, and weights with values: 4 heads of 16 in 3 layers.
    pair = 2 * 2 * 4 * 16 * 3
    multiplied = decode.of_flops * report.limits.flops_per_s * seconds
    assert multiplied == pytest.approx(2 * 2 * report.num_parameters + 2 * 9 * pair, rel=0.02)
    # Of a prompt, only the last row meets the output head.
    head = 384 * 64
    multiplied = prefill.of_flops * report.limits.flops_per_s * prefill.milliseconds / 1e3
    expected = 2 * (40 * (report.num_parameters - head) + head) + 40 * 41 / 2 * pair
    assert multiplied == pytest.approx(expected, rel=0.02)


def test_it_runs_on_the_threads_asked_for(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    config = EngineConfig(model="", device="cpu", kv_cache_memory="16MiB", num_threads=2 if before == 1 else 1)
    try:
        report = bench(config, make_llama(tmp_path), schemes=("none",), at_once=(1,), long_prompt_len=40, steps=2)
        assert report.threads == config.num_threads
    finally:
        torch.set_num_threads(before)


def test_limits_are_measured() -> None:
    assert memory_bandwidth(torch.device("cpu"), num_bytes=2**20) > 0
    assert product_rate(torch.device("cpu"), torch.float32) > 0


@pytest.mark.parametrize(("hardware", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_product_limits_are_those_of_the_dtype(
    hardware: bool, expected: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU that lacks instructions for bfloat16 would take minutes to multiply large matrices of it."""
    measured = []
    monkeypatch.setattr("vlmserve.devices.choice.multiplies_bfloat16", lambda: hardware)
    monkeypatch.setattr("vlmserve.tools.bench.product_rate", lambda device, dtype: measured.append(dtype) or 1.0)
    monkeypatch.setattr("vlmserve.tools.bench.memory_bandwidth", lambda device: 1.0)
    measure_limits(load_model(make_llama(tmp_path), LoadSettings(device=torch.device("cpu"), dtype=torch.bfloat16)))
    assert measured == [expected]


def test_the_command_shows_a_table(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model")
    path = tmp_path / "results" / "bench.json"
    arguments = ["bench", str(folder), "--scheme", "int4", "--concurrency", "2", "--kv-cache-memory", "16MiB"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "tokens/s" in result.output
    assert [figure["what"] for figure in json.loads(path.read_text())["figures"]] == ["prefill", "decode"] * 2
    assert [figure["kernels"] for figure in json.loads(path.read_text())["figures"]][2:] == ["torch"] * 2

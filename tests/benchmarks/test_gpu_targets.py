"""The targets of the GPU benchmark, over reports that are made up."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks import gpu_targets

Report = dict[str, Any]
STEP = {"gb": 16.0, "tflop": 0.1}


@pytest.fixture
def report() -> Report:
    """Of a GPU that reads 4 TB/s and computes 800 TFLOP/s, and meets all targets."""
    decodes = {
        "none, 1 streams": {"tokens_s_one_ahead": 260.0, "first_token_ms": 30.0, "device_ms": 3.8, "work": STEP},
        "none, 64 streams": {
            "tokens_s_one_ahead": 64 / 0.005, "device_ms": 4.9, "work": {"gb": 16.8, "tflop": 1.0},
        },
        "none, 256 streams": {
            "tokens_s_one_ahead": 256 / 0.01, "device_ms": 9.9, "work": {"gb": 16.0, "tflop": 6.8},
        },
        "int4, 1 streams": {"tokens_s_one_ahead": 600.0, "first_token_ms": 34.0, "device_ms": 1.6, "work": STEP},
        "int4, 64 streams": {"tokens_s_one_ahead": 64 / 0.005, "device_ms": 5.0, "work": STEP},
        "int4, 256 streams": {"tokens_s_one_ahead": 256 / 0.02, "device_ms": 20.0, "work": STEP},
    }  # fmt: skip
    looks = {
        "work_1": {"tower": {"gb": 4.0, "tflop": 0.4}, "prompt": {"gb": 12.0, "tflop": 8.0}},
        "work_8": {"tower": {"gb": 4.0, "tflop": 3.2}, "prompt": {"gb": 12.0, "tflop": 64.0}},
        "requests_s_1": 1 / 0.013, "requests_s_8": 8 / 0.1, "first_look_ms": 13.0, "second_look_ms": 1.3,
    }  # fmt: skip
    return {
        "device": "NVIDIA H200",
        "stages": {
            "bandwidth": {"copy_gb_s": 4200.0, "read_gb_s": 4000.0, "product_tflop_s": 800.0},
            "attention": {"256 x 1024": {"read_gb_s": 3300.0}},
            "decode": decodes,
            "images": {
                name: copy.deepcopy(looks)
                for name in (
                    "LLaVA-1.5-7B",
                    "LLaVA-1.5-7B, 4 bits",
                    "Qwen2.5-VL-7B",
                    "Qwen2.5-VL-7B, page",
                    "Qwen2.5-VL-7B, 4 bits",
                )
            },
            "memory": {"paged": 60, "contiguous": 100},
        },
    }


def row(report: Report, beginning: str) -> gpu_targets.Row:
    [found] = [row for row in gpu_targets.rows(report) if row.target.startswith(beginning)]
    return found


def test_all_targets_can_be_met(report: Report) -> None:
    found = gpu_targets.rows(report)
    assert [row.target for row in found if not row.met] == []
    assert len(found) == len(gpu_targets.TARGETS) > 15


@pytest.mark.parametrize(
    ("target", "place", "value"),
    [
        ("Mistral-7B, 4 bits, 1 stream", ("decode", "int4, 1 streams", "tokens_s_one_ahead"), 499),
        ("Mistral-7B, bf16, 1 stream", ("decode", "none, 1 streams", "tokens_s_one_ahead"), 254),
        ("Mistral-7B, bf16, 64 streams", ("decode", "none, 64 streams", "tokens_s_one_ahead"), 64 / 0.0054),
        ("Mistral-7B, bf16, 256 streams", ("decode", "none, 256 streams", "tokens_s_one_ahead"), 256 / 0.011),
        ("first token of 1,000, bf16", ("decode", "none, 1 streams", "first_token_ms"), 36),
        ("first token of 1,000, 4 bits", ("decode", "int4, 1 streams", "first_token_ms"), 36),
        ("decode attention", ("attention", "256 x 1024", "read_gb_s"), 3100),
        ("host's share of a decode step, 4 bits, 1 streams", ("decode", "int4, 1 streams", "device_ms"), 1.5),
        ("peak of the KV cache", ("memory", "paged"), 71),
        ("LLaVA-1.5-7B, 1 image", ("images", "LLaVA-1.5-7B", "requests_s_1"), 1 / 0.014),
        ("Qwen2.5-VL-7B, 8 images", ("images", "Qwen2.5-VL-7B", "requests_s_8"), 8 / 0.11),
        ("LLaVA-1.5-7B, second look", ("images", "LLaVA-1.5-7B", "second_look_ms"), 1.4),
        ("Qwen2.5-VL-7B, page, second look", ("images", "Qwen2.5-VL-7B, page", "second_look_ms"), 1.4),
    ],
)
def test_each_target_can_be_missed(report: Report, target: str, place: tuple[str, ...], value: float) -> None:
    *folders, name = place
    figures = report["stages"]
    for folder in folders:
        figures = figures[folder]
    figures[name] = value
    assert row(report, target).met is False


def test_shares_are_of_what_the_device_reaches(report: Report) -> None:
    assert row(report, "Mistral-7B, bf16, 1 stream").share == pytest.approx(260 * 16 / 4200)
    assert row(report, "Mistral-7B, bf16, 64").share == pytest.approx(16.8 / 4000 / 0.005), "bound by reading"
    assert row(report, "Mistral-7B, bf16, 256").share == pytest.approx(6.8 / 800 / 0.01), "bound by computing"
    assert row(report, "host's share of a decode step, bf16, 64").share == pytest.approx(0.02)
    # A tower that is bound by reading its weights, and a prompt that is bound by computing.
    assert row(report, "LLaVA-1.5-7B, 1 image").share == pytest.approx((4 / 4000 + 8 / 800) / 0.013)


def test_unknown_gpu_is_compared_with_a_copy(report: Report) -> None:
    report["device"] = "NVIDIA H100 80GB HBM3"
    report["stages"]["bandwidth"]["copy_gb_s"] = 3000.0
    for rate, met in ((160.0, True), (159.0, False)):
        report["stages"]["decode"]["none, 1 streams"]["tokens_s_one_ahead"] = rate
        assert row(report, "Mistral-7B, bf16, 1 stream").met is met


def test_what_is_missing_was_not_measured(report: Report) -> None:
    del report["stages"]["bandwidth"], report["stages"]["decode"]["int4, 64 streams"]
    report["stages"]["memory"] = {"error": "took longer than 25 s"}
    found = {row.target: row for row in gpu_targets.rows(report)}
    missing = [target for target, row in found.items() if row.met is None]
    assert len(missing) == 10
    assert all(found[target].measured == "not measured" for target in missing)
    lines = gpu_targets.table(list(found.values())).splitlines()
    assert len(lines) == 1 + len(found)
    assert len({line.index(" | ") for line in lines}) == 1
    assert [cell.strip() for cell in lines[1].split(" | ")[1:]] == ["600 tokens/s", "120%", "yes"]

"""What the compiler makes of the kernels for GPUs that need not be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from vlmserve.kernels.triton.shared_memory import RESERVED_BYTES

SECONDS = 1500
"""For a machine that is busy and has compiled nothing yet."""
pytestmark = pytest.mark.timeout(SECONDS + 60)
LEAST_SHARED_BYTES = 99 * 1024
"""Of the GPUs that the kernels are compiled for, that a program may have: an RTX 3090, 4090 or 5090, an L4 or L40S."""
ARCHITECTURES = {80: "A100", 90: "H100 and H200", 100: "B200"}

PER_WEIGHT = {"1 x": {4: 2.6, 8: 3.2, 16: 1.4}, "64 x": {4: 6.8, 8: 8.0, 16: 3.3}}
"""Instructions that a program may spend on a weight, for one row and for 64, by its bits. An H200 issues about 4.1 in
the time in which it reads a weight of 4 bits."""

PER_EXPANDED_WEIGHT = 9.0
"""Instructions that expanding a weight may take. An H200 issues about 15 in the time in which it reads 4 bits and
writes 16."""

PER_LOGIT = 7.0
"""Instructions that a greedy draw may spend on a logit."""


@pytest.fixture(scope="module")
def all_kernels() -> dict[str, dict[str, dict[str, Any]]]:
    """What came out, by architecture and case. What is interpreted here is compiled in another process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compiling", *map(str, ARCHITECTURES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    results: dict[str, dict[str, dict[str, Any]]] = json.loads(run.stdout)
    return results


@pytest.fixture(params=ARCHITECTURES)
def kernels(
    request: pytest.FixtureRequest, all_kernels: dict[str, dict[str, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """What came out for one architecture, by case."""
    return all_kernels[str(request.param)]


def test_kernels_compile_spill_nothing_and_read_wide(kernels: dict[str, dict[str, Any]]) -> None:
    assert len(kernels) >= 4
    assert {name: kernel["error"] for name, kernel in kernels.items() if "error" in kernel} == {}
    assert {name for name, kernel in kernels.items() if kernel["spilled"]} == set()
    narrow = {name for name, kernel in kernels.items() if kernel["widest_load"] < 8}
    assert narrow <= {"dividing of decodes"}, "it reads a few lengths once a step"
    products = {
        name: kernel
        for name, kernel in kernels.items()
        if name.startswith(("1 x", "64 x", "product of", "first", "second"))
    }
    attention = {name: kernel for name, kernel in kernels.items() if name.startswith("attention")}
    assert {name for name, kernel in attention.items() if kernel["widest_load"] < 16} == set()
    without = {name for name, kernel in {**products, **attention}.items() if not kernel["tensor_cores"]}
    assert {name for name in without if "float32" not in name} == set()


def test_tensor_cores_do_not_wait_for_each_other(kernels: dict[str, dict[str, Any]]) -> None:
    """Products of 64 rows by 8-bit weights have a variant without, which was not measured on a GPU."""
    serialized = {name: kernel["serialized"] for name, kernel in kernels.items() if kernel["serialized"]}
    assert set(serialized) <= {"64 x 4096 x 4096 of 8 bits", "64 x 4096 x 28672 of 8 bits"}, serialized


def test_products_spend_few_instructions_on_a_weight(kernels: dict[str, dict[str, Any]]) -> None:
    checked = 0
    for rows, budgets in PER_WEIGHT.items():
        for bits, most in budgets.items():
            ours = {
                name: kernel["per_weight"]
                for name, kernel in kernels.items()
                if name.startswith(rows) and name.endswith(f"of {bits} bits")
            }
            checked += len(ours)
            assert {name: count for name, count in ours.items() if not 0.5 < count <= most} == {}
    assert checked >= 2


def test_matmuls_load_scales_one_round_ahead(kernels: dict[str, dict[str, Any]]) -> None:
    """What is waited for within a round keeps the next weights from being fetched."""
    distances = {name: kernel["least_distance"] for name, kernel in kernels.items() if "of 4 bits" in name}
    distances = {name: distance for name, distance in distances.items() if name.startswith("1 x ")}
    assert distances
    assert {name: distance for name, distance in distances.items() if distance < 0.6} == {}


def test_tilings_know_their_shared_memory(all_kernels: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Else products fail on a GPU that has less. An H100 has one tile more on its way where four warps multiply one."""
    for arch, kernels in all_kernels.items():
        products = {name: kernel for name, kernel in kernels.items() if " x " in name}
        assert len(products) >= 2
        for name, kernel in products.items():
            least, more = kernel["tiles_bytes"]
            most = more if arch == "90" else least
            assert least <= kernel["shared"] <= most + RESERVED_BYTES, (arch, name)


def test_other_kernels_fit_the_smallest_shared_memory(kernels: dict[str, dict[str, Any]]) -> None:
    sizes = {name: kernel["shared"] for name, kernel in kernels.items() if " x " not in name}
    large = {name for name, size in sizes.items() if size > LEAST_SHARED_BYTES}
    assert large <= {"attention of images, 128 rows by 64 keys"}, "there is one by 32 keys for other GPUs"


def test_keys_are_prefetched_during_attention(kernels: dict[str, dict[str, Any]]) -> None:
    """Those of a window are one tile."""
    counts = {name: kernel["on_their_way"] for name, kernel in kernels.items() if name.startswith("attention")}
    assert counts
    assert {name for name, count in counts.items() if not count} <= {"attention of images, 64 rows by 64 keys"}


def test_dequantization_spends_few_instructions(all_kernels: dict[str, dict[str, dict[str, Any]]]) -> None:
    expanding = {name: kernel for name, kernel in all_kernels["90"].items() if name.startswith("expansion")}
    assert len(expanding) == 3
    assert {(kernel["widest_load"], kernel["widest_store"]) for kernel in expanding.values()} == {(16, 16)}
    counts = {name: kernel["per_weight"] for name, kernel in expanding.items()}
    assert {name: count for name, count in counts.items() if not 3 < count <= PER_EXPANDED_WEIGHT} == {}


def test_greedy_sampling_exchanges_nothing_among_threads(
    all_kernels: dict[str, dict[str, dict[str, Any]]],
) -> None:
    """The first loop is over a whole row, whose threads compare theirs behind it."""
    drawing = all_kernels["90"]["drawing"]
    assert drawing["widest_load"] == 16
    assert drawing["first_loop_exchanges"] == 0
    assert 3 < drawing["first_loop_per_float"] <= PER_LOGIT


def test_kernels_that_are_launched_early_wait_first(kernels: dict[str, dict[str, Any]]) -> None:
    """Nothing that a kernel before writes is read, or written, before all of them have ended."""
    early = {name: kernel["before_waiting"] for name, kernel in kernels.items() if kernel["dependent"]}
    assert {name: found for name, found in early.items() if found != []} == {}


def test_decode_kernels_support_dependent_launch(all_kernels: dict[str, dict[str, dict[str, Any]]]) -> None:
    kernels = all_kernels["90"]
    assert not any(kernel["dependent"] for kernel in all_kernels["80"].values()), "an A100 has no such launches"
    late = {name for name, kernel in kernels.items() if not kernel["dependent"]}
    images = {f"attention of images, {tile} keys" for tile in ("64 rows by 64", "128 rows by 32", "128 rows by 64")}
    states = {"delta rule", "gated norm", "short convolution", "tails"}
    states |= {f"delta chunks: {part}" for part in ("rows", "systems", "states")}
    assert late == {*images, *states, "rotation of patches", "product of bytes"}


def test_changing_numbers_are_not_specialized(kernels: dict[str, dict[str, Any]]) -> None:
    """Else a 1 among them, or a multiple of 16, would have a kernel compiled anew while requests wait."""
    changing = {"num_decodes", "num_sequences", "table_stride", "splits", "rows", "count", "slot_stride", "columns"}
    changing |= {"decodes", "extra", "column", "column_stride"}
    specialized = {name: changing & set(kernel["specialized"]) for name, kernel in kernels.items()}
    assert {name: numbers for name, numbers in specialized.items() if numbers} == {}
    assert "in_features" in kernels["1 x 4096 x 28672 of 4 bits"]["specialized"]

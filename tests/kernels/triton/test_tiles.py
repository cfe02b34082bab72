"""The search for tilings, in small through Triton's interpreter."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from benchmarks import gpu, gpu_stages, gpu_tiles
from benchmarks.gpu_stages import DECODE_TILES, TINY
from benchmarks.gpu_timing import Launch
from vlmserve.kernels.triton import products
from vlmserve.kernels.triton.attention import TritonAttention
from vlmserve.kernels.triton.products import PROGRAMS, TritonLinearKernel, tiling
from vlmserve.kernels.triton.shared_memory import RESERVED_BYTES
from vlmserve.kernels.triton.tuned import Shape, Tiling

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are not interpreted where there is a GPU"
)

CPU = torch.device("cpu")


def launched_once(calls: Sequence[Callable[[], object]], *others: object) -> Launch:
    calls[0]()
    return Launch(1e-6)


@pytest.fixture
def product() -> TritonLinearKernel:
    torch.manual_seed(0)
    return TritonLinearKernel(torch.randn(64, 256), dtype=torch.float32)


def test_fastest_correct_tiling_wins(monkeypatch: pytest.MonkeyPatch, product: TritonLinearKernel) -> None:
    wrong, large, right = Tiling(32, 8, 32, 1, 2, 3), Tiling(128, 8, 64, 1, 2, 9), Tiling(64, 8, 32, 2, 2, 3)
    monkeypatch.setattr(gpu_tiles, "candidates", lambda *_: [wrong, large, right])
    few = TritonLinearKernel.few

    def spoiled(self: TritonLinearKernel, x: torch.Tensor, residual: None, tiles: Tiling) -> torch.Tensor:
        if tiles == large:
            raise OutOfResources(2**20, 2**18, "shared memory")
        return few(self, x, residual, tiles) + (1.0 if tiles == wrong else 0.0)

    monkeypatch.setattr(TritonLinearKernel, "few", spoiled)
    times = iter([3.0, 2.0, 3.0, 3.0])
    monkeypatch.setattr(gpu_tiles, "per_launch", lambda *_: Launch(next(times)))
    result = gpu_tiles.search([product], torch.randn(1, 256), None, time.perf_counter() + 1000)
    assert result is not None
    assert (result["best"], result["microseconds"], result["rule_microseconds"]) == (right, 2e6, 3e6)
    assert list(result["failed"]) == [str(tuple(wrong)), str(tuple(large))]
    assert (result["tried"], result["untried"]) == (2, 0)
    assert gpu_tiles.search([product], torch.randn(1, 256), None, time.perf_counter()) is None


def test_timeout_keeps_tried_tilings(monkeypatch: pytest.MonkeyPatch, product: TritonLinearKernel) -> None:
    one, other = Tiling(32, 8, 32, 1, 2, 3), Tiling(64, 8, 32, 2, 2, 3)
    monkeypatch.setattr(gpu_tiles, "candidates", lambda *_: [one, other])
    deadline = time.perf_counter() + 1000
    times = iter([3.0, 2.0])

    def per_launch(*_: object) -> Launch:
        taken = next(times)
        if taken == 2.0:
            monkeypatch.setattr(time, "perf_counter", lambda: deadline + 1)
        return Launch(taken)

    monkeypatch.setattr(gpu_tiles, "per_launch", per_launch)
    result = gpu_tiles.search([product], torch.randn(1, 256), None, deadline)
    assert result is not None
    assert (result["best"], result["tried"], result["untried"]) == (one, 2, 1)


@pytest.mark.parametrize(
    ("rule", "library", "other", "expected"),
    [
        (3.0, 2.0, 4.0, "nothing"),
        (3.0, 2.0, 1.0, "the other"),
        (3.0, 2.0, 1.96, "nothing"),
        (1.0, 2.0, 3.0, "the rule"),
    ],
)
@pytest.mark.parametrize("residual", [False, True])
def test_tilings_are_measured_beside_the_library(
    monkeypatch: pytest.MonkeyPatch, rule: float, library: float, other: float, expected: str, residual: bool
) -> None:
    product = TritonLinearKernel(torch.randn(256, 256, dtype=torch.float16), dtype=torch.float16)
    x, added = torch.randn(20, 256).half(), torch.randn(20, 256).half() if residual else None
    assert not product.are_few(20)
    tiles = product.tiling(20, CPU)._replace(warps=2)
    monkeypatch.setattr(gpu_tiles, "candidates", lambda *_: [tiles])
    called = []
    for name in ("few", "many"):
        method = getattr(TritonLinearKernel, name)
        monkeypatch.setattr(TritonLinearKernel, name, lambda *args, to=method: called.append(to.__name__) or to(*args))
    times = iter([rule, library, other])

    def per_launch(calls: Sequence[Callable[[], object]], *_: object) -> Launch:
        called.clear()
        calls[0]()
        by_library.append("many" in called)
        return Launch(next(times))

    by_library: list[bool] = []
    monkeypatch.setattr(gpu_tiles, "per_launch", per_launch)
    result = gpu_tiles.search([product], x, added, time.perf_counter() + 1000)
    assert result is not None
    assert by_library == [False, True, False]
    shape = product.shape(20)
    lines = {"nothing": None, "the other": (shape, tiles), "the rule": (shape, product.tiling(20, CPU))}
    assert gpu_tiles.line(product, 20, result) == lines[expected]


@pytest.mark.parametrize("shape", [(28672, 4096), (6144, 4096), (4096, 4096), (4096, 14336)])
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_candidates_fit_the_product_and_the_gpu(shape: tuple[int, int], rows: int, bits: int) -> None:
    group = 128 if bits == 4 else 0
    rule = tiling(bits, group, *shape, rows)
    found = list(gpu_tiles.candidates(rule, Shape(bits, group, *shape, rule.tokens), rows))
    assert rule in found
    assert len(found) == len(set(found)) > 10
    if bits == 4:
        assert {tiles.inputs for tiles in found} == {128}, "a group"
        small = list(gpu_tiles.candidates(rule, Shape(bits, 32, *shape, rule.tokens), rows))
        assert {tiles.inputs for tiles in small if tiles.divides_inputs(bits)} <= {64}, "two groups"
    assert len({tiles.warps for tiles in found}) > 1
    assert len({tiles.stages for tiles in found}) > 1
    for tiles in found:
        programs = -(-shape[0] // tiles.outputs) * -(-rows // tiles.tokens) * tiles.splits
        assert programs >= 64, "most multiprocessors would have nothing to do"
        assert tiles.tokens <= max(rows, rule.tokens)


@pytest.mark.parametrize("shape", [(28672, 4096), (6144, 4096), (4096, 4096), (4096, 14336), (4096, 11008)])
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_rules_give_each_multiprocessor_several_warps(shape: tuple[int, int], rows: int, bits: int) -> None:
    tiles = tiling(bits, 128, *shape, rows)
    programs = -(-shape[0] // tiles.outputs) * -(-rows // tiles.tokens) * tiles.splits
    assert programs * tiles.warps >= (4 * PROGRAMS if rows <= 16 else 3 * PROGRAMS)
    assert rows > 16 or tiles.splits == 1, "a product is one launch"
    assert tiles.stages >= 2


def test_the_search_ends_before_the_stage_does() -> None:
    assert gpu_tiles.SECONDS["cuda"] + 10 <= gpu.LIMITS["tiles"]


def test_all_matmuls_are_searched_and_parsed_back(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(gpu_tiles, "candidates", lambda rule, *_: [rule._replace(outputs=32, warps=1)])
    monkeypatch.setattr(gpu_tiles, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(gpu_tiles, "per_launch", lambda *_: Launch(1.0))
    monkeypatch.setitem(gpu_tiles.SECONDS, "cpu", 1e6)
    report = dict(gpu_tiles.tiles(CPU, TINY, tmp_path))  # type: ignore[arg-type]
    assert report.pop("left_out") == []
    read = eval("{" + "".join(report.pop("lines")) + "}", vars(products))
    assert len(report) == 4 * 3 * 1
    assert next(iter(report)) == "gate and up, 4 bits, 1 rows", "the largest weight of the fewest bits first"
    assert all(tiles is None or isinstance(tiles, Tiling) for tiles in read.values())
    assert len(read) >= 9


def test_measured_tilings_serve_16_bit_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 256), torch.randn(3, 256)
    half, single = (TritonLinearKernel(weight.to(dtype), dtype=dtype) for dtype in (torch.float16, torch.float32))
    expected = half.few(x.half(), tiles=tiling(16, 0, 64, 256, 3))
    measured = Tiling(32, 8, 32, 2, 1, 3)
    monkeypatch.setattr(products, "tuned_tilings", lambda on: {one.shape(3): measured for one in (half, single)})
    assert half.tiling(3, CPU) == measured
    assert half.tiling(9, CPU) == tiling(16, 0, 64, 256, 9)
    assert single.tiling(3, CPU) == tiling(32, 0, 64, 256, 3, item_bytes=4)
    torch.testing.assert_close(half(x.half()), expected, atol=2e-3, rtol=2e-3)


def test_what_was_measured_says_whether_the_library_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    product = TritonLinearKernel(torch.randn(64, 256).half(), dtype=torch.float16)
    by_rule = [product.are_few(rows) for rows in (16, 17, 64, 65)]
    assert by_rule == [True, False, False, False]
    tiles = Tiling(64, 64, 64, 2, 4, 3)
    monkeypatch.setattr(products, "tuned_tilings", lambda on: {product.shape(16): None, product.shape(64): tiles})
    measured = TritonLinearKernel(torch.randn(64, 256).half(), dtype=torch.float16)
    assert [measured.are_few(rows) for rows in (8, 9, 16, 17, 33, 64)] == [True, False, False, False, True, True]
    assert not measured.are_few(65), "as many rows as were measured"
    single = TritonLinearKernel(torch.randn(64, 256), dtype=torch.float32)
    assert single.are_few(16), "in 16 bits"


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("rows", [1, 16])
def test_lone_programs_prefetch_enough_weights(bits: int, rows: int) -> None:
    """With two stages a program waits for each tile."""
    for out_features, in_features in ((4096, 4096), (4096, 14336), (3584, 18944), (2048, 8192)):
        tiles = tiling(bits, 128, out_features, in_features, rows)
        tile_bytes = tiles.outputs * tiles.inputs * tiles.parts(bits) * bits // 8
        least = products.BYTES_ON_THEIR_WAY if bits == 4 else products.BYTES_OF_ONE_PROGRAM
        assert (tiles.stages - 2) * tile_bytes >= least
    on_h100 = tiling(bits, 128, 4096, 14336, rows)
    assert on_h100.shared_bytes(bits, 2) <= 2 * products.SHARED_BYTES
    with_fewer = tiling(bits, 128, 4096, 14336, rows, multiprocessors=114)
    assert with_fewer.shared_bytes(bits, 2) <= products.SHARED_BYTES, "some have two programs"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [17, 40, 64, 100, 128])
def test_many_rows_are_read_beside_many_outputs(bits: int, rows: int) -> None:
    """Else they take more of the L2 cache's bandwidth than weights."""
    for out_features, in_features in ((28672, 4096), (6144, 4096), (4096, 4096), (4096, 14336), (3072, 2048)):
        tiles = tiling(bits, 32, out_features, in_features, rows)
        assert tiles.outputs == 128
        assert tiles.tokens == min(64 if bits == 8 else 128, next(size for size in (32, 64, 128) if rows <= size))
        assert 96 <= out_features // 128 * tiles.splits <= 2 * PROGRAMS
    assert tiling(bits, 32, 2048, 2048, 64).outputs == 64
    few = tiling(bits, 32, 576, 576, rows)
    assert (few.outputs, few.tokens, few.splits) == (32, 32, 1), "programs are worth more where there are few"


@pytest.mark.parametrize("multiprocessor", [100, 164, 228])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_rules_fit_shared_memory_of_each_gpu(multiprocessor: int, item_bytes: int) -> None:
    """In KiB: of an RTX 4090 or L40S, of an A100, and of an H100; two programs share it."""
    shared = multiprocessor * 512 - RESERVED_BYTES
    shapes = [(28672, 4096), (6144, 4096), (4096, 4096), (4096, 14336), (70, 128), (768, 3072), (151936, 2048)]
    for bits, shape, rows in itertools.product((4, 8, 8 * item_bytes), shapes, (1, 9, 20, 64, 128)):
        for group in (32, 64, 128) if bits == 4 else (0,):
            tiles = tiling(bits, group, *shape, rows, item_bytes=item_bytes, shared=shared)
            assert tiles.stages >= 2
            programs = -(-shape[0] // tiles.outputs) * tiles.splits * -(-rows // tiles.tokens)
            alone = programs <= 132 and tiles.divides_inputs(bits)
            most = 2 * shared if alone else shared
            assert tiles.shared_bytes(bits, item_bytes) <= most, (bits, group, shape, rows)


def test_decodes_are_measured_by_other_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(attention=lambda *_, cache_type: TritonAttention(cache_type=cache_type))
    monkeypatch.setattr(gpu_stages, "open_device", lambda *_, **options: (device, torch.float32))
    monkeypatch.setattr(gpu_stages, "per_launch", launched_once)
    report = dict(gpu_stages.attention(CPU, TINY, tmp_path))
    largest = f"{TINY.streams[-1]} x {TINY.contexts[-1]}"
    for kind, rule in (("", (64, 4)), (", 8 bits", (64, 2))):
        assert rule in DECODE_TILES
        names = {
            f"{largest}{kind}, {keys} keys by {warps} warps" for keys, warps in DECODE_TILES if (keys, warps) != rule
        }
        assert {name for name in report if name.startswith(f"{largest}{kind}, ") and "warps" in name} >= names
        assert all(report[name]["read_gb_s"] > 0 for name in names)
        assert f"{largest}{kind}, {rule[0]} keys by {rule[1]} warps" not in report, "it is measured by itself"

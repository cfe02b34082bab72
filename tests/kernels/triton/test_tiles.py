"""The search for tilings, in small through Triton's interpreter."""

from __future__ import annotations

import time

import pytest
import torch
from triton.runtime.errors import OutOfResources

from benchmarks import gpu_tiles
from benchmarks.gpu_stages import TINY
from vlmserve.kernels.triton import products
from vlmserve.kernels.triton.products import TritonProduct, tiling
from vlmserve.kernels.triton.tuned import Tiling

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are not interpreted where there is a GPU"
)

CPU = torch.device("cpu")


@pytest.fixture
def product() -> TritonProduct:
    torch.manual_seed(0)
    return TritonProduct(torch.randn(64, 256), dtype=torch.float32)


def test_the_fastest_of_those_that_are_right_is_found(monkeypatch: pytest.MonkeyPatch, product: TritonProduct) -> None:
    wrong, large, right = Tiling(32, 8, 32, 1, 2, 3), Tiling(128, 8, 64, 1, 2, 9), Tiling(64, 8, 32, 2, 2, 3)
    monkeypatch.setattr(gpu_tiles, "candidates", lambda *_, **__: [wrong, large, right])
    few = TritonProduct.few

    def spoiled(self: TritonProduct, x: torch.Tensor, *, tiles: Tiling) -> torch.Tensor:
        if tiles == large:
            raise OutOfResources(2**20, 2**18, "shared memory")
        return few(self, x, None, tiles) + (1.0 if tiles == wrong else 0.0)

    monkeypatch.setattr(TritonProduct, "few", spoiled)
    times = iter([3.0, 2.0, 3.0])
    monkeypatch.setattr(gpu_tiles, "per_launch", lambda *_: next(times))
    result = gpu_tiles.search(product, torch.randn(1, 256), 1, time.perf_counter() + 100)
    assert result is not None
    assert (result["best"], result["microseconds"], result["rule_microseconds"]) == (right, 2e6, 3e6)
    assert list(result["failed"]) == [str(tuple(wrong)), str(tuple(large))]
    assert gpu_tiles.search(product, torch.randn(1, 256), 1, time.perf_counter()) is None


def test_candidates_fit_the_inputs() -> None:
    rule = tiling(4, 128, 4096, 4096, 1)
    found = list(gpu_tiles.candidates(rule, 4096, keeps_inputs=True))
    assert len(found) == len(set(found)) > 15
    assert {tiles.inputs for tiles in found} == {128}
    assert {tiles.splits for tiles in gpu_tiles.candidates(rule, 512, keeps_inputs=True)} == {1}


def test_all_products_are_searched_and_lines_can_be_read_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(gpu_tiles, "candidates", lambda rule, *_, **__: [rule._replace(outputs=32, warps=1)])
    monkeypatch.setattr(gpu_tiles, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(gpu_tiles, "per_launch", lambda *_: 1.0)
    monkeypatch.setitem(gpu_tiles.SECONDS, "cpu", 1e6)
    report = gpu_tiles.tiles(CPU, TINY, tmp_path)  # type: ignore[arg-type]
    assert len(report["searched"]) == 4 * 3 * 1
    assert not report["left_out"]
    read = eval("{" + "".join(report["lines"]) + "}", vars(products))
    assert all(isinstance(tiles, Tiling) for tiles in read.values())
    assert len(read) >= 9


def test_what_was_measured_is_taken(monkeypatch: pytest.MonkeyPatch, product: TritonProduct) -> None:
    x = torch.randn(3, 256)
    expected = product.few(x, tiles=tiling(32, 0, 64, 256, 3))
    measured = Tiling(32, 8, 32, 2, 1, 3)
    monkeypatch.setattr(products, "tuned_tilings", lambda on: {product.shape(3): measured})
    assert product.tiling(3, CPU) == measured
    assert product.tiling(9, CPU) == tiling(32, 0, 64, 256, 9)
    torch.testing.assert_close(product(x), expected, atol=1e-4, rtol=1e-4)

"""What images cost by their area."""

from __future__ import annotations

import pytest

from vlmserve.image_cost import ImageCost


def test_two_images_give_the_cost_of_all():
    def macs(pixels: int) -> int:
        return 3_000 * pixels + 2 * pixels**2

    cost = ImageCost.of((1024, macs(1024)), (4096, macs(4096)), 1e-9)
    assert cost is not None
    for pixels in (1, 5_000, 12_000_000):
        assert cost.seconds(pixels) == pytest.approx(macs(pixels) * 1e-9)


@pytest.mark.parametrize("cost", [ImageCost(1e-6, 0.0), ImageCost(1e-6, 1e-11), ImageCost(1e-9, 1e-9)])
def test_area_is_the_inverse_of_time(cost: ImageCost):
    for seconds in (0.1, 5, 20, 1e6):
        pixels = cost.pixels(seconds)
        assert cost.seconds(pixels) <= seconds * (1 + 1e-9) < cost.seconds(pixels + 1) * (1 + 2e-9)


def test_one_image_size_gives_no_area_cost():
    assert ImageCost.of((1024, 500), (4096, 500), 1e-9) is None
    assert ImageCost.of((1024, 500), (1024, 900), 1e-9) is None


def test_tiles_cost_the_same_each():
    assert ImageCost.of((100, 500), (400, 2000), 1.0) == ImageCost(5.0, 0.0)

"""Images of a step are encoded once, by one rank each, and all ranks have all embeddings."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import Meeting, ThreadRanks
from vlmserve.devices.device import EagerTower
from vlmserve.runner.encoder import ImageEncoder
from vlmserve.runner.image_shares import divide
from vlmserve.steps import SchedulerOutput
from vlmserve.types import ImageInput

WIDTH = 3


@given(st.lists(st.integers(0, 1000)), st.integers(1, 5))
def test_images_are_spread_evenly_over_ranks(costs, count):
    shares = divide(costs, count)
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    loads = [sum(costs[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)
    assert shares == divide(list(costs), count)


class Tower:
    """Its embeddings say which image they are of. Notes what it encodes."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def encode(self, pixels, tilings):
        self.calls.append([int(image[0, 0, 0, 0]) for image in pixels])
        return [image[:, 0, 0, :1].repeat(1, WIDTH).to(torch.bfloat16) for image in pixels]

    def products(self, shape, tiling):
        return 10 * shape[0]


def encoder(rank: int, meeting: Meeting) -> tuple[ImageEncoder, Tower]:
    tower = Tower()
    device = SimpleNamespace(
        tower_executor=EagerTower,
        stage_products=1,
        stage_rows=1,
        torch_device=torch.device("cpu"),
        upload_pixels=lambda pixels, *_: torch.from_numpy(pixels),
    )
    model = SimpleNamespace(
        device=device, dtype=torch.bfloat16, vision=tower, cross=None, ranks=ThreadRanks(meeting, rank),
        language_model=SimpleNamespace(image_width=WIDTH),
    )  # fmt: skip
    return ImageEncoder(model), tower


@pytest.mark.parametrize("rows", [(4, 1, 2, 2), (1, 5), (3,)])
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_exchange_what_they_have_encoded(rows, count):
    images = [
        ImageInput(bytes([number]) * 32, np.full((length, 1, 1, 1), number, np.float32), length)
        for number, length in enumerate(rows)
    ]
    meeting = Meeting(count)
    ranks = [encoder(rank, meeting) for rank in range(count)]
    barrier = threading.Barrier(count)

    def run(rank: int) -> int:
        barrier.wait(60)
        return ranks[rank][0].run(SchedulerOutput(images_to_encode=images))

    with ThreadPoolExecutor(count) as threads:
        products = list(threads.map(run, range(count)))
    loads = [10 * sum(rows[image] for call in tower.calls for image in call) for _, tower in ranks]
    assert products == [max(loads)] * count
    for one, _ in ranks:
        for number, (image, length) in enumerate(zip(images, rows, strict=True)):
            expected = torch.full((length, WIDTH), number, dtype=torch.bfloat16)
            assert torch.equal(one.embeddings[image.key], expected)
    if len(rows) > 1:
        assert sorted(image for _, tower in ranks for call in tower.calls for image in call) == list(range(len(rows)))

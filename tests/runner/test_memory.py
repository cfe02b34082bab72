"""The step that is run to measure memory, and how many blocks fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import getgeneratorstate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import make_llama, make_llava, make_mistral3
from vlmserve.devices.cpu import CpuDevice
from vlmserve.errors import ConfigurationError
from vlmserve.kernels.attention import BatchMetadata
from vlmserve.kernels.torch_sampling import Filters
from vlmserve.layer_specs import CacheBytes
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.registry import load_model
from vlmserve.runner.memory import num_pages, run_largest_encoding, run_largest_step, run_longest_step

CPU = torch.device("cpu")


class Recorder(CpuDevice):
    """Notes how many rows tokens are drawn of."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.drawn: list[int] = []

    @property
    def draw(self) -> Any:
        def draw(logits: Tensor, filters: Filters, numbers: Sequence[float]) -> list[int]:
            assert {len(values) for values in (*filters, numbers)} == {len(logits)}
            self.drawn.append(len(logits))
            return CpuDevice.draw.fget(self)(logits, filters, numbers)  # type: ignore[attr-defined]

        return draw


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = make_llama(tmp_path_factory.mktemp("llama"))
    return load_model(folder, LoadSettings(device=CPU, dtype=torch.float32, kernels="torch"))


@pytest.mark.parametrize(
    ("num_tokens", "max_model_len", "lens"),
    [(50, 512, [50]), (50, 50, [50]), (50, 20, [20, 20, 10]), (41, 20, [20, 20, 1]), (3, 1, [1, 1, 1])],
)
def test_the_largest_step_has_all_tokens(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, num_tokens: int, max_model_len: int, lens: list[int]
) -> None:
    device = Recorder()
    seen: list[BatchMetadata] = []
    forward = type(model.language_model).forward

    def record(
        self: Any, embeddings: Tensor, positions: Tensor, metadata: BatchMetadata, caches: Any, states: Any
    ) -> Tensor:
        assert len(embeddings) == num_tokens
        assert int(positions.max()) < max_model_len
        assert len(set(metadata.slot_mapping[0].tolist())) == num_tokens, "each token has a slot of its own"
        seen.append(metadata)
        return forward(self, embeddings, positions, metadata, caches, states=states)

    monkeypatch.setattr(type(model.language_model), "forward", record)
    on_device = replace(model, device=device)
    run_largest_step(on_device, num_tokens=num_tokens, num_rows=4, max_model_len=max_model_len, block_size=16)
    [metadata] = seen
    assert metadata.query_lens == metadata.host_context_lens == lens
    assert device.drawn == [min(4, num_tokens)]


def test_lengths_of_the_longest_step_stay_on_device(model: LoadedModel) -> None:
    """Attention that reads them on the host would gather keys that are not there."""
    run_longest_step(model, num_tokens=64, num_seqs=3, max_model_len=512, block_size=16)


def test_no_more_blocks_than_full_contexts_fill() -> None:
    of_tokens = CacheBytes(16, 100, (None,), {None: 100})
    sizes = {"of_tokens": of_tokens, "max_model_len": 40, "max_num_seqs": 3, "max_chunk": 20}
    assert num_pages(budget=10**6, **sizes) == 3 * 3
    assert num_pages(budget=450, **sizes) == 4
    with pytest.raises(ConfigurationError, match="the KV cache has 0 bytes and a block of 16 tokens needs 100"):
        num_pages(budget=-1, **sizes)


@pytest.mark.parametrize(
    ("make", "num_tokens", "expected"),
    [
        (make_llava, 40, lambda count, side: [(1, 3, side, side)] * min(5, 40 // count)),
        (make_llava, 1, lambda count, side: [(1, 3, side, side)]),
        (make_mistral3, 64 * 9 + 70, lambda count, side: [(1, 3, 3 * side, 3 * side)]),
    ],
    ids=["tiles", "at least one", "images of any size"],
)
def test_the_largest_encoding_fills_a_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], Path],
    num_tokens: int,
    expected: Callable[[int, int], list[tuple[int, ...]]],
) -> None:
    model = load_model(make(tmp_path), LoadSettings(device=CPU, dtype=torch.float32, kernels="torch"))
    tower = model.vision
    assert tower is not None
    shapes: list[list[tuple[int, ...]]] = []
    counts: list[int] = []
    encode = type(tower).encode

    def record(self: Any, pixels: list[Tensor], tilings: Any = ()) -> list[Tensor]:
        shapes.append([tuple(image.shape) for image in pixels])
        embeddings: list[Tensor] = encode(self, pixels, tilings)
        counts.append(sum(map(len, embeddings)))
        return embeddings

    monkeypatch.setattr(type(tower), "encode", record)
    run_largest_encoding(model, num_tokens=num_tokens, num_images=5)
    assert tower.example_shape is not None
    assert shapes[0] == [tower.example_shape]
    assert shapes[1:] == [expected(counts[0], tower.example_shape[-1])]
    assert counts[1] <= max(num_tokens, counts[0])


def test_a_large_image_is_still_in_progress(tmp_path: Path) -> None:
    """The largest step runs while it keeps its memory."""
    model = load_model(make_llava(tmp_path), LoadSettings(device=CPU, dtype=torch.float32, kernels="torch"))
    model.device.stage_products = 1000
    stages = run_largest_encoding(model, num_tokens=40, num_images=5)
    assert stages is not None
    assert getgeneratorstate(stages) == "GEN_SUSPENDED"


def test_models_without_a_tower_encode_nothing(model: LoadedModel) -> None:
    run_largest_encoding(model, num_tokens=100, num_images=5)

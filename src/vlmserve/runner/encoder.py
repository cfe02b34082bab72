"""Encodes images, at once or in stages, and keeps the embeddings."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from vlmserve.cache.tiers import DiskTier
from vlmserve.devices.device import Device
from vlmserve.devices.out_of_memory import MEMORY_ERRORS, is_out_of_memory
from vlmserve.kernels.transfers import to_device
from vlmserve.layers.parallel import Ranks
from vlmserve.layers.stages import StageBudget
from vlmserve.models.protocols import LoadedModel, TileEncoder, VisionEncoder
from vlmserve.runner.adapters import RunnerAdapters
from vlmserve.runner.image_shares import divide, exchange
from vlmserve.runner.requests import ScheduledRequest
from vlmserve.steps import CrossStates, SchedulerOutput
from vlmserve.types import ImageInput, TowerInputs

logger = logging.getLogger(__name__)

WARM_UP_STAGES = 16
WARM_UP_REPEATS = 2


class ImageEncoder:
    def __init__(self, model: LoadedModel, adapters: RunnerAdapters | None = None) -> None:
        self._model = model
        self._adapters = adapters
        self._device = model.device
        self._executor = model.device.tower_executor()
        self.embeddings: dict[bytes, Tensor] = {}
        """Results of `VisionEncoder.encode` and `CrossEncoder.encode`, by key."""
        self.tier: DiskTier | None = None
        self.unfinished: dict[bytes, _Encoding] = {}

    def run(self, step: SchedulerOutput) -> int:
        """Return the tower's MACs, the maximum over ranks."""
        for key in step.embeddings_to_evict:
            if self.unfinished.pop(key, None) is None:
                self.embeddings.pop(key, None)  # missing if memory ran out
        for key, content in step.embeddings_to_place.items():
            with self._given_up(key):
                # arrays from another process are read-only
                rows = torch.from_numpy(np.array(content)).view(self._model.dtype).view(-1, self._width)
                self.embeddings[key] = to_device(rows, self._device.torch_device)
        products = self._encode(step.images_to_encode) if step.images_to_encode else 0
        for one in step.encodings:
            if one.image is not None:
                self._begin(one.image)
            # The image may finish earlier than the scheduler expects.
            if (encoding := self.unfinished.get(one.key)) is not None:
                self._use_adapter(encoding.adapter)
                with self._given_up(one.key) as given_up:
                    products += encoding.advance(math.inf if one.products is None else one.products)
                    if encoding.result is not None:
                        self._add(one.key, encoding.result)
                if encoding.result is not None or given_up:
                    del self.unfinished[one.key]
        if step.cross_states:
            self._compute_cross_states(step.cross_states)
        return products

    def _begin(self, image: ImageInput) -> None:
        self._use_adapter(image.adapter)
        with self._given_up(image.key):
            pixels = self.upload(image)
            begun = _Encoding(self._tower, pixels, image.tiling, self._device, image.adapter)
            self.unfinished[image.key] = begun

    def lacking(self, scheduled: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
        """Return requests without images or cross-attention states, because memory ran out."""
        found = []
        for request in scheduled:
            state, start = request.state, request.start
            lacks = state.cross_key is not None and state.cross_key not in self.embeddings
            if state.images and start < state.num_prompt_tokens and not lacks:
                images = state.images_between(start, request.end)
                lacks = any(
                    image.key not in self.embeddings and any(image.runs(start, request.end)) for image in images
                )
            if lacks:
                found.append(request)
        return found

    @torch.inference_mode()
    def warm_up(self) -> tuple[int, float]:
        """Encode part of a blank image, because of one-time costs.

        Returns MACs and seconds on a warm, idle device, or (0, 0.0) without example images.
        """
        if self._model.vision is None or (shape := self._model.vision.example_shape) is None:
            return 0, 0.0
        pixels = torch.zeros(shape, device=self._device.torch_device, dtype=self._model.dtype)
        wanted = WARM_UP_STAGES * self._device.stage_products
        times = []
        for _ in range(1 + WARM_UP_REPEATS):
            clock = self._device.work_clock()
            products = _Encoding(self._model.vision, pixels, None, self._device).advance(wanted)
            clock.mark()
            times += clock.seconds()
        return products, min(times[1:])

    def tiles_to_capture(self) -> Sequence[int]:
        """Numbers of tiles with a captured graph."""
        vision = self._model.vision
        if not isinstance(vision, TileEncoder) or vision.example_shape is None:
            return ()
        return self._executor.tile_counts

    @torch.inference_mode()
    def encode_tiles(self, count: int) -> None:
        vision = self._model.vision
        assert isinstance(vision, TileEncoder)
        assert vision.example_shape is not None
        shape = (count, *vision.example_shape[1:])
        with self._given_up():
            tiles = torch.zeros(shape, dtype=self._model.dtype, device=self._device.torch_device)
            self._executor.run(vision.encode_tiles, tiles)

    @property
    def _tower(self) -> VisionEncoder:
        if self._model.vision is None:
            raise ValueError("the model has no vision encoder")
        return self._model.vision

    @property
    def _width(self) -> int:
        return self._model.cross.feature_size if self._model.cross else self._model.language_model.image_width

    def upload(self, image: ImageInput) -> Tensor:
        return self._device.upload_pixels(image.pixels, self._model.dtype, image.levels)

    def _encode(self, images: list[ImageInput]) -> int:
        """One call per adapter, or sharded across ranks, which have no adapters."""
        if self._model.ranks is not None and len(images) > 1:
            return self._encode_divided(images, self._model.ranks)
        for adapter in {image.adapter: None for image in images}:
            some = [image for image in images if image.adapter == adapter]
            self._use_adapter(adapter)
            with self._given_up(*(image.key for image in some)) as too_many:
                self._encode_together(some)
            for image in some if too_many and len(some) > 1 else ():
                with self._given_up(image.key):
                    self._encode_together([image])
        return sum(map(self._products, images))

    def _encode_divided(self, images: list[ImageInput], ranks: Ranks) -> int:
        costs = [self._products(image) for image in images]
        shares = divide(costs, ranks.size)
        own = self._encoded([images[index] for index in shares[ranks.rank]])
        encoded = exchange(
            own,
            shares,
            [image.num_embeddings for image in images],
            ranks,
            width=self._width,
            dtype=self._model.dtype,
            device=self._device.torch_device,
        )
        self._keep(images, encoded)
        return max(sum(costs[index] for index in share) for share in shares)

    def _products(self, image: ImageInput) -> int:
        return self._tower.products(image.pixels.shape, image.tiling)

    def _encoded(self, images: list[ImageInput]) -> list[Tensor]:
        if not images:
            return []
        tower, tilings = self._tower, [image.tiling for image in images]
        pixels = [self.upload(image) for image in images]
        if not isinstance(tower, TileEncoder) or images[0].adapter:
            return tower.encode(pixels, tilings)
        tiles = self._executor.run(tower.encode_tiles, torch.cat(pixels))
        return tower.arranged(list(torch.split(tiles, [len(image) for image in pixels])), tilings)

    def _encode_together(self, images: list[ImageInput]) -> None:
        self._keep(images, self._encoded(images))

    def _keep(self, images: list[ImageInput], encoded: list[Tensor]) -> None:
        for image, embeddings in zip(images, encoded, strict=True):
            # a view would keep the whole batch's embeddings alive
            self._add(image.key, embeddings.clone())

    def _add(self, key: bytes, embeddings: Tensor) -> None:
        self.embeddings[key] = embeddings
        if self.tier is not None and embeddings.dtype == self._model.dtype and embeddings.shape[1:] == (self._width,):
            # Later steps do not write to these embeddings.
            on_host = embeddings.cpu().contiguous()
            self.tier.store(key, on_host.nbytes, lambda: on_host.view(torch.uint8).numpy().reshape(-1))

    @contextmanager
    def _given_up(self, *keys: bytes) -> Iterator[list[bytes]]:
        """Catch out-of-memory errors, and add the keys of images whose requests fail.

        With several ranks, raise them, because other ranks would continue.
        """
        given_up: list[bytes] = []
        try:
            yield given_up
        except MEMORY_ERRORS as error:
            if self._model.ranks is not None or not is_out_of_memory(error):
                raise
            logger.warning("Memory ran out for %d images: %s", len(keys), error)
            given_up += keys

    def _use_adapter(self, digest: bytes) -> None:
        if self._adapters is not None:
            self._adapters.use_for_all(digest)

    def _compute_cross_states(self, wanted: list[CrossStates]) -> None:
        wanted = [one for one in wanted if one.image_key in self.embeddings]
        if not wanted:
            return
        if self._model.cross is None:
            raise ValueError("the model has no cross attention")
        features = [self.embeddings[one.image_key] for one in wanted]
        with self._given_up(*(one.key for one in wanted)):
            states = self._model.cross.encode(features, [one.token_ids for one in wanted])
            self.embeddings.update(zip((one.key for one in wanted), states, strict=True))


class _Encoding:
    """An image encoded in stages. adapter: digest."""

    def __init__(
        self, tower: VisionEncoder, pixels: Tensor, tiling: TowerInputs | None, device: Device, adapter: bytes = b""
    ) -> None:
        self.adapter = adapter
        self.result: Tensor | None = None
        self._budget = StageBudget(0, least=device.stage_products, rows=device.stage_rows)
        self._stages = tower.in_stages([pixels], [tiling], self._budget)

    def advance(self, products: float) -> int:
        """Compute up to `products` MACs, and return the MACs computed. A rest too small for a stage is kept."""
        self._budget.left += products
        before = self._budget.made
        try:
            next(self._stages)
        except StopIteration as end:
            [embeddings] = end.value
            self.result = embeddings.clone()
        return self._budget.made - before

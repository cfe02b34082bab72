"""Steps of decodes that are recorded once and repeated over the same memory."""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from vlmserve.devices.device import EagerExecutor, LayerExecutor, LayerStack
from vlmserve.kernels.attention import LayerCache
from vlmserve.layers.attention import StepContext

logger = logging.getLogger(__name__)

MOST_ROWS = 512
"""Larger batches of decodes are not captured: what launches cost is little beside what they compute."""
MOST_TILES = 16
"""More tiles of images go through a tower call by call."""
MOST_GRAPHS = 96
"""Captured steps that are kept; those that were used last."""


def captured_rows(count: int) -> int:
    """To how many rows a batch of so many decodes is padded: 1, 2, 4, 8 or a multiple of 16."""
    if count > MOST_ROWS:
        return count
    return next((size for size in (1, 2, 4, 8) if count <= size), -(-count // 16) * 16)


@runtime_checkable
class CapturablePlan(Protocol):
    """A plan of an attention backend that reads all lengths on the device.

    capture_key: what a step depends on beside the addresses and shapes of its tensors; None: it cannot be captured.
    """

    @property
    def capture_key(self) -> Hashable: ...


Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""From a function to one that repeats it over the same memory, to the same result's memory."""


def repeat_by_calls(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A `Capture` for devices without graphs: the function is called again."""
    result = torch.empty(0)

    def again() -> Tensor:
        nonlocal result
        output = run()
        if result.shape != output.shape:
            result = torch.empty_like(output)
        return result.copy_(output)

    return again


class _Graph(NamedTuple):
    """x: where the next step's input goes. step: kept, since its memory is what the graph reads."""

    x: Tensor
    step: StepContext
    repeat: Callable[[], Tensor]


class GraphExecutor:
    """Captures the layers of a step of decodes the second time that it comes, and repeats it from then on. A
    `LayerExecutor`.

    A step is the same if all that it reads has the same shapes and addresses. Steps with prompts, with factors of
    queries, with cross-attention or with adapters run layer by layer.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()

    @property
    def num_captured(self) -> int:
        """Graphs that are kept."""
        return sum(graph is not None for graph in self._graphs.values())

    def run(self, layers: LayerStack, x: Tensor, caches: Sequence[LayerCache], step: StepContext) -> Tensor:
        """See `LayerExecutor.run`. The result is valid until the next step."""
        key = _key(x, caches, step)
        if key is None:
            return layers(x, caches, step)
        if key not in self._graphs:
            self._remember(key, None)
            return layers(x, caches, step)
        graph = self._graphs[key]
        if graph is None:
            own = x.clone()
            repeat = self._capture(lambda: layers(own, caches, _afresh(step)))
            graph = _Graph(own, step, repeat)
            logger.debug("captured a step of %d decodes", len(x))
        self._remember(key, graph)
        graph.x.copy_(x)
        return graph.repeat()

    def for_part(self) -> LayerExecutor:
        """See `LayerExecutor.for_part`. Steps with images are not repeated."""
        return EagerExecutor()

    def _remember(self, key: Hashable, graph: _Graph | None) -> None:
        self._graphs[key] = graph
        self._graphs.move_to_end(key)
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)


class TileGraphs:
    """Captures a tower over 1, 2, 4, 8 and 16 tiles, each the second time that it is wanted. A `TileExecutor`.

    Any number up to `MOST_TILES` is made of these, so that nothing is computed for nobody. More go through the tower
    call by call, since they have the device computing for longer than the host takes for that.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._graphs: dict[Hashable, tuple[Tensor, Callable[[], Tensor]] | None] = {}

    @property
    def num_captured(self) -> int:
        """Graphs that are kept."""
        return sum(graph is not None for graph in self._graphs.values())

    def run(self, encode: Callable[[Tensor], Tensor], tiles: Tensor) -> Tensor:
        """See `TileExecutor.run`."""
        if not 0 < len(tiles) <= MOST_TILES:
            return encode(tiles)
        parts: list[Tensor] = []
        done = 0
        while done < len(tiles):
            count = 1 << ((len(tiles) - done).bit_length() - 1)
            parts.append(self._run(encode, tiles[done : done + count]))
            done += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, encode: Callable[[Tensor], Tensor], tiles: Tensor) -> Tensor:
        key = tiles.shape, tiles.dtype
        if key not in self._graphs:
            self._graphs[key] = None
            return encode(tiles)
        graph = self._graphs[key]
        if graph is None:
            own = tiles.clone()
            graph = self._graphs[key] = own, self._capture(lambda: encode(own))
            logger.debug("captured the vision tower over %d tiles", len(tiles))
        own, repeat = graph
        own.copy_(tiles)
        # A copy: graphs share their memory.
        return repeat().clone()


def _key(x: Tensor, caches: Sequence[LayerCache], step: StepContext) -> Hashable:
    plan_key = step.plan.capture_key if isinstance(step.plan, CapturablePlan) else None
    if plan_key is None or step.query_scale is not None or step.metadata.cross or step.adapters or len(x) > MOST_ROWS:
        return None
    metadata = step.metadata
    tensors = [metadata.query_starts, metadata.context_lens, metadata.block_tables, metadata.slot_mapping]
    tensors += [tensor for rope in step.ropes for tensor in rope.sources]
    tensors.append(caches[0].keys)
    return plan_key, x.shape, tuple((tensor.data_ptr(), tensor.shape) for tensor in tensors)


def _afresh(step: StepContext) -> StepContext:
    """The step, with nothing computed of it yet: what layers share is part of what is captured."""
    return dataclasses.replace(step, ropes=[rope.afresh() for rope in step.ropes])

"""CUDA graphs of small steps: captured once, replayed over the same memory."""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from vlmserve.devices.device import CaptureTime, EagerExecutor, LayerExecutor, LayerStack
from vlmserve.devices.out_of_memory import MEMORY_ERRORS, is_out_of_memory
from vlmserve.kernels.adapters import AdapterRows
from vlmserve.kernels.attention import LayerCache
from vlmserve.layer_specs import PADDING_SLOT
from vlmserve.layers.step import StepContext

logger = logging.getLogger(__name__)

MOST_ROWS = 512
"""Larger batches of decodes are not captured: launches take little of their time."""
MOST_CHUNK_ROWS = 1024
"""Larger prompt chunks are not captured: the GPU computes longer than the host launches a 7B model's layers."""
MOST_MIXED_ROWS = 512
"""The same for steps with both chunks and decodes, whose shapes vary more."""
ROWS_OF_SMALL_CHUNKS, ROWS_OF_A_STEP = 128, 64
"""Chunks up to this size are padded to a power of two, larger ones to a multiple."""
MOST_TILES = 16
"""More image tiles go through a tower call by call."""
MOST_GRAPHS, MOST_GRAPH_ROWS = 96, 32768
"""Captured steps to keep by last use, and the sum of their rows, each with an input and a result."""


def captured_rows(num_rows: int, num_decodes: int) -> int | None:
    """Rows to pad a step to; None: do not capture it.

    Decodes are padded to 1, 2, 4, 8 or a multiple of 16; other steps to a power of two or a multiple of 64.
    """
    if num_decodes == num_rows:
        return _padded(num_rows, 1) if num_rows <= MOST_ROWS else None
    if num_rows > (MOST_MIXED_ROWS if num_decodes else MOST_CHUNK_ROWS):
        return None
    if num_rows <= ROWS_OF_SMALL_CHUNKS:
        return max(8, 1 << (num_rows - 1).bit_length())
    return -(-num_rows // ROWS_OF_A_STEP) * ROWS_OF_A_STEP


def captured_decodes(most: int) -> list[int]:
    """Padded sizes, in descending order."""
    sizes = {captured_rows(count, count) for count in range(1, most + 1)}
    return sorted((size for size in sizes if size is not None), reverse=True)


def captured_sequences(num_sequences: int) -> int:
    """Padding sequences have no rows."""
    return _padded(num_sequences, 4)


def captured_width(width: int, *, is_mixed: bool) -> int:
    """Columns of block tables: a power of two, or of four with both chunks and decodes."""
    bits = (width - 1).bit_length()
    return 1 << (bits + bits % 2 if is_mixed else bits)


def _padded(count: int, least: int) -> int:
    return next((size for size in (1, 2, 4, 8) if max(count, least) <= size), -(-count // 16) * 16)


@runtime_checkable
class CapturablePlan(Protocol):
    """Reads all lengths on the device.

    capture_key: what a step depends on besides addresses and shapes; None: not capturable.
    """

    @property
    def capture_key(self) -> Hashable: ...


Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Turns a function into one that replays it, with its result in the same memory."""


class Captures:
    """Captures while memory lasts."""

    def __init__(self, capture: Capture, *, repeats: bool = False) -> None:
        self.is_on = True
        """Capture new steps. Captured steps are replayed either way."""
        self.repeats = repeats
        """Capture repeating steps that were not captured at start, for benchmarks."""
        self.time: CaptureTime = "repeated"
        self.decodes: set[int] = set()
        """Batch sizes of decodes captured at start."""
        self._capture = capture

    def padded_rows(self, num_rows: int, num_decodes: int) -> int | None:
        if num_decodes < num_rows and not self.repeats:
            return None
        padded = captured_rows(num_rows, num_decodes)
        return padded if self.is_on or (num_decodes == num_rows and padded in self.decodes) else None

    def __call__(self, run: Callable[[], Tensor], what: str) -> Callable[[], Tensor] | None:
        """None if memory runs out, which ends all capturing. what: for the log."""
        try:
            repeat = self._capture(run)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            self.is_on = False
            logger.warning(
                "memory ran out while %s was captured as a graph: nothing more is captured, which makes steps slower; "
                "a lower --memory-fraction leaves memory for graphs", what
            )  # fmt: skip
            return None
        logger.debug("captured %s", what)
        return repeat

    @contextmanager
    def at(self, time: CaptureTime) -> Iterator[None]:
        self.time = time
        try:
            yield
        finally:
            self.time = "repeated"


class SharedInput:
    """One buffer for all captured calls of a kind."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def copy(self, x: Tensor) -> Tensor:
        """Larger inputs and other row shapes get new memory."""
        memory = self._memory
        if len(memory) < len(x) or (memory.shape[1:], memory.dtype) != (x.shape[1:], x.dtype):
            self._memory = torch.empty_like(x)
        return self._memory[: len(x)].copy_(x)


class _Graph(NamedTuple):
    x: Tensor
    step: StepContext
    repeat: Callable[[], Tensor]


class GraphExecutor:
    """Captures decode batches at start and, with `Captures.repeats`, other steps when they repeat.

    A graph fits the same shapes and addresses. Adapter slots may hold other adapters up to the reserved rank. Steps
    with query scales, cross-attention, adapters without kernels, or sizes other than `captured_rows` run layer by
    layer.
    """

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._kept: dict[Hashable, _Graph] = {}
        self._graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
        self._input = SharedInput()

    @property
    def num_captured(self) -> int:
        return len(self._kept) + sum(graph is not None for graph in self._graphs.values())

    def run(self, layers: LayerStack, x: Tensor, caches: Sequence[LayerCache], step: StepContext) -> Tensor:
        """The result is valid until the next step."""
        is_prompt = step.metadata.num_decodes < len(x)
        key = None if is_prompt and not self._captures.repeats else graph_key(x, caches, step)
        if key is None:
            return layers(x, caches, step)
        graph = self._kept.get(key) or self._repeated(key, layers, x, caches, step)
        if graph is None:
            return layers(x, caches, step)
        graph.x.copy_(x)
        return graph.repeat()

    def _repeated(
        self, key: Hashable, layers: LayerStack, x: Tensor, caches: Sequence[LayerCache], step: StepContext
    ) -> _Graph | None:
        if self._captures.time == "never":
            return None
        if self._captures.time == "first":
            graph = self._captured(layers, x, caches, step)
            if graph is not None:
                self._kept[key] = graph
                self._captures.decodes.add(len(x))
            return graph
        if not self._captures.repeats:
            return None
        graph = None
        if key in self._graphs:
            graph = self._graphs[key] or self._captured(layers, x, caches, step)
        self._remember(key, graph)
        return graph

    def for_part(self) -> LayerExecutor:
        """Steps with images are not captured."""
        return EagerExecutor()

    def _captured(
        self, layers: LayerStack, x: Tensor, caches: Sequence[LayerCache], step: StepContext
    ) -> _Graph | None:
        if not self._captures.is_on:
            return None
        own, slots, states = self._input.copy(x), step.metadata.slot_mapping, step.metadata.states
        # A capture runs the step first, on the last (padding) block and slot, so only replays change sequences.
        padding = [(slots, (len(caches[0].keys) - 1) * caches[0].block_size)]
        padding += [] if states is None else [(states.sources, PADDING_SLOT), (states.targets, PADDING_SLOT)]
        kept = [tensor.clone() for tensor, _ in padding]
        for tensor, place in padding:
            tensor.fill_(place)
        try:
            with _reserving(step.adapters):
                repeat = self._captures(lambda: layers(own, caches, _afresh(step)), f"a step of {len(x)} rows")
        finally:
            for (tensor, _), content in zip(padding, kept, strict=True):
                tensor.copy_(content)
        return None if repeat is None else _Graph(own, step, repeat)

    def _remember(self, key: Hashable, graph: _Graph | None) -> None:
        self._graphs[key] = graph
        self._graphs.move_to_end(key)
        rows = sum(len(one.x) for one in self._graphs.values() if one is not None)
        while len(self._graphs) > MOST_GRAPHS or rows > MOST_GRAPH_ROWS:
            _, last = self._graphs.popitem(last=False)
            rows -= 0 if last is None else len(last.x)


class TowerGraphs:
    """Captures 1, 2, 4, 8 and 16 tiles at start. Other numbers up to `MOST_TILES` are composed of these.

    With `Captures.repeats`, captures other numbers when they repeat.
    """

    tile_counts: Sequence[int] = tuple(1 << power for power in reversed(range(MOST_TILES.bit_length())))

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._graphs: dict[Hashable, tuple[Tensor, Callable[[], Tensor]] | None] = {}
        self._input = SharedInput()

    @property
    def num_captured(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def run(self, encode: Callable[[Tensor], Tensor], tiles: Tensor) -> Tensor:
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
        graph = self._graphs.get(key)
        if graph is None and (self._captures.time == "first" or (key in self._graphs and self._captures.repeats)):
            graph = self._captured(encode, tiles)
        self._graphs[key] = graph
        if graph is None:
            return encode(tiles)
        own, repeat = graph
        own.copy_(tiles)
        # graphs share their memory
        return repeat().clone()

    def _captured(
        self, encode: Callable[[Tensor], Tensor], tiles: Tensor
    ) -> tuple[Tensor, Callable[[], Tensor]] | None:
        if not self._captures.is_on:
            return None
        own = self._input.copy(tiles)
        repeat = self._captures(lambda: encode(own), f"the vision tower over {len(tiles)} tiles")
        return None if repeat is None else (own, repeat)


def graph_key(x: Tensor, caches: Sequence[LayerCache], step: StepContext) -> Hashable:
    """Steps with equal keys can share a graph. None: the step cannot be captured."""
    plan_key = step.plan.capture_key if isinstance(step.plan, CapturablePlan) else None
    metadata, adapters = step.metadata, step.adapters
    if plan_key is None or step.query_scale is not None or metadata.cross:
        return None
    states = metadata.states
    if states is not None and (len(states.sources) > metadata.num_decodes or states.drafts is not None):
        return None  # only the host knows where chunks are cut, and which drafts were accepted
    if adapters is not None and adapters.has_unpacked:
        return None
    if captured_rows(len(x), metadata.num_decodes) != len(x):
        return None
    # the plan's key says whether the tables' width matters
    tensors = [metadata.query_starts, metadata.context_lens, metadata.slot_mapping]
    tensors += [] if metadata.decodes is None else [metadata.decodes]
    tensors += [tensor for rope in step.ropes for tensor in rope.sources]
    tensors += [] if metadata.states is None else metadata.states.tensors
    tensors.append(caches[0].keys)
    layout: Hashable = None
    if adapters is not None:
        layout = "reserved" if adapters.fits_reserved else adapters.layout
        tensors += [adapters.rows.slots, *([] if adapters.scalings is None else [adapters.scalings])]
    places = tuple((tensor.data_ptr(), tensor.shape) for tensor in tensors)
    return plan_key, layout, x.shape, metadata.block_tables.data_ptr(), places


def _reserving(adapters: AdapterRows | None) -> AbstractContextManager[None]:
    return adapters.reserving() if adapters is not None and adapters.fits_reserved else nullcontext()


def _afresh(step: StepContext) -> StepContext:
    """Values that layers share belong into the capture."""
    return dataclasses.replace(step, ropes=[rope.afresh() for rope in step.ropes])

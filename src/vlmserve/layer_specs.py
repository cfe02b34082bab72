"""Mixers, RoPE and KV cache layout of decoder layers. Imports no torch, for the frontend."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from vlmserve.errors import ModelLoadError, UnsupportedModelError

CacheType = Literal["auto", "int8", "fp8"]
"""Type of stored keys and values: the model's, or 8 bits with scales. fp8: float8 e4m3."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of one layer. Sizes in elements."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None = None
    """Positions that a token attends to, itself included. None: all."""
    soft_cap: float | None = None
    """Scores become ``soft_cap * tanh(score / soft_cap)``."""
    sinks: tuple[float, ...] | None = None
    """Attention sinks: a score per head that takes part in the softmax."""
    shares_with: int | None = None
    """Index, among attention layers, of the layer whose keys and values this layer reads; None: its own."""
    is_causal: bool = False
    """Attend to no later tokens, even if other layers do."""
    values_are_keys: bool = False
    """Values are the projected keys, before norm and RoPE; checkpoints have no value projection."""


class StateTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    """Shape of one slot."""
    is_float32: bool
    """Whatever the model's type."""


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Gated delta rule of one layer (https://arxiv.org/abs/2412.06464). Sizes in elements."""

    num_key_heads: int
    """Heads of queries and of keys."""
    num_value_heads: int
    """Value head h reads key head ``h // (num_value_heads / num_key_heads)``."""
    key_size: int
    """Elements of a head of queries or keys."""
    value_size: int
    kernel: int
    """Width of the causal convolution over queries, keys and values."""

    @property
    def keys(self) -> int:
        return self.num_key_heads * self.key_size

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Queries, keys and values, which the convolution reads."""
        return 2 * self.keys + self.values

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        states = StateTensor("states", (self.num_value_heads, self.key_size, self.value_size), is_float32=True)
        return states, _tail(self.channels, self.kernel)

    @property
    def draft_width(self) -> int:
        """Elements that advance a state by one token: the convolution's inputs and both gates."""
        return self.channels + 2 * self.num_value_heads

    def state_bytes(self, element_size: int) -> int:
        """Bytes of one slot. element_size: bytes."""
        return _bytes(self.tensors, element_size)


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """Gated short convolution of one layer."""

    channels: int
    kernel: int
    """Width of the causal convolution."""

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        return (_tail(self.channels, self.kernel),)

    @property
    def draft_width(self) -> int:
        """Elements that advance a state by one token."""
        return self.channels

    def state_bytes(self, element_size: int) -> int:
        return _bytes(self.tensors, element_size)


PADDING_SLOT = 0
"""State slot of padding rows."""
NO_SLOT = -1
"""Source of a new state, which is zero."""
CHUNK = 64
"""Prompt tokens per chunk of the gated delta rule. Chunks end at absolute multiples, so a state does not depend on how
steps divide the prompt.
"""
MAX_STATE_DRAFTS = CHUNK // 2 - 1
"""Maximum drafts of a request for layers with states. A chunk holds accepted drafts, a token, and new drafts."""
StateSpec = DeltaSpec | ConvolutionSpec
"""A layer with a fixed-size state per sequence."""
Mixer = AttentionSpec | DeltaSpec | ConvolutionSpec
"""The part of a layer that mixes the tokens of a sequence."""


def _tail(channels: int, kernel: int) -> StateTensor:
    """The last inputs of a causal convolution, oldest first."""
    return StateTensor("tail", (kernel - 1, channels), is_float32=False)


def _bytes(tensors: Sequence[StateTensor], element_size: int) -> int:
    return sum(math.prod(tensor.shape) * (4 if tensor.is_float32 else element_size) for tensor in tensors)


class CachePlace(NamedTuple):
    column: int
    """The block table that lists its pages."""
    slot: int
    """The tensor of its pages."""


MAX_UNUSED = 0.1
"""Maximum fraction of unused page slots, over all columns."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Division of the KV cache into pages.

    A page holds a block of tokens of one layer per slot. Layers of equal windows share columns, which have a block
    table each and take pages from one pool.
    """

    windows: tuple[int | None, ...]
    """By column: positions that a token attends to, itself included; None: all. The largest comes first, so the first
    column has the longest table.
    """
    places: tuple[CachePlace, ...]
    """By layer."""

    @classmethod
    def of(cls, layers: Sequence[AttentionSpec]) -> CacheLayout:
        """Use the fewest columns that leave at most `MAX_UNUSED` of the slots unused.

        Layers of different shapes cannot share a tensor: they get one column for the largest window. A layer that reads
        another's keys has its place.
        """
        own = [(number, layer) for number, layer in enumerate(layers) if layer.shares_with is None]
        by_window: dict[int | None, list[int]] = {}
        for number, layer in sorted(own, key=lambda one: -(one[1].window or math.inf)):
            by_window.setdefault(layer.window, []).append(number)
        if len({(layer.num_kv_heads, layer.head_size) for _, layer in own}) > 1:
            widest = None if None in by_window else max(window or 0 for window in by_window)
            by_window = {widest: [number for number, _ in own]}
        counts = [len(numbers) for numbers in by_window.values()]
        sizes = [size for size in range(1, max(counts) + 1) if _unused(counts, size) <= MAX_UNUSED]
        size = min(sizes, key=lambda size: (sum(-(-count // size) for count in counts), size))
        windows: list[int | None] = []
        places: dict[int, CachePlace] = {}
        for window, numbers in by_window.items():
            for place, number in enumerate(numbers):
                places[number] = CachePlace(len(windows) + place // size, place % size)
            windows += [window] * -(-len(numbers) // size)
        sources = (number if layer.shares_with is None else layer.shares_with for number, layer in enumerate(layers))
        return cls(tuple(windows), tuple(places[source] for source in sources))

    @property
    def num_slots(self) -> int:
        return 1 + max(place.slot for place in self.places)


def _unused(counts: Sequence[int], size: int) -> float:
    slots = sum(-(-count // size) for count in counts) * size
    return 1 - sum(counts) / slots


def window_blocks(window: int, chunk: int, block_size: int) -> int:
    """Blocks for a chunk and its window, possibly unaligned."""
    return -(-(window - 1 + chunk) // block_size) + 1


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """Pages and bytes of a sequence's cache, by number of tokens."""

    block_size: int
    """Tokens of a block."""
    page: int
    """Bytes of a page."""
    windows: tuple[int | None, ...]
    """By column, see `CacheLayout`."""
    layers: Mapping[int | None, int]
    """Bytes of one block over all layers of a window."""

    @classmethod
    def of(
        cls, layers: Sequence[AttentionSpec], block_size: int, block_bytes: Callable[[AttentionSpec], int]
    ) -> CacheBytes:
        layout = CacheLayout.of(layers)
        slots: dict[int, int] = {}
        windows: dict[int | None, int] = {}
        for layer, place in zip(layers, layout.places, strict=True):
            slots[place.slot] = block_bytes(layer)
            windows[layer.window] = windows.get(layer.window, 0) + block_bytes(layer)
        return cls(block_size, sum(slots.values()), layout.windows, windows)

    @property
    def block(self) -> int:
        return self.page * len(self.windows)

    def pages(self, num_tokens: int, max_chunk: int) -> int:
        """Maximum pages while a sequence grows. max_chunk: tokens per step, besides a window."""
        blocks, size = -(-num_tokens // self.block_size), self.block_size
        return sum(
            blocks if window is None else min(blocks, window_blocks(window, max_chunk, size)) for window in self.windows
        )

    def fitting(self, num_pages: int, max_chunk: int, max_tokens: int) -> int:
        """Longest sequence in tokens for this many pages."""
        lengths = range(0, max_tokens + self.block_size, self.block_size)
        fits = bisect_right(lengths, num_pages, key=lambda length: self.pages(length, max_chunk))
        return min(max_tokens, lengths[fits - 1])

    def read(self, num_tokens: int) -> float:
        """Bytes that the newest token reads."""
        tokens = ((min(num_tokens, window or num_tokens), size) for window, size in self.layers.items())
        return sum(count * size for count, size in tokens) / self.block_size


SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "prompt_ntk": (),
    "linear": ("factor",),
    "llama3": ("low_freq_factor", "high_freq_factor", "factor"),
    "dynamic": (),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "factors": ("factors",),
    "proportional": (),
}
"""Required parameters of each RoPE scaling. "prompt_ntk" changes the base with the prompt length. "dynamic" differs
from "default" only beyond the trained context, which no request reaches. "proportional" covers whole heads, but rotates
only the first ``partial_rotary_factor`` of their pairs.
"""
FACTORS_OF_PAIRS = frozenset({"short_factor", "long_factor", "factors"})


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How positions rotate queries and keys (RoPE)."""

    size: int
    """Rotated elements of a head, from the first."""
    theta: float
    """Base of the wavelengths."""
    scaling: str = "default"
    """A key of `SCALINGS`."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the scaling, by their names in config.json."""
    max_position: int = 0
    interleaved: bool = False
    """Element ``2 i`` pairs with ``2 i + 1``, not ``i`` with ``i + size / 2``."""

    @classmethod
    def from_config(
        cls,
        head_size: int,
        theta: float,
        parameters: Mapping[str, Any],
        max_position: int,
        *,
        part: float = 1.0,
        interleaved: bool = False,
    ) -> RopeSpec:
        """Read ``rope_scaling`` or ``rope_parameters`` (Transformers 5).

        part: default fraction of a head that rotates. Raises UnsupportedModelError for an unknown scaling,
        ModelLoadError for an incomplete one.
        """
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)
        if kind not in SCALINGS:
            raise UnsupportedModelError(f"RoPE scaling {kind!r} is not supported; known are {', '.join(SCALINGS)}")
        part = parameters.get("partial_rotary_factor", part)
        size = head_size if kind == "proportional" else int(head_size * part)
        theta = parameters.get("rope_theta", theta)
        read = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        others = {"max_position_embeddings", "llama_4_scaling_beta"}  # not about rotation
        rest = {name: value for name, value in parameters.items() if name not in read | others and value is not None}
        if kind == "proportional":
            rest["partial_rotary_factor"] = part
        for name in SCALINGS[kind]:
            if name not in rest:
                raise ModelLoadError(f"config.json: RoPE scaling {kind!r} lacks {name!r}")
            if name in FACTORS_OF_PAIRS and len(rest[name]) != size // 2:
                raise ModelLoadError(f"config.json: {len(rest[name])} RoPE factors for {size // 2} pairs")
        return cls(size, theta, kind, rest, max_position, interleaved)

    @property
    def levels(self) -> int:
        """Frequency sets, by prompt length."""
        return self.level(self.max_position) + 1

    def level(self, prompt_len: int) -> int:
        """Doublings of the trained context until a prompt fits; 0 unless the base changes."""
        if self.scaling != "prompt_ntk":
            return 0
        return ((prompt_len - 1) // self.original_context).bit_length()

    @property
    def context(self) -> int:
        # Configs with linear scaling state the trained context.
        return int(self.max_position * self.parameters["factor"]) if self.scaling == "linear" else self.max_position

    @property
    def switch(self) -> int | None:
        """Longer sequences use other frequencies."""
        return self.original_context if self.scaling == "longrope" else None

    @property
    def original_context(self) -> int:
        return int(self.parameters.get("original_max_position_embeddings") or self.max_position)

    @property
    def attention_factor(self) -> float:
        if (stated := self.parameters.get("attention_factor")) is not None:
            return float(stated)
        if self.scaling == "yarn":
            mscale, mscale_all_dim = (self.parameters.get(name) for name in ("mscale", "mscale_all_dim"))
            if mscale and mscale_all_dim:
                return _yarn_scale(self.factor, mscale) / _yarn_scale(self.factor, mscale_all_dim)
            return _yarn_scale(self.factor, 1.0)
        if self.scaling == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))
        return 1.0

    @property
    def factor(self) -> float:
        return float(self.parameters.get("factor") or self.max_position / self.original_context)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

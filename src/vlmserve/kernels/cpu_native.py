"""Linears with packed weights, norms and vision tower attention by the native CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vlmserve.kernels.adapters import Change, LinearAdapters
from vlmserve.kernels.cpu_adapters import TILE, NativeChange
from vlmserve.kernels.cpu_program import Recorded
from vlmserve.kernels.cpu_record import LINEAR, NORM
from vlmserve.kernels.extension import DTYPES, extension
from vlmserve.kernels.gguf_weight import GGUFWeight
from vlmserve.kernels.isas import GROUP
from vlmserve.kernels.operations import NormedHeads
from vlmserve.kernels.pages import allocate
from vlmserve.kernels.quantized import QuantizedWeight, usual_input_bits

ACTIVATIONS = {
    "silu": 1,
    "swish": 1,
    "gelu": 2,
    "gelu_new": 3,
    "gelu_pytorch_tanh": 3,
    "quick_gelu": 4,
    "relu": 5,
}
"""Fused activations, by their Hugging Face names."""


_SUPERBLOCKS, _CODED_GROUPS = 1, 2
"""Values of `bits` for superblocks and for groups of 4-bit codes. A superblock tile stores its own bits."""
_TILE_ALIGNMENT = 64
"""Alignment of superblock tiles in bytes."""


def can_pack(in_features: int, dtype: torch.dtype) -> bool:
    """bfloat16 inputs come in pairs."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and in_features % 2 == 0)


class PackedLinear:
    """A packed weight ``[out_features, in_features]`` with its epilogue.

    dtype: of inputs and outputs (default: a plain weight's). gated: the first half are gates, the second ups. bias:
    ``[out_features]``. float_output: return float32.
    """

    change_words = 1
    __slots__ = (
        "_activation",
        "_bias",
        "_bits",
        "_dtype",
        "_gated",
        "_group_size",
        "_input_bits",
        "_linear",
        "_minimums",
        "dtype",
        "in_features",
        "out_features",
        "output_dtype",
        "output_features",
        "packed",
        "settings",
    )

    def __init__(
        self,
        weight: Tensor | QuantizedWeight | GGUFWeight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        activation: str | None = None,
        gated: bool = False,
        float_output: bool = False,
    ) -> None:
        out_features, in_features = weight.shape
        dtype = dtype or (weight.dtype if isinstance(weight, Tensor) else torch.float32)
        if not can_pack(in_features, dtype) or (gated and out_features % 2):
            raise ValueError(f"a weight {tuple(weight.shape)} of {dtype} cannot be packed")
        settings = {
            "out_features": out_features,
            "in_features": in_features,
            "dtype": DTYPES[dtype],
            "activation": 0 if activation is None else ACTIVATIONS[activation],
            "gated": int(gated),
            "float_output": int(float_output),
            **dict.fromkeys(("bits", "group_size", "input_bits", "minimums"), 0),
        }
        if isinstance(weight, QuantizedWeight):
            settings["bits"] = _CODED_GROUPS if weight.is_coded else weight.bits
            settings["input_bits"] = weight.input_bits
            settings["group_size"] = 0 if weight.has_scales_of_outputs else weight.group_size
            settings["minimums"] = int(weight.has_minimums)
        if isinstance(weight, GGUFWeight):
            settings |= _settings_of_blocks(weight)
        self._set(settings, bias)
        if isinstance(weight, GGUFWeight):
            self.packed = self._pack_blocks(weight)
        else:
            self.packed = self._pack(weight)

    @classmethod
    def restored(cls, settings: Mapping[str, int], packed: Tensor, bias: Tensor | None) -> PackedLinear:
        linear = cls.__new__(cls)
        linear._set(settings, bias)
        linear.packed = packed
        return linear

    def _set(self, settings: Mapping[str, int], bias: Tensor | None) -> None:
        self.settings = dict(settings)
        self.out_features, self.in_features = settings["out_features"], settings["in_features"]
        self._gated = settings["gated"]
        self.output_features = self.out_features // 2 if self._gated else self.out_features
        self._dtype = settings["dtype"]
        self.dtype = next(dtype for dtype, number in DTYPES.items() if number == self._dtype)
        self.output_dtype = torch.float32 if settings["float_output"] else self.dtype
        self._activation, self._bias = settings["activation"], bias
        self._bits, self._group_size = settings["bits"], settings["group_size"]
        self._input_bits, self._minimums = settings["input_bits"], settings["minimums"]
        self._linear = extension().linear

    def _pack(self, weight: Tensor | QuantizedWeight) -> Tensor:
        num_tiles = -(-self.output_features // (TILE // 2 if self._gated else TILE))
        sizes = (self.out_features, self.in_features)
        if isinstance(weight, Tensor):
            if weight.dtype != self.dtype:
                raise ValueError(f"a plain weight of {weight.dtype} does not compute in {self.dtype}")
            packed = allocate(num_tiles * TILE * self.in_features, self.dtype)
            plain = weight.contiguous()
            flags = (self._dtype, self._gated, torch.get_num_threads())
            extension().pack(plain.data_ptr(), packed.data_ptr(), *sizes, *flags)
            return packed
        if not self._group_size:
            tile_bytes = TILE * (4 + -(-self.in_features // 4) * 4)
        else:
            of_group = 2 * (1 + self._minimums) + weight.group_size * weight.bits // 8
            tile_bytes = -(-self.in_features // weight.group_size) * TILE * of_group
        packed = allocate(num_tiles * tile_bytes, torch.uint8)
        # relative to the middle value 128
        minimums = weight.minimums if weight.bits == 4 else weight.minimums + 128 * weight.scales
        values, scales, minimums = (tensor.contiguous() for tensor in (weight.values, weight.scales, minimums))
        extension().pack_quantized(
            values.data_ptr(),
            scales.data_ptr(),
            minimums.data_ptr() if self._minimums else 0,
            packed.data_ptr(),
            *sizes,
            self._bits,
            self._group_size,
            self._gated,
            torch.get_num_threads(),
        )
        return packed

    def _pack_blocks(self, weight: GGUFWeight) -> Tensor:
        """Superblocks follow a table of tiles. Gates and ups are packed together."""
        if not (weight.is_pair if self._gated else weight.fills_tiles):
            raise ValueError(f"parts of {[len(part.blocks) for part in weight.parts]} outputs do not fill tiles")
        parts, ups = weight.parts, None
        if self._gated:
            parts, ups = parts[:1], parts[1].blocks.contiguous() if len(parts) > 1 else None
        outputs = [self.out_features] if self._gated else [len(part.blocks) for part in parts]
        features = TILE // 2 if self._gated else TILE
        tiles = [-(-count // (1 + self._gated) // features) for count in outputs]
        table = 8 * (sum(tiles) + 1) if self._bits == _SUPERBLOCKS else 0
        offset = -(-table // _TILE_ALIGNMENT) * _TILE_ALIGNMENT
        sizes = [count * TILE * part.packed_row_bytes for count, part in zip(tiles, parts, strict=True)]
        packed = allocate(offset + sum(sizes), torch.uint8)
        first_tile = 0
        for part, num_outputs, count, size in zip(parts, outputs, tiles, sizes, strict=True):
            if num_outputs != count * TILE:
                packed[offset : offset + size] = 0
            blocks = part.blocks.contiguous()
            extension().pack_blocks(
                blocks.data_ptr(),
                0 if ups is None else ups.data_ptr(),
                packed.data_ptr(),
                num_outputs,
                self.in_features,
                part.kind,
                first_tile,
                offset,
                self._gated,
                torch.get_num_threads(),
            )
            first_tile, offset = first_tile + count, offset + size
        return packed

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes

    def pack_change(self, change: Change) -> NativeChange:
        sizes = (self.out_features, self.in_features)
        return NativeChange(change, *sizes, self.dtype, gated=bool(self._gated))

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        adapters: LinearAdapters | None = None,
    ) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., output_features]``. out: contiguous memory for the output."""
        if isinstance(x, Recorded):
            return self._record(x, residual, adapters)
        shape = x.shape
        if shape[-1] != self.in_features or x.dtype != self.dtype:
            raise ValueError(f"{tuple(shape)} of {x.dtype} does not fit a weight for {self.in_features} {self.dtype}")
        if len(shape) != 2 or x.stride(1) != 1:
            x = x.reshape(-1, self.in_features).contiguous()
        rows = x.shape[0]
        output_shape = (*shape[:-1], self.output_features)
        output = torch.empty(output_shape, dtype=self.output_dtype) if out is None else out
        if output.shape != output_shape or output.dtype != self.output_dtype or not output.is_contiguous():
            raise ValueError(f"{tuple(output.shape)} of {output.dtype} cannot take {output_shape} {self.output_dtype}")
        if rows == 0:
            return output
        if residual is not None:
            if residual.shape != output.shape or residual.dtype != self.dtype:
                raise ValueError(f"a residual {tuple(residual.shape)} of {residual.dtype} is not like the output")
            residual = residual.contiguous()
        table = slots = stride = scalings = columns = 0
        if adapters is not None and adapters.active:
            _, row_slots, stride = adapters.row_slots
            table, slots = adapters.table.data_ptr(), row_slots.data_ptr()
            if adapters.scalings is not None:
                scalings, columns = adapters.scalings.data_ptr(), adapters.scalings.shape[1]
        self._linear(
            x.data_ptr(),
            self.packed.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            output.data_ptr(),
            rows,
            self.in_features,
            self.out_features,
            x.stride(0),
            self.output_features,
            self._dtype,
            self._activation,
            self._gated,
            int(self.output_dtype != self.dtype),
            torch.get_num_threads(),
            self._bits,
            self._group_size,
            self._minimums,
            self._input_bits,
            table,
            slots,
            stride,
            scalings,
            columns,
        )
        return output

    def _record(self, x: Recorded, residual: Tensor | None, adapters: LinearAdapters | None) -> Tensor:
        x.expect(self.in_features, self.dtype)
        if residual is not None:
            assert isinstance(residual, Recorded)
            residual.expect(self.output_features, self.output_dtype)
        return x.recording.add(
            LINEAR,
            x,
            self.output_features,
            residual=residual,
            weight=self.packed,
            bias=self._bias,
            in_features=self.in_features,
            out_features=self.out_features,
            activation=self._activation,
            gated=self._gated,
            weight_bits=self._bits,
            group=self._group_size,
            minimums=self._minimums,
            input_bits=self._input_bits,
            adapters=None if adapters is None else adapters.table,
        )

    def rows(self, indices: Tensor) -> Tensor:
        indices = indices.contiguous()
        output = torch.empty(len(indices), self.in_features, dtype=self.dtype)
        extension().gather(
            self.packed.data_ptr(),
            indices.data_ptr(),
            output.data_ptr(),
            len(indices),
            self.in_features,
            self._dtype,
            self._bits,
            self._group_size,
            self._minimums,
            torch.get_num_threads(),
        )
        return output


def _settings_of_blocks(weight: GGUFWeight) -> dict[str, int]:
    blocks = weight.group_blocks
    if blocks is None:
        return {"bits": _SUPERBLOCKS, "input_bits": 8}
    return {
        "bits": _CODED_GROUPS if blocks.is_coded else blocks.bits,
        "input_bits": weight.input_bits or usual_input_bits(blocks.bits, is_coded=blocks.is_coded),
        "group_size": GROUP,
        "minimums": int(blocks.minimums),
    }


class NativeNorm:
    """RMSNorm, or LayerNorm with a bias.

    weight, bias: ``[size]``, of the inputs' dtype. offset: added to the weight in float32.
    """

    __slots__ = ("_bias", "_eps", "_norm", "_size", "_weight", "dtype")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0) -> None:
        self._norm = extension().norm
        self._weight, self._bias, self._eps = weight.float() + offset, None if bias is None else bias.float(), eps
        self._size, self.dtype = len(weight), weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return self._compute(x, None)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._compute(x, residual)

    def _compute(self, x: Tensor, residual: Tensor | None) -> Tensor:
        size = self._size
        if isinstance(x, Recorded):
            x.expect(size, self.dtype)
            assert residual is None or isinstance(residual, Recorded)
            return x.recording.add(
                NORM,
                x,
                size,
                residual=residual,
                weight=self._weight,
                bias=self._bias,
                in_features=size,
                groups=1,
                centered=int(self._bias is not None),
                eps=self._eps,
            )
        for rows in (x,) if residual is None else (x, residual):
            if rows.shape != x.shape or x.shape[-1] != size or rows.dtype != self.dtype:
                raise ValueError(f"{tuple(rows.shape)} of {rows.dtype} does not fit a norm over {size} {self.dtype}")
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        output = torch.empty_like(x)
        self._norm(
            x.data_ptr(),
            self._weight.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            output.data_ptr(),
            x.numel() // size,
            1,
            size,
            size,
            0,
            self._eps,
            int(self._bias is not None),
            DTYPES[self.dtype],
            torch.get_num_threads(),
        )
        return output


class NativeHeadsNorm:
    """For heads of ``[tokens, width]``, in place."""

    __slots__ = ("_dtype", "_norm", "_parts")

    def __init__(self, parts: Sequence[NormedHeads], dtype: torch.dtype) -> None:
        self._norm = extension().norm
        self._parts, self._dtype = tuple(parts), dtype

    def __call__(self, rows: Tensor) -> None:
        for part in self._parts:
            groups, size = part.weight.shape
            if isinstance(rows, Recorded):
                rows.expect(rows.width, self._dtype, columns=True)
                rows.recording.add(
                    NORM,
                    rows,
                    rows.width,
                    in_place=True,
                    weight=part.weight,
                    bias=part.bias,
                    in_features=size,
                    first=rows.first + part.first,
                    groups=groups,
                    weight_stride=size,
                    centered=int(part.centered),
                    eps=part.eps,
                )
                continue
            if rows.dtype != self._dtype or rows.stride(1) != 1 or part.first + groups * size > rows.shape[1]:
                raise ValueError(f"{tuple(rows.shape)} of {rows.dtype} has no {groups} heads of {size} {self._dtype}")
            start = rows.data_ptr() + part.first * rows.element_size()
            self._norm(
                start,
                part.weight.data_ptr(),
                0 if part.bias is None else part.bias.data_ptr(),
                0,
                start,
                len(rows),
                groups,
                size,
                rows.stride(0),
                size,
                part.eps,
                int(part.centered),
                DTYPES[self._dtype],
                torch.get_num_threads(),
            )


def encoder_attention(qkv: Tensor, num_heads: int, queries: slice = slice(None)) -> Tensor:
    """Full attention within each image.

    qkv: ``[images, tokens, 3 * size]``, queries before keys before values; the head size must pass `can_pack`. queries:
    rows, without step. Returns ``[images, queries, size]``.
    """
    images, length, width = qkv.shape
    size = width // 3
    head_size = size // num_heads
    if 3 * num_heads * head_size != width or not can_pack(head_size, qkv.dtype):
        raise ValueError(f"{num_heads} heads of {qkv.dtype} cannot share {width} features")
    qkv = qkv.contiguous()
    first, last, step = queries.indices(length)
    if step != 1:
        raise ValueError(f"queries must be consecutive, not every {step}")
    output = torch.empty(images, max(0, last - first), size, dtype=qkv.dtype)
    if output.numel():
        extension().encoder_attention(
            qkv.data_ptr(),
            output.data_ptr(),
            images,
            length,
            num_heads,
            head_size,
            first,
            last,
            head_size**-0.5,
            DTYPES[qkv.dtype],
            torch.get_num_threads(),
        )
    return output


def rotate_heads(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries and keys of ``[rows, 3 * size]`` in place.

    cos, sin: float32 ``[rows, 1, head_size / 2]``. Element ``i`` of a head pairs with ``i + head_size / 2``.
    """
    rows, width = qkv.shape
    head_size = 2 * cos.shape[-1]
    if not qkv.is_contiguous() or cos.shape != (rows, 1, head_size // 2) or sin.shape != cos.shape:
        raise ValueError(f"{tuple(cos.shape)} of angles do not fit {tuple(qkv.shape)}")
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or width % (3 * head_size):
        raise ValueError(f"{cos.dtype} for heads of {head_size} does not fit {tuple(qkv.shape)}")
    cos, sin = cos.contiguous(), sin.contiguous()
    if rows:
        extension().rotation(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            rows,
            2 * width // (3 * head_size),
            head_size,
            width,
            DTYPES[qkv.dtype],
            torch.get_num_threads(),
        )
    return qkv

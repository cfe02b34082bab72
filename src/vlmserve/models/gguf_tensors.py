"""The tensors of a GGUF file, with our names and orders."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.families.gguf import GGUFText, Metadata
from vlmserve.gguf.config import text_family
from vlmserve.gguf.mmproj import ARCHITECTURE, Stored, checkpoint_tensors
from vlmserve.gguf_header import Header, TensorInfo, read_header
from vlmserve.kernels.gguf_weight import GGUFRows, GGUFWeight
from vlmserve.kernels.isas import GROUP_BLOCKS, SUPERBLOCK_BYTES
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.models.gguf_blocks import UNPACK
from vlmserve.models.gguf_heads import DeltaHeads
from vlmserve.models.mtp import mtp_name

Bytes = NDArray[np.uint8]

_PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXPERTS = "experts."
"""Marks tensors that hold all experts of a layer."""
_BARE = ("layer_scalar", "router.scale", "router.per_expert_scale")
_WHOLE = {
    "token_embd": "embed_tokens",
    "position_embd": "position_embeddings",
    "output_norm": "norm",
    "token_embd_norm": "norm",
    "output": "lm_head",
    "per_layer_token_embd": "per_layer.table",
    "per_layer_model_proj": "per_layer.projection",
    "per_layer_proj_norm": "per_layer.norm",
}
_OF_A_LAYER = {
    "attn_norm": "attention_norm",
    "post_attention_norm": "attention_output_norm",
    "ffn_norm": "mlp_norm",
    "post_ffw_norm": "mlp_output_norm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.router.linear",
    "ffn_gate_exps": f"mlp.{_EXPERTS}gate_proj",
    "ffn_up_exps": f"mlp.{_EXPERTS}up_proj",
    "ffn_gate_up_exps": f"mlp.{_EXPERTS}gate_up_proj",
    "ffn_down_exps": f"mlp.{_EXPERTS}down_proj",
    "ffn_gate_shexp": "mlp.shared.gate_proj",
    "ffn_up_shexp": "mlp.shared.up_proj",
    "ffn_down_shexp": "mlp.shared.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_gate",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
}
_NOT_WEIGHTS = re.compile(r"rope_freqs|rope_factors_(long|short)|blk\.\d+\.attn_rot_embd")


@dataclass(frozen=True)
class _Source:
    info: TensorInfo
    rows: NDArray[np.int64] | None = None
    """Row indices in the file, in order; None: all."""
    added: float = 0.0
    appended: tuple[_Source, ...] = ()
    """Tensors whose rows follow."""
    frames: tuple[_Source, ...] = ()
    """Tensors that are the other steps of the third axis."""
    reshaped: tuple[int, ...] | None = None
    channels_last: bool = False
    """Move the second axis to the end before reshaping."""
    columns: NDArray[np.int64] | None = None
    is_decay: bool = False
    """The file has ``-exp`` of the values."""
    place: tuple[int, int] = (0, 1)
    """Index of this part in the stored tensor, and the number of equal parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        if self.reshaped is not None:
            return self.reshaped
        if self.rows is not None:
            # A 0-D index selects one row as a tensor.
            return self.info.shape[1:] if self.rows.ndim == 0 else (len(self.rows), *self.info.shape[1:])
        count, *rest = self.info.shape
        if self.frames:
            return (count, rest[0], 1 + len(self.frames), *rest[1:])
        return (count + sum(source.shape[0] for source in self.appended), *rest)


class GGUFFile:
    """An open GGUF file, a `WeightFile`. Nothing stays mapped between reads.

    Raises like `read_header`; UnsupportedModelError for tensors or types that are not implemented; ModelLoadError for a
    truncated file.
    """

    def __init__(self, path: Path) -> None:
        self._sources = _sources_in(read_header(path), path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._sources)

    def get_tensor(self, name: str) -> Tensor:
        return _read(self._sources[name], 0, None)

    def get_slice(self, name: str) -> _Rows:
        source = self._sources[name]
        return _Rows(source.shape, functools.partial(_read, source))

    def stored(self, name: str, share: float) -> list[tuple[Path, str, float]]:
        source = self._sources[name]
        number, count = source.place
        read = (number + share) / count
        return [(part.info.path, part.info.name, read) for part in (source, *source.appended, *source.frames)]

    def quantized(self, name: str) -> QuantizedWeight | None:
        source = self._sources[name]
        parts = [_quantized(part) for part in (source, *source.appended)]
        whole = [part for part in parts if part is not None]
        return QuantizedWeight.join(whole) if len(whole) == len(parts) else None

    def blocks(self, name: str) -> GGUFWeight | None:
        source = self._sources[name]
        sources = (source, *source.appended)
        packed = SUPERBLOCK_BYTES.keys() | GROUP_BLOCKS.keys()
        if any(part.info.type not in packed or len(part.info.shape) != 2 or part.frames for part in sources):
            return None
        if source.columns is not None:
            # A block may hold columns of several heads.
            return None
        return GGUFWeight.join([GGUFWeight((GGUFRows(part.info.type, _blocks(part)),)) for part in sources])


def _quantized(source: _Source) -> QuantizedWeight | None:
    kind = UNPACK.get(_type_of(source.info).name)
    if kind is None or len(source.info.shape) != 2 or source.frames:
        return None
    bits, size, unpack = kind
    blocks = _blocks(source)
    values, scales, minimums = unpack(blocks)
    groups = source.info.shape[1] // size
    scales, minimums = scales.reshape(-1, groups), minimums.reshape(-1, groups)
    values = values.reshape(len(blocks), -1)
    if (columns := source.columns) is not None:
        if not _moves_groups(columns, size):
            return None
        values, scales, minimums = (
            values[:, columns],
            *(part[:, columns[::size] // size] for part in (scales, minimums)),
        )
    is_coded = _type_of(source.info).name == "IQ4_NL"
    return QuantizedWeight(bits, size, values, scales, minimums, is_coded=is_coded)


def _moves_groups(columns: NDArray[np.int64], size: int) -> bool:
    groups = columns.reshape(-1, size)
    return bool((groups[:, :1] % size == 0).all() and (np.diff(groups) == 1).all())


def _read(source: _Source, first: int, last: int | None) -> Tensor:
    if source.reshaped is not None:
        whole = _plain(source, 0, None)
        return (whole.movedim(1, -1) if source.channels_last else whole).reshape(source.reshaped)[first:last]
    if source.frames:
        return torch.stack([_plain(part, first, last) for part in (source, *source.frames)], 2)
    if not source.appended:
        return _plain(source, first, last)
    parts, start = [], 0
    last = source.shape[0] if last is None else last
    for part in (source, *source.appended):
        count = part.info.shape[0]
        low, high = max(first - start, 0), min(last - start, count)
        if low < high:
            parts.append(_plain(part, low, high))
        start += count
    return torch.cat(parts)


def _plain(source: _Source, first: int, last: int | None) -> Tensor:
    info = source.info
    plain = _PLAIN.get(_type_of(info).name)
    raw = _bytes(source, first, last)
    tensor = _dequantized(raw, info) if plain is None else torch.from_numpy(raw).view(plain)
    one_row = source.rows is not None and source.rows.ndim == 0
    rest = info.shape[2:] if one_row else info.shape[1:]
    tensor = tensor.view(-1, *rest) if rest else tensor.flatten()
    if source.columns is not None:
        tensor = tensor[:, source.columns]
    if source.is_decay:
        tensor = (-tensor).log()
    return tensor + source.added if source.added else tensor


def _blocks(source: _Source) -> Tensor:
    """Return uint8 ``[rows, blocks, bytes]``, mapped from the file if its order is kept."""
    mapped = _mapped(source.info)
    raw = np.asarray(mapped if source.rows is None else mapped[np.atleast_1d(source.rows)])
    return torch.from_numpy(raw).view(len(raw), -1, _type_size(source.info))


def _mapped(info: TensorInfo) -> Bytes:
    count = info.shape[0]
    return np.memmap(info.path, np.uint8, "c", offset=info.offset, shape=(count, _num_bytes(info) // count))


def _bytes(source: _Source, first: int, last: int | None) -> Bytes:
    """Copy rows of a tensor, ``[rows, bytes]``. A vector has one row per value."""
    mapped = _mapped(source.info)
    if source.rows is None:
        return np.array(mapped[first:last])
    return np.asarray(mapped[np.atleast_1d(source.rows)[first:last]])


class _Rows:
    def __init__(self, shape: tuple[int, ...], read: Callable[[int, int | None], Tensor]) -> None:
        self._shape = shape
        self._read = read

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, rows: slice) -> Tensor:
        if len(self._shape) > 1:
            return self._read(rows.start or 0, rows.stop)
        return self._read(0, None)[rows]


@functools.lru_cache(maxsize=64)
def _sources_in(header: Header, path: Path) -> dict[str, _Source]:
    return {name: source for name, source in _checked_sources(header).items() if source.info.path == path}


@functools.lru_cache(maxsize=4)
def _checked_sources(header: Header) -> dict[str, _Source]:
    """Cached, because a file is opened for each copied piece."""
    for info in header.tensors.values():
        _check(info, header)
    if header.architecture == ARCHITECTURE:
        return {name: _of_checkpoint(stored) for name, stored in checkpoint_tensors(header)}
    return dict(_sources(header, text_family(header)[1]))


def _of_checkpoint(stored: Stored) -> _Source:
    first, *others = stored.infos
    of_row = {info.shape if stored.joined == "frames" else info.shape[1:] for info in stored.infos}
    if len(of_row) > 1 or (stored.joined == "frames" and len(first.shape) != 4):
        raise ModelLoadError(f"{first.path}: {', '.join(info.name for info in stored.infos)} do not belong together")
    appended = tuple(_Source(info) for info in others)
    if stored.joined == "frames":
        return _Source(first, frames=appended)
    rows = _halves_of_pairs(first, stored.heads) if stored.heads else None
    return _Source(
        first, rows, added=stored.added, appended=appended, reshaped=stored.shape, channels_last=stored.channels_last
    )


def _sources(header: Header, architecture: GGUFText) -> Iterator[tuple[str, _Source]]:
    """Tensors by our names. Raises UnsupportedModelError for an unknown tensor."""
    num_layers = Metadata(header).num_layers
    for name, info in header.tensors.items():
        if (of_layer := re.match(r"blk\.(\d+)\.", name)) and int(of_layer[1]) > num_layers:
            continue
        path, _, kind = (name if name.endswith((".weight", ".bias")) else f"{name}.weight").rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.([\w.]+)", path)
        part = {**_OF_A_LAYER, **architecture.layer_names}.get(layer[2]) if layer else _WHOLE.get(path)
        if part is None:
            if _NOT_WEIGHTS.match(path) or (layer and int(layer[1]) == num_layers):
                continue
            raise UnsupportedModelError(
                f"{header.path}: no model of architecture {header.architecture!r} that is supported has a tensor {name}"
            )
        if part == "mlp.up_proj" and architecture.merged_gate:
            part = "mlp.gate_up_proj"
        place = f"language_model.layers.{layer[1]}.{part}" if layer else f"language_model.{part}"
        place = mtp_name(f"{place}.{kind}", num_layers).removesuffix(f".{kind}")
        if part.startswith("linear_attn."):
            own = part.removeprefix("linear_attn.")
            yield place if own in ("A_log", "dt_bias") else f"{place}.{kind}", _of_delta(header, own, info)
        elif part.endswith(("q_norm", "k_norm")) and len(info.shape) == 2:
            for head in range(info.shape[0]):
                yield f"{place}.{head}.{kind}", _Source(info, np.array(head))
        elif part.endswith(_BARE):
            yield place, _Source(info)
        elif _EXPERTS in part:
            yield from _of_experts(place, info)
        elif part == "mlp.shared_gate":
            yield f"{place}.{kind}", _Source(info, reshaped=(1, info.shape[-1]))
        elif part == "conv.conv":
            yield f"{place}.{kind}", _Source(info, reshaped=(info.shape[0], 1, *info.shape[1:]))
        elif part.endswith("norm") and kind == "weight":
            yield f"{place}.{kind}", _Source(info, added=-architecture.norm_offset)
        elif architecture.interleaved and part.endswith(("q_proj", "k_proj")):
            yield f"{place}.{kind}", _Source(info, _uninterleaved(header, info, keys=part.endswith("k_proj")))
        elif architecture.halved and Metadata(header).sections and part.endswith(("q_proj", "k_proj")):
            yield f"{place}.{kind}", _Source(info, _interleaved(header, info, keys=part.endswith("k_proj")))
        else:
            yield f"{place}.{kind}", _Source(info)


def _of_delta(header: Header, part: str, info: TensorInfo) -> _Source:
    """The source of a tensor of a gated delta rule. part: its name in the layer."""
    if part == "norm":
        return _Source(info)
    places = DeltaHeads.read(Metadata(header)).places(part, info)
    if part == "out_proj":
        return _Source(info, columns=places)
    shape = (info.shape[0], 1, *info.shape[1:]) if part == "conv1d" else None
    return _Source(info, places, reshaped=shape, is_decay=part == "A_log")


def _of_experts(place: str, info: TensorInfo) -> Iterator[tuple[str, _Source]]:
    """Split a tensor ``[experts, outputs, inputs]`` into named weights of experts."""
    if len(info.shape) != 3:
        raise ModelLoadError(f"{info.path}: {info.name} {info.shape} does not hold a matrix for each expert")
    count, size = info.shape[0], _num_bytes(info) // info.shape[0]
    before, _, name = place.rpartition(".")
    for number in range(count):
        own = info._replace(shape=info.shape[1:], offset=info.offset + number * size)
        yield f"{before}.{number}.{name}.weight", _Source(own, place=(number, count))


def _uninterleaved(header: Header, info: TensorInfo, *, keys: bool) -> NDArray[np.int64]:
    """Row order of queries or keys that moves pairs of neighbors to pairs of head halves."""
    return _halves_of_pairs(info, _num_heads(header, keys=keys))


def _interleaved(header: Header, info: TensorInfo, *, keys: bool) -> NDArray[np.int64]:
    """Row order of queries or keys that moves pairs of halves, within a head's rotated rows, to pairs of neighbors."""
    heads = _num_heads(header, keys=keys)
    _check_heads(info, heads)
    rows = np.arange(info.shape[0]).reshape(heads, -1)
    rotated = Metadata(header).get("rope.dimension_count", rows.shape[1])
    if not isinstance(rotated, int) or rotated % 2 or not 0 < rotated <= rows.shape[1]:
        raise ModelLoadError(f"{info.path}: {rotated!r} of a head's {rows.shape[1]} rows cannot be rotated in pairs")
    pairs = rows[:, :rotated].reshape(heads, 2, -1).swapaxes(1, 2).reshape(heads, -1)
    return np.concatenate((pairs, rows[:, rotated:]), 1).flatten()


def _num_heads(header: Header, *, keys: bool) -> int:
    metadata = Metadata(header)
    heads = metadata["attention.head_count"]
    return int(metadata.get("attention.head_count_kv", heads) if keys else heads)


def _halves_of_pairs(info: TensorInfo, heads: int) -> NDArray[np.int64]:
    _check_heads(info, heads)
    return np.arange(info.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).flatten()


def _check_heads(info: TensorInfo, heads: int) -> None:
    if info.shape[0] % (2 * heads):
        raise ModelLoadError(f"{info.path}: {heads} heads do not divide the {info.shape[0]} rows of {info.name}")


def _check(info: TensorInfo, header: Header) -> None:
    block, _ = _block(info)
    if not info.shape or 0 in info.shape or info.shape[-1] % block:
        raise ModelLoadError(
            f"{header.path} is broken: {info.name} {info.shape} does not consist of whole blocks of {block}"
        )
    if len(info.shape) == 1 and block > 1:
        raise UnsupportedModelError(f"{header.path}: {info.name} is a vector of type {_type_of(info).name}")
    size = header.sizes[info.path]
    if info.offset + _num_bytes(info) > size:
        raise ModelLoadError(f"{info.path} is cut off: its {size} bytes end before {info.name} does; download it again")


def _dequantized(raw: Bytes, info: TensorInfo) -> Tensor:
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(raw, _type_of(info)))


def _num_bytes(info: TensorInfo) -> int:
    block, size = _block(info)
    return math.prod(info.shape) // block * size


def _type_size(info: TensorInfo) -> int:
    return _block(info)[1]


def _block(info: TensorInfo) -> tuple[int, int]:
    from gguf import GGML_QUANT_SIZES

    return GGML_QUANT_SIZES[_type_of(info)]


def _type_of(info: TensorInfo) -> Any:
    """Raises UnsupportedModelError for a type that cannot be dequantized."""
    kind = _supported_types().get(info.type)
    if kind is None:
        from gguf import GGMLQuantizationType

        name = next((kind.name for kind in GGMLQuantizationType if kind == info.type), info.type)
        supported = ", ".join(kind.name for kind in _supported_types().values())
        raise UnsupportedModelError(f"tensor type {name} (of {info.name}) is not supported; supported are {supported}")
    return kind


@functools.cache
def _supported_types() -> dict[int, Any]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    def is_dequantized(kind: GGMLQuantizationType) -> bool:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            return False
        return True

    return {int(kind): kind for kind in GGMLQuantizationType if kind.name in _PLAIN or is_dequantized(kind)}

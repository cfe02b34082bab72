"""Estimates the memory of weights from file headers, so that a model that does not fit fails fast."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from vlmserve.errors import ModelLoadError, VLMServeError
from vlmserve.families.family import BYTES
from vlmserve.gguf.pair import language_model
from vlmserve.gguf_header import is_gguf, read_header
from vlmserve.kernels.isas import SUPERBLOCK, SUPERBLOCK_BYTES, keeps_superblocks
from vlmserve.memory import free_memory
from vlmserve.models.files import PICKLES, weight_files
from vlmserve.settings.config import EngineConfig
from vlmserve.settings.quantization import Scheme

LIBRARIES = 320 * 2**20
"""Bytes that Python, torch and the smallest caches take in an engine's process."""
SCRATCH = 24 * 2**20
"""Bytes for rows that are read and rounded."""
_REPACKED = {
    **dict.fromkeys((2, 20), 0.5625),
    **dict.fromkeys((3, 12), BYTES["int4"]),
    **dict.fromkeys((6, 8), 1.0625),
    **dict.fromkeys((7, 13, 14), 1.125),
}
"""Bytes of a repacked weight, by GGUF type.

Q4_0 and IQ4_NL become 4-bit with a scale, Q4_1 and Q4_K also with a minimum; Q5_0 and Q8_0 become 8-bit with a scale,
Q5_1, Q5_K and Q6_K 8-bit with more.
"""
_HEADS = re.compile(r"(^|\.)(lm_head|output|embed_out)\.weight$")
_TABLES = re.compile(r"(embed_tokens|token_embd|word_embeddings|wte|tok_embeddings)\.weight$")
_ROUTERS = re.compile(r"(mlp|block_sparse_moe)\.gate\.weight$|\.router\.proj\.weight$|\.ffn_gate_inp\.weight$")
"""Names of tensors that stay float32."""
_EXPERTS = re.compile(r"\.experts\.(gate_up|down)_proj$|_exps\.weight$")
"""Names of tensors that hold all experts of a layer, which are read one by one."""
_OUTSIDE = re.compile(r"vision|visual|projector|connector|image|(^|\.)(v|mm)\.|patch|position|wpe")
"""Names of tensors outside the language model, which are not quantized by default."""
_STAYS_PLAIN = re.compile(
    r"per_layer|\.mlp\.(gate|shared_expert_gate)\.weight$|block_sparse_moe\.gate\.|in_proj_[ab]\.|ssm_(alpha|beta)\."
)
"""Names of tensors that are never quantized by default: per-layer embeddings, routers, gates of delta rules."""

_UNREAD = re.compile(
    r"(^|\.)(audio_tower|embed_audio)\.|layers\.\d+\.(embed_tokens|shared_head\.head)\.|"
    r"\.nextn\.(embed_tokens|shared_head_head)\."
)
"""Names of tensors that no model reads."""

_MTP = re.compile(r"(?:^|\.)mtp\.")
_OF_MTP = re.compile(r"(.*(?:layers|blk)\.\d+\.)(?:eh_proj|nextn)\b")
"""Names of tensors that only a layer for multi-token prediction has, as layers after the decoder's. The first group is
its prefix."""
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Driver files of NVIDIA and AMD GPUs, and of GPUs in WSL."""
_LONGEST_HEADER = 100 * 10**6
"""Maximum bytes of a header in the safetensors format."""

logger = logging.getLogger(__name__)


class Stored(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int | None = None
    """Its GGUF type; None in other files."""

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def read_at_once(self) -> int:
        return self.num_weights // (self.shape[0] if _EXPERTS.search(self.name) else 1)


class Footprint(NamedTuple):
    """Bytes of memory for weights."""

    weights: int
    """The loaded weights."""
    loading: int
    """The peak while they are loaded."""


def footprint(
    folder: Path,
    scheme: Scheme,
    *,
    vision: bool = False,
    plain_bytes: int = 2,
    kernels: str = "auto",
    input_bits: int | None = None,
    drafts: bool = True,
) -> Footprint:
    """Estimate a checkpoint's memory with ``--quantize scheme``.

    vision: quantize the tower too. plain_bytes: of an unquantized weight. kernels, input_bits: see `EngineConfig`.
    drafts: also load a layer for multi-token prediction.
    Raises like `weight_files`, and ModelLoadError for a broken GGUF file.
    """
    if _is_quantized(folder) or any(path.suffix in PICKLES for path in weight_files(folder)):
        # The best guess without the files' contents.
        size = sum(path.stat().st_size for path in weight_files(folder))
        return Footprint(size, size)
    stored = (tensor for path in weight_files(folder) for tensor in _tensors(path))
    tensors = [tensor for tensor in stored if not _UNREAD.search(tensor.name)]
    tensors = tensors if drafts else _without_mtp(tensors)
    tied = not any(_HEADS.search(tensor.name) for tensor in tensors)
    superblocks = scheme == "none" and plain_bytes < 4 and input_bits != 16 and keeps_superblocks(kernels)
    kept = SUPERBLOCK_BYTES if superblocks else {}
    sizes = (_bytes_each(tensor, scheme, tied, vision, plain_bytes, kept) * tensor.num_weights for tensor in tensors)
    weights = round(sum(sizes))
    plain = [tensor.read_at_once * plain_bytes for tensor in tensors] if scheme != "none" else []
    return Footprint(weights, _peak(weights, plain))


def _without_mtp(tensors: list[Stored]) -> list[Stored]:
    prefixes = tuple({found[1] for tensor in tensors if (found := _OF_MTP.match(tensor.name)) is not None})
    return [tensor for tensor in tensors if not _MTP.search(tensor.name) and not tensor.name.startswith(prefixes)]


def _peak(weights: int, plain: list[int]) -> int:
    """Peak of quantizing, which holds a byte per weight before it packs them. The loader reads tables and heads first,
    and merges at most two of the other tensors.

    weights: bytes of loaded weights. plain: of tensors as read.
    """
    *_, third, second, largest = sorted([0, 0, 0, *plain])
    return max(weights + third, largest + second) + (SCRATCH if plain else 0)


def footprint_of(config: EngineConfig, folder: Path) -> Footprint:
    """Estimate a checkpoint's memory with the engine's settings. Raises like `footprint`."""
    quantization = config.quantization
    return footprint(
        folder,
        quantization.usual,
        vision=quantization.vision,
        plain_bytes=4 if config.dtype == "float32" else 2,
        kernels=config.kernels,
        input_bits=config.input_bits,
        drafts=_drafts(config),
    )


def _drafts(config: EngineConfig) -> bool:
    return config.measures_drafts and config.tensor_parallel_size == 1 and loads_into_main_memory(config)


def check_memory(config: EngineConfig, folder: Path) -> None:
    """Raises ModelLoadError with advice if a model does not fit into main memory."""
    if loads_into_main_memory(config):
        check_fits(config, folder, free_memory(), LIBRARIES)


def check_fits(config: EngineConfig, folder: Path, free: int, reserved: int = 0) -> None:
    """reserved: bytes that the engine takes for any model. Raises ModelLoadError. Unreadable files pass: the loader
    explains them better.
    """
    quantization = config.quantization
    if quantization.calibrates:
        return
    try:
        needed = reserved + footprint_of(config, folder).loading
    except (VLMServeError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.debug("the memory that %s needs is unknown: %r", folder, error)
        return
    if needed <= free:
        return
    said = f"{config.model} needs {_gb(needed)} of memory to load, and {_gb(free)} are free"
    schemes: tuple[Scheme, ...] = ("int8", "int4")
    if quantization.usual == "none" and not _is_quantized(folder) and language_model(folder) is None:
        for scheme in schemes:
            if (other := reserved + footprint(folder, scheme, drafts=_drafts(config)).loading) <= free:
                raise ModelLoadError(f"{said}; with --quantize {scheme} it needs {_gb(other)}")
    raise ModelLoadError(f"{said}: free some, or choose a smaller model (vlmserve doctor names those that fit)")


def loads_into_main_memory(config: EngineConfig) -> bool:
    if config.device != "auto":
        return config.device == "cpu"
    return sys.platform == "linux" and not any(Path(path).exists() for path in _GPU_FILES)


def _bytes_each(
    tensor: Stored, scheme: Scheme, tied: bool, vision: bool, plain_bytes: int, superblocks: Mapping[int, int]
) -> float:
    """superblocks: bytes by GGUF type, if kernels keep superblocks."""
    if _ROUTERS.search(tensor.name):
        return 4
    matrix = len(tensor.shape) > 1
    if scheme == "none":
        if not matrix or tensor.kind is None:
            return plain_bytes
        if tensor.kind in superblocks:
            return superblocks[tensor.kind] / SUPERBLOCK
        return _REPACKED.get(tensor.kind, plain_bytes) if plain_bytes < 4 else plain_bytes
    if not matrix or (_OUTSIDE.search(tensor.name) and not vision):
        return plain_bytes
    if _STAYS_PLAIN.search(tensor.name):
        return plain_bytes
    if _TABLES.search(tensor.name):
        return BYTES["int8"] if tied else plain_bytes
    return BYTES["int8" if _HEADS.search(tensor.name) else scheme]


def _tensors(path: Path) -> Iterator[Stored]:
    if is_gguf(path):
        for info in read_header(path).tensors.values():
            if info.path == path:
                yield Stored(info.name, info.shape, info.type)
        return
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, _LONGEST_HEADER)))
    for name, entry in header.items():
        if name != "__metadata__":
            yield Stored(name, tuple(entry["shape"]))


def _is_quantized(folder: Path) -> bool:
    path = folder / "config.json"
    if not path.is_file():
        return False
    config = json.loads(path.read_text("utf-8"))
    return any(
        part.get(key)
        for part in (config, config.get("text_config") or {})
        for key in ("quantization_config", "compression_config")
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"

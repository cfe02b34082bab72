"""Quantized checkpoints, written: the same folder with packed weights, one tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vlmserve.config import QuantizationConfig
from vlmserve.errors import ConfigurationError
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.layers.linear import Linear
from vlmserve.models.files import INDEX_NAMES, SAFETENSORS_INDEX
from vlmserve.models.registry import Description
from vlmserve.models.weights import Checkpoint, merge_as_stored, weight_names
from vlmserve.quant.compressed_tensors import describe, to_tensors
from vlmserve.quant.model import choose_layers
from vlmserve.quant.rtn import round_to_nearest

HEAD = "language_model.lm_head.weight"
WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


@dataclass(frozen=True)
class Saving:
    """Bytes of a checkpoint's tensors before and after."""

    before: int
    after: int


def save_quantized(
    folder: Path, out: Path, config: QuantizationConfig, progress: Callable[[int, int], None] = lambda done, of: None
) -> Saving:
    """Write a checkpoint with its weights rounded to few bits, in the format that `load_model` and others read.

    folder: a checkpoint in Hugging Face layout. out: a folder that is new or empty. progress: is told the tensors done
    and how many there are. Memory is taken for one file of the checkpoint at a time. Raises what `load_model` raises,
    and ConfigurationError where there is something in `out` or the checkpoint is quantized already.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"{out} must be a new or an empty folder")
    if folder.is_file():
        raise ConfigurationError(f"{folder} is a GGUF file: quantize the checkpoint that it was made of")
    description = Description.read(folder)
    if description.quantization:
        raise ConfigurationError(f"{folder} is quantized already")
    checkpoint = Checkpoint(folder, description.rename)
    bits, plain, tied = _plan(description, checkpoint, config)
    out.mkdir(parents=True, exist_ok=True)
    names = {checkpoint.canonical(key): key for keys in checkpoint.files().values() for key in keys}
    total, done, before, after = len(names), 0, 0, 0
    weight_map: dict[str, str] = {}
    for path, keys in checkpoint.files().items():
        tensors: dict[str, Tensor] = {}
        for key in keys:
            name = checkpoint.canonical(key)
            tensor = checkpoint.read(name)
            before += tensor.nbytes
            if name in bits:
                tensors |= _quantize(tensor, key, bits[name], config)
            elif not (name == HEAD and tied):
                # A copy: the file that it is a view of may be larger than memory.
                tensors[key] = tensor.clone()
            done += 1
            progress(done, total)
        target = path.with_suffix(".safetensors").name
        save_file(tensors, out / target, metadata={"format": "pt"})
        after += sum(tensor.nbytes for tensor in tensors.values())
        weight_map |= dict.fromkeys(tensors, target)
    if any((folder / name).is_file() for name in INDEX_NAMES):
        index = {"metadata": {"total_size": after}, "weight_map": weight_map}
        (out / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    layers = {name: key.removesuffix(".weight") for name, key in names.items()}
    quantized = {layers[name]: width for name, width in bits.items()}
    _write_config(description, out, quantized, [layers[name] for name in plain], config)
    for path in folder.iterdir():
        if path.is_file() and path.suffix not in WEIGHT_FILES and path.name not in (*INDEX_NAMES, "config.json"):
            shutil.copy(path, out)
    return Saving(before, after)


def _plan(
    description: Description, checkpoint: Checkpoint, config: QuantizationConfig
) -> tuple[dict[str, int], list[str], bool]:
    """Bits of the weights to quantize, which others of linear layers there are, and whether embeddings are tied."""
    with description.errors():
        spec = description.spec(checkpoint)
        model = description.build(spec, TorchReference(), dtype=torch.float32, device=torch.device("meta")).modules
    merge_as_stored(model, checkpoint.names)
    bits: dict[str, int] = {}
    for path, module, width in choose_layers(model, config):
        if width == 4 and module.in_features % config.group_size:
            raise ConfigurationError(
                f"{path} has {module.in_features} inputs, which groups of {config.group_size} do not divide: choose "
                "another group size, or 8 bits or none for this layer"
            )
        bits |= dict.fromkeys(weight_names(path, module), width)
    if not bits:
        raise ConfigurationError("--quantize none leaves nothing to quantize; choose int8 or int4")
    linear = [(path, module) for path, module in model.named_modules() if isinstance(module, Linear)]
    names = [name for path, module in linear for name in weight_names(path, module)]
    return bits, [name for name in names if name not in bits], spec.tied_embeddings


def _quantize(tensor: Tensor, key: str, bits: int, config: QuantizationConfig) -> dict[str, Tensor]:
    weight = round_to_nearest(tensor.flatten(1), bits=bits, group_size=config.group_size, symmetric=config.symmetric)
    parts = to_tensors(weight, symmetric=config.symmetric or bits == 8)
    return {key.removesuffix("weight") + part: tensor for part, tensor in parts.items()}


def _write_config(
    description: Description, out: Path, bits: dict[str, int], plain: list[str], config: QuantizationConfig
) -> None:
    by_bits = {width: [name for name in bits if bits[name] == width] for width in sorted(set(bits.values()))}
    # The most frequent kind is that of all linear layers which are not named.
    most = max(by_bits, key=lambda width: len(by_bits[width]))
    targets = {width: ["Linear"] if width == most else names for width, names in by_bits.items()}
    tables = [name for name in by_bits[most] if name.endswith("embed_tokens")]
    targets[most] = [*targets[most], *tables]
    quantization = describe(targets, plain, group_size=config.group_size, symmetric=config.symmetric)
    content = {**description.config, "quantization_config": quantization}
    (out / "config.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")

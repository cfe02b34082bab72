"""Writes quantized checkpoints, one tensor at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from vlmserve.errors import ConfigurationError
from vlmserve.gguf.pair import INDEX as PAIR_INDEX
from vlmserve.gguf.pair import language_model
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.layers.linear import Linear
from vlmserve.models.files import INDEX_NAMES, SAFETENSORS_INDEX, WEIGHT_FILES
from vlmserve.models.identity import stored_bytes, stored_tensors
from vlmserve.models.registry import Description
from vlmserve.models.weights import Checkpoint, merge_as_stored, weight_names
from vlmserve.prompt.files import EXTRA_TEMPLATES
from vlmserve.prompt.gguf import write_prompt_files
from vlmserve.quant.formats.compressed_tensors import describe, to_bytes, to_tensors
from vlmserve.quant.methods.rtn import round_to_nearest
from vlmserve.quant.model import choose_layers
from vlmserve.settings.quantization import QuantizationConfig

PUBLISHED_NAMES = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
    (".attention_norm.", ".input_layernorm."),
    (".mlp_norm.", ".post_attention_layernorm."),
)
"""Parts of tensor names of a language model here, and in most checkpoints."""
HEAD, TABLE = "language_model.lm_head.weight", "language_model.embed_tokens.weight"
TRANSFORM = "language_model.head_transform.dense.weight"
"""If present, transformers names the head like BERT."""


@dataclass(frozen=True)
class Saving:
    """Bytes of a checkpoint's tensors before and after."""

    before: int
    after: int


class QuantizedFolder:
    """A quantized copy of a checkpoint in progress, for `load_model` and other engines.

    folder: a checkpoint in Hugging Face layout, a GGUF file, or the folder of a GGUF pair, whose weights are
    dequantized first. Raises like `load_model`, and ConfigurationError for a quantized checkpoint or unfit settings.
    """

    def __init__(self, folder: Path, out: Path, config: QuantizationConfig) -> None:
        self.description = Description.read_plain(folder)
        self.checkpoint = Checkpoint(folder, self.description.rename)
        self.out = out
        self.bits, self._plain, self._tied = _plan(self.description, self.checkpoint, config)
        """`bits`: of weights to quantize, by canonical name."""
        self._gguf = language_model(folder)
        keys = [key for keys in self.checkpoint.files().values() for key in keys]
        self.names = {self.checkpoint.canonical(key): self._published(key) for key in keys}
        """Names of all tensors in the files, by canonical name."""
        self._folder, self._config = folder, config

    def rounded(self, name: str) -> dict[str, Tensor]:
        """Return the tensors to write for the tensor `name` (canonical): quantized if planned, else plain."""
        tensor = self.checkpoint.read(name)
        if name in self.bits:
            weight = round_to_nearest(
                tensor.flatten(1),
                bits=self.bits[name],
                group_size=self._config.group_size,
                symmetric=self._config.symmetric,
                zero_points=self._config.zero_points,
            )
            return self.packed(name, weight)
        if name == HEAD and self._tied:
            return {}
        # Copied, because the mapped file may exceed memory. GGUF tensors are float32.
        plain = tensor.clone() if self._gguf is None else tensor.to(self.description.dtype(self.checkpoint))
        return {self.names[name]: plain}

    def packed(self, name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        if self._config.method == "smoothquant":
            parts = to_bytes(weight)
        else:
            symmetric = self._config.symmetric or weight.bits == 8
            parts = to_tensors(weight, symmetric=symmetric, zero_points=self._config.zero_points)
        return {self.names[name].removesuffix("weight") + part: tensor for part, tensor in parts.items()}

    def write(self, file_name: str, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
        """Write a file completely or not at all. Raises ConfigurationError if the disk is full."""
        partial = self.out / f"{file_name}.partial"
        try:
            save_file(dict(tensors), partial, metadata={"format": "pt", **(about or {})})
        except (OSError, SafetensorError) as error:
            if "No space left" not in str(error):
                raise
            partial.unlink(missing_ok=True)
            raise ConfigurationError(
                f"the disk with {self.out} is full: free some of it and try again; a run that calibrates goes on where "
                "it was"
            ) from error
        os.replace(partial, self.out / file_name)

    def finish(self) -> Saving:
        """Write index and configuration after all tensors, and copy files without weights."""
        weight_map: dict[str, str] = {}
        after = 0
        for path in sorted(self.out.glob("*.safetensors")):
            for tensor in stored_tensors(path):
                weight_map[tensor.name] = path.name
                after += tensor.end - tensor.start
        if set(weight_map.values()) != {"model.safetensors"}:
            index = {"metadata": {"total_size": after}, "weight_map": weight_map}
            (self.out / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
        layers = {name: key.removesuffix(".weight") for name, key in self.names.items()}
        quantized = {layers[name]: width for name, width in self.bits.items()}
        plain = [layers[name] for name in self._plain]
        if self._tied and TABLE not in self.bits:
            # Without a tensor, other engines see the head as a linear layer.
            plain.append(f"re:.*{'predictions.decoder' if TRANSFORM in self.names else 'lm_head'}$")
        _write_config(self.description, self.out, quantized, plain, self._config)
        left_out = (*INDEX_NAMES, PAIR_INDEX, "config.json")
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.is_file() and path.suffix not in WEIGHT_FILES and path.name not in left_out:
                shutil.copy(path, self.out)
        if (templates := self._folder / EXTRA_TEMPLATES).is_dir():
            shutil.copytree(templates, self.out / EXTRA_TEMPLATES)
        if self._gguf is not None:
            write_prompt_files(self._gguf, self.out)
        return Saving(stored_bytes(self._folder), after)

    def _published(self, key: str) -> str:
        if self._gguf is None or self._gguf != self.checkpoint.folder:
            return key
        name = key
        for own, published in PUBLISHED_NAMES:
            name = name.replace(own, published)
        # Families with other names of norms or MLPs keep our names, which can also be read.
        return name if self.checkpoint.canonical(name) == key else key


def save_quantized(
    folder: Path, out: Path, config: QuantizationConfig, progress: Callable[[int, int], None] = lambda done, of: None
) -> Saving:
    """Write a checkpoint with quantized weights. Needs memory for one of the checkpoint's files.

    folder, errors: see `QuantizedFolder`. out: a new or empty folder, else ConfigurationError. progress: called with
    finished and all tensors.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"{out} must be a new or an empty folder")
    writer = QuantizedFolder(folder, out, config)
    out.mkdir(parents=True, exist_ok=True)
    done = 0
    for path, keys in writer.checkpoint.files().items():
        tensors: dict[str, Tensor] = {}
        for key in keys:
            tensors |= writer.rounded(writer.checkpoint.canonical(key))
            done += 1
            progress(done, len(writer.names))
        writer.write(path.with_suffix(".safetensors").name, tensors)
    return writer.finish()


def check_groups(model: nn.Module, config: QuantizationConfig) -> None:
    """Raises ConfigurationError for a layer whose inputs are not whole groups."""
    for path, module, width in choose_layers(model, config):
        if width == 4 and module.in_features % config.group_size:
            raise ConfigurationError(
                f"{path} has {module.in_features} inputs, which groups of {config.group_size} do not divide: add "
                f"--layers {path}=int8 (with serve: --quantize-layers)"
            )


def _plan(
    description: Description, checkpoint: Checkpoint, config: QuantizationConfig
) -> tuple[dict[str, int], list[str], bool]:
    """Return bits of weights to quantize, names of other linear weights, and whether embeddings are tied."""
    with description.errors():
        spec = description.spec(checkpoint)
        model = description.build(spec, TorchReference(), dtype=torch.float32, device=torch.device("meta")).modules
    merge_as_stored(model, checkpoint.names)
    check_groups(model, config)
    bits: dict[str, int] = {}
    for path, module, width in choose_layers(model, config):
        bits |= dict.fromkeys(weight_names(path, module), width)
    if not bits:
        raise ConfigurationError("no layer is left to quantize; give some of them int8 or int4")
    linear = [(path, module) for path, module in model.named_modules() if isinstance(module, Linear)]
    names = [name for path, module in linear for name in weight_names(path, module)]
    return bits, [name for name in names if name not in bits], spec.tied_embeddings


def _write_config(
    description: Description, out: Path, bits: dict[str, int], plain: list[str], config: QuantizationConfig
) -> None:
    by_bits = {width: [name for name in bits if bits[name] == width] for width in sorted(set(bits.values()))}
    # The most frequent kind applies to all linear layers without a name.
    most = max(by_bits, key=lambda width: len(by_bits[width]))
    targets = {width: ["Linear"] if width == most else names for width, names in by_bits.items()}
    tables = [name for name in by_bits[most] if name.endswith("embed_tokens")]
    targets[most] = [*targets[most], *tables]
    quantization = describe(
        targets,
        plain,
        group_size=config.group_size,
        symmetric=config.symmetric,
        zero_points=config.zero_points,
        rounds_inputs=config.method == "smoothquant",
    )
    content = {"architectures": [description.architecture], **description.config, "quantization_config": quantization}
    (out / "config.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")

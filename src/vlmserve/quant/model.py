"""Chooses and quantizes a model's layers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import get_args

import torch
from torch import nn

from vlmserve.devices.device import Device
from vlmserve.errors import ConfigurationError
from vlmserve.layers.linear import Linear, TiedEmbedding
from vlmserve.layers.parallel import RowParallelLinear
from vlmserve.quant.memory import expected_bytes, own_bytes
from vlmserve.quant.methods.rtn import RowRounder
from vlmserve.settings.quantization import QuantizationConfig, Scheme

logger = logging.getLogger(__name__)

BITS: dict[Scheme, int] = {"int8": 8, "int4": 4}
HEADS = ("lm_head", "embed_tokens")


class Quantizer:
    """Raises ConfigurationError for an override that matches no layer."""

    def __init__(self, model: nn.Module, config: QuantizationConfig) -> None:
        self._config = config
        self._chosen = {module: (name, bits) for name, module, bits in choose_layers(model, config)}
        self._before = sum(map(own_bytes, model.modules()))
        self._saved = 0
        self._rows: dict[nn.Module, RowRounder] = {}

    @property
    def bits(self) -> dict[str, int]:
        return dict(self._chosen.values())

    def rows(self, module: nn.Module) -> RowRounder | None:
        """Return a target for the rows of a weight while it is read, before `quantize`.

        None: `quantize` needs the whole weight, or the module stays plain.
        """
        if not isinstance(module, Linear | TiedEmbedding) or module not in self._chosen or module.weight.ndim != 2:
            return None
        if isinstance(module, RowParallelLinear) and module.ranks.size > 1:
            return None
        if module not in self._rows:
            self._rows[module] = self._rounded(module, module.device)
        return self._rows[module]

    def quantize(self, module: nn.Module) -> None:
        """Raises ConfigurationError if ranks would split a group."""
        if not isinstance(module, Linear | TiedEmbedding) or module not in self._chosen:
            return
        before = own_bytes(module)
        rows = self._rows.pop(module, None)
        if rows is None:
            rows = self._rounded(module, module.weight.device)
            # A patch embedding is a convolution.
            rows.write(0, module.weight.data.flatten(1))
        rounded = rows.weight()
        if self._config.rounds_inputs and rounded.bits == 8 and module.weight.ndim == 2:
            rounded = dataclasses.replace(rounded, input_bits=8)
        module.quantize(rounded)
        self._saved += before - own_bytes(module)

    def _rounded(self, module: Linear | TiedEmbedding, device: torch.device) -> RowRounder:
        config, (name, bits) = self._config, self._chosen[module]
        split = module if isinstance(module, RowParallelLinear) else None
        if split is not None and bits == 4:
            _check_groups(name, split, config.group_size)
        outputs, inputs = module.weight.flatten(1).shape
        return RowRounder(
            (outputs, inputs),
            bits=bits,
            group_size=config.group_size,
            symmetric=config.symmetric,
            zero_points=config.zero_points,
            largest=None if split is None else split.ranks.largest,
            device=device,
        )

    def log(self) -> None:
        widths = list(self.bits.values())
        logger.info(
            "weights: %.1f MB before quantization, %.1f MB after; %d layers have 8 bits, %d have 4",
            self._before / 1e6,
            (self._before - self._saved) / 1e6,
            widths.count(8),
            widths.count(4),
        )


def quantize(model: nn.Module, config: QuantizationConfig) -> dict[str, int]:
    """Return bits by name. Raises as `Quantizer` does."""
    quantizer = Quantizer(model, config)
    for module in model.modules():
        quantizer.quantize(module)
    quantizer.log()
    return quantizer.bits


def expected_memory(model: nn.Module, device: Device, config: QuantizationConfig | None) -> int:
    bits = {} if config is None else {name: width for name, _, width in choose_layers(model, config)}
    return expected_bytes(model, device, bits, config or QuantizationConfig())


def log_expected_memory(model: nn.Module, device: Device, config: QuantizationConfig | None) -> int:
    usual = config or QuantizationConfig()
    expected = expected_memory(model, device, config)
    others = {
        scheme: expected_memory(model, device, usual.model_copy(update={"scheme": scheme, "layers": ()}))
        for scheme in get_args(Scheme)
    }
    logger.info(
        "weights: %.1f MB are expected; %s",
        expected / 1e6,
        ", ".join(f"--quantize {scheme}: {size / 1e6:.1f} MB" for scheme, size in others.items()),
    )
    return expected


def choose_layers(model: nn.Module, config: QuantizationConfig) -> Iterator[tuple[str, Linear | TiedEmbedding, int]]:
    """Output heads keep at least 8 bits because rounding them costs most. So do patch embeddings (few weights). Raises
    ConfigurationError for an override that matches no layer."""
    overrides = config.overrides
    unused = set(overrides)
    for name, module in model.named_modules():
        if not isinstance(module, Linear | TiedEmbedding):
            continue
        fitting = [pattern for pattern in overrides if fnmatchcase(name, pattern)]
        unused -= set(fitting)
        is_usual = config.vision or name.startswith("language_model.")
        usual = config.usual if is_usual and not (isinstance(module, Linear) and module.stays_plain) else "none"
        scheme = overrides[fitting[-1]] if fitting else usual
        if scheme != "none":
            yield name, module, 8 if name.endswith(HEADS) or module.weight.ndim != 2 else BITS[scheme]
    if unused:
        raise ConfigurationError(f"no layer of this model has a name like {', '.join(sorted(unused))}")


def _check_groups(name: str, module: RowParallelLinear, group_size: int) -> None:
    if module.ranks.size > 1 and module.in_features % group_size:
        raise ConfigurationError(
            f"--tensor-parallel-size {module.ranks.size}: groups of {group_size} do not divide the "
            f"{module.in_features} inputs of {name} per rank: lower --quantize-group-size, or use int8 for this layer"
        )

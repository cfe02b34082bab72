"""Quantizes layers by statistics of their inputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.layers.linear import Linear
from vlmserve.layers.norm import LayerNorm, RMSNorm
from vlmserve.quant.grid import GridKind
from vlmserve.quant.methods import awq
from vlmserve.quant.methods.gptq import DAMPINGS, gptq
from vlmserve.quant.methods.smoothquant import smoothing_factors
from vlmserve.quant.statistics import InputStatistics, output_error
from vlmserve.settings.quantization import QuantizationConfig

logger = logging.getLogger(__name__)

ALGORITHM = 6
"""Increase it when equal model, data and settings give other weights; this invalidates cached copies."""


LEAST_ROWS = 0.125
"""Minimum rows per input that calibrate an expert."""


@dataclass(frozen=True, slots=True)
class Target:
    module: Linear
    bits: int


@dataclass(frozen=True, slots=True)
class Fold:
    """A norm or layer whose output can be divided by factors."""

    consumers: tuple[str, ...]
    """Names of all layers with that input."""
    plain: Mapping[str, Linear] = field(default_factory=dict)
    """Consumers that usually stay unquantized, by name."""
    norm: RMSNorm | LayerNorm | None = None
    """Makes the input; None: outputs ``rows[0] <= i < rows[1]`` of the layer `producer` do."""
    producer: str = ""
    rows: tuple[int, int] = (0, 0)
    heads: int = 1
    """Heads of the consumers' inputs (`awq.input_scales`)."""
    shared: int = 1
    """The producer has one head for this many consumer heads."""


@dataclass
class Outcome:
    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    """By name."""
    changed: list[nn.Module] = field(default_factory=list)
    """Norms and layers whose unquantized parameters were multiplied by factors."""
    errors: dict[str, float] = field(default_factory=dict)
    """Squared error of each layer's outputs, relative to their squares."""
    notes: list[str] = field(default_factory=list)
    """Problems, as sentences."""

    def add(self, other: Outcome) -> None:
        self.weights |= other.weights
        self.changed += other.changed
        self.errors |= other.errors
        self.notes += other.notes


class Observer:
    """row_weights: of the current batch."""

    def __init__(self, modules: Mapping[str, Linear]) -> None:
        self.row_weights: Tensor | None = None
        self.statistics = {
            name: InputStatistics(module.in_features, device=module.weight.device) for name, module in modules.items()
        }
        self._modules = modules

    @contextmanager
    def watching(self) -> Iterator[None]:
        hooks = [
            module.register_forward_pre_hook(self._hook(self.statistics[name]))
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, statistics: InputStatistics) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            weights, rows = self.row_weights, cast(Linear, module).chosen_rows
            statistics.add(inputs[0], weights if weights is None or rows is None else weights[rows])

        return add


def quantize_layers(
    targets: Mapping[str, Target],
    folds: Sequence[Fold],
    statistics: Mapping[str, InputStatistics],
    config: QuantizationConfig,
) -> Outcome:
    """Store rounded weights in their modules' dtypes; divide `statistics` by the factors in place.

    Skips folds whose layers are neither in `targets` nor plain.
    """
    outcome = Outcome()
    weights = {name: target.module.weight.data.float() for name, target in targets.items()}
    if config.method != "gptq":
        for fold in folds if "awq" in config.method else [fold for fold in folds if fold.norm is not None]:
            plain = [module for name, module in fold.plain.items() if name not in targets]
            consumers = tuple(name for name in fold.consumers if name in targets or name not in fold.plain)
            names = [*consumers, *([fold.producer] if fold.producer else [])]
            if consumers and all(name in targets and _usable(statistics[name]) for name in names):
                if any(_saw_few(targets[name], statistics[name]) for name in names):
                    continue
                factors = _scale(replace(fold, consumers=consumers), targets, weights, statistics, config, outcome)
                if factors is not None:
                    for module in plain:
                        module.weight.data.copy_(module.weight.data.float() * factors)
                        outcome.changed.append(module)
    for name, target in targets.items():
        quantized = _quantize(name, target, weights.pop(name), statistics[name], config, outcome)
        outcome.weights[name] = quantized
        target.module.weight.data.copy_(quantized.dequantize())
    return outcome


def _usable(statistics: InputStatistics) -> bool:
    return statistics.count > 0 and bool(statistics.largest.any())


def _saw_few(target: Target, statistics: InputStatistics) -> bool:
    least = target.module.in_features * LEAST_ROWS
    return target.module.chosen_rows is not None and statistics.count < least


def _scale(
    fold: Fold,
    targets: Mapping[str, Target],
    weights: dict[str, Tensor],
    statistics: Mapping[str, InputStatistics],
    config: QuantizationConfig,
    outcome: Outcome,
) -> Tensor | None:
    first = statistics[fold.consumers[0]]
    joint = torch.cat([weights[name] for name in fold.consumers])
    if config.method == "smoothquant":
        factors = smoothing_factors(first.largest, joint)
    else:
        kind = _kind(min(targets[name].bits for name in fold.consumers), config)
        factors = awq.input_scales(
            joint, first.mean_magnitude, first.hessian, kind.fit, shared=fold.shared, heads=fold.heads
        )
        if not awq.helps(joint, factors, first.hessian, kind):
            return None
    if fold.norm is not None:
        factors = _divide_norm(fold.norm, factors)
        outcome.changed.append(fold.norm)
    else:
        rows = slice(*fold.rows)
        own = factors.view(fold.heads // fold.shared, fold.shared, -1)[:, 0].flatten()
        weights[fold.producer][rows] /= own[:, None]
        producer = targets[fold.producer].module
        if producer.bias is not None:
            producer.bias.data[rows] = (producer.bias.data[rows].float() / own).to(producer.bias.dtype)
            outcome.changed.append(producer)
    for name in fold.consumers:
        weights[name] *= factors
        statistics[name].divide(factors)
    return factors


def _kind(bits: int, config: QuantizationConfig) -> GridKind:
    return GridKind(bits, config.group_size, config.symmetric, config.zero_points)


def _divide_norm(norm: RMSNorm | LayerNorm, factors: Tensor) -> Tensor:
    """Return the rounded factors."""
    offset = norm.offset if isinstance(norm, RMSNorm) else 0.0
    before = norm.weight.data.float() + offset
    norm.weight.data.copy_(before / factors - offset)
    after = norm.weight.data.float() + offset
    factors = torch.where(after == 0, torch.ones_like(factors), before / after)
    if isinstance(norm, LayerNorm):
        norm.bias.data.copy_(norm.bias.data.float() / factors)
    return factors


def _quantize(
    name: str,
    target: Target,
    weight: Tensor,
    statistics: InputStatistics,
    config: QuantizationConfig,
    outcome: Outcome,
) -> QuantizedWeight:
    kind = _kind(target.bits, config)
    grid = kind.fit(weight)
    if not _usable(statistics) or _saw_few(target, statistics):
        seen = f"{statistics.count} inputs were" if statistics.count else "no input was"
        outcome.notes.append(f"{name}: {seen} seen, so it was rounded to nearest")
        return grid.weight(grid.values(weight))
    if statistics.num_left_out:
        outcome.notes.append(f"{name}: {statistics.num_left_out} rows of inputs were not finite and were left out")
    hessian = statistics.hessian
    if "awq" in config.method:
        grid = awq.clipped_grid(weight, hessian, kind)
    if "gptq" in config.method:
        rounded = gptq(weight, hessian, grid)
        quantized = rounded.weight
        if rounded.damping is None:
            outcome.notes.append(f"{name}: its inputs depend on each other too much, so it was rounded to nearest")
        elif rounded.damping > DAMPINGS[0]:
            outcome.notes.append(f"{name}: its inputs depend on each other; H was damped by {rounded.damping}")
        if rounded.dead:
            outcome.notes.append(f"{name}: {rounded.dead} of {weight.shape[1]} inputs were always zero")
    else:
        quantized = grid.weight(grid.values(weight))
    whole = output_error(weight, hessian)
    outcome.errors[name] = float(output_error(quantized.dequantize() - weight, hessian) / whole) if whole else 0.0
    return quantized

"""Mixed precision: choose each layer's bits within a memory budget.

Fewer bits cost the error of a layer's outputs on calibration prompts, ``tr(dW H dW^T)``. Layers lose bits in the order
of error per saved byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch

from vlmserve.calibration.forward import LayerByLayer
from vlmserve.calibration.run import CROSS_STATES, DECODER, Calibration, forget, observed_together
from vlmserve.errors import ConfigurationError
from vlmserve.layers.linear import Weight
from vlmserve.memory import return_free_memory
from vlmserve.models.blocks.cross import CROSS_KV
from vlmserve.models.estimate import MemoryEstimate
from vlmserve.quant.calibration import Observer, Target
from vlmserve.quant.memory import StoredSizes
from vlmserve.quant.methods.rtn import round_to_nearest
from vlmserve.quant.model import BITS
from vlmserve.quant.statistics import InputStatistics, output_error
from vlmserve.settings.quantization import QuantizationConfig, Scheme
from vlmserve.types import Prompt

Errors = Mapping[Scheme, float]
"""Error of a layer's outputs for each scheme of its weight; 0 for "none"."""


@dataclass(frozen=True)
class Choice:
    sizes: Mapping[Scheme, int]
    """Bytes of its weight for each scheme."""
    errors: Errors
    """For each allowed scheme."""

    def steps(self) -> list[tuple[float, int, Scheme]]:
        """Reductions of bits: error per saved byte, saved bytes, scheme.

        The error per byte increases from step to step (lower convex hull); schemes above the hull are omitted.
        """
        largest, *others = sorted(self.errors, key=lambda scheme: -self.sizes[scheme])
        hull = [largest]
        for scheme in others:
            while len(hull) > 1 and self._rate(hull[-2], hull[-1]) >= self._rate(hull[-1], scheme):
                hull.pop()
            hull.append(scheme)
        return [
            (self._rate(more, fewer), self.sizes[more] - self.sizes[fewer], fewer) for more, fewer in pairwise(hull)
        ]

    def _rate(self, more: Scheme, fewer: Scheme) -> float:
        return (self.errors[fewer] - self.errors[more]) / max(1, self.sizes[more] - self.sizes[fewer])


def assign(choices: Mapping[str, Choice], excess: int) -> dict[str, Scheme]:
    """Save at least `excess` bytes, with little error. Raises ConfigurationError if all steps save less."""
    chosen: dict[str, Scheme] = dict.fromkeys(choices, "none")
    steps = sorted(
        (rate, number, name, saved, fewer)
        for name, choice in choices.items()
        for number, (rate, saved, fewer) in enumerate(choice.steps())
    )
    taken: dict[str, tuple[Scheme, int]] = {}
    for _, _, name, saved, fewer in steps:
        if excess <= 0:
            break
        taken[name] = chosen[name], saved
        chosen[name] = fewer
        excess -= saved
    if excess > 0:
        raise ConfigurationError(f"--weight-memory: the weights take at least {excess / 1e6:.1f} MB more")
    # The last step may save enough without smaller steps: undo them.
    for name, (before, saved) in taken.items():
        if excess + saved <= 0:
            chosen[name] = before
            excess += saved
    return chosen


def choose_bits(
    folder: Path,
    out: Path,
    wanted: QuantizationConfig,
    prompts: Mapping[Prompt, float],
    kernels: str,
    progress: Callable[[int, int], None],
) -> QuantizationConfig:
    """Layers with rules keep them; embedding tables and heads have 8 bits. Other arguments are as in `Calibration`."""
    assert wanted.weight_memory is not None
    measuring = SensitivityPass(folder, out, wanted, prompts, kernels=kernels)
    errors = measuring.measure(progress)
    estimate = MemoryEstimate(folder, torch.device("cpu"), kernels)
    stored = StoredSizes(estimate.device, wanted)
    choices = {}
    for name, measured in errors.items():
        if not any(fnmatchcase(name, pattern) for pattern in wanted.overrides):
            module = cast(Weight, estimate.model.get_submodule(name))
            sizes = {scheme: stored.of(module, BITS.get(scheme)) for scheme in measured}
            choices[name] = Choice(sizes, measured)

    largest = estimate.weights(wanted.with_overrides(dict.fromkeys(choices, "none")))
    return wanted.with_overrides(assign(choices, largest - wanted.weight_memory))


class SensitivityPass(Calibration):
    """Measures schemes' errors in one pass."""

    @torch.inference_mode()
    def measure(self, progress: Callable[[int, int], None]) -> dict[str, dict[Scheme, float]]:
        """Return the `output_error` of each scheme, by layer name. progress: called with finished and total stages."""
        self._measured: dict[str, dict[Scheme, float]] = {}
        flow = LayerByLayer(self._decoder, self._executor, self._device, self._prompts)
        count = len(self._decoder.layers)
        self._load_outer()
        self._enter(flow, partial(self._measure, prefix=""))
        self._forget_outer()
        progress(1, count + 1)
        for index in range(count):
            layer = self._load_layer(index)
            targets = self._layer_targets(index)
            groups = list(observed_together(targets))
            for some in groups:
                observer = Observer({name: target.module for name, target in some.items()})
                with observer.watching():
                    keep = some is groups[-1]
                    flow.through(index, observer=observer, image_weight=self._config.image_weight, keep=keep)
                self._measure(some, observer.statistics, f"{DECODER}layers.{index}.")
                del observer
            forget(layer)
            return_free_memory()
            progress(index + 2, count + 1)
        self._transform(flow, partial(self._measure, prefix=""))
        return self._measured

    def _measure(self, targets: Mapping[str, Target], statistics: Mapping[str, InputStatistics], prefix: str) -> None:
        for name, target in targets.items():
            weight, hessian = target.module.weight.data.float(), statistics[name].hessian
            errors: dict[Scheme, float] = {"none": 0.0}
            for scheme, bits in BITS.items():
                if bits == 4 and target.module.in_features % self._config.group_size:
                    continue
                rounded = round_to_nearest(
                    weight,
                    bits=bits,
                    group_size=self._config.group_size,
                    symmetric=self._config.symmetric,
                    zero_points=self._config.zero_points,
                )
                errors[scheme] = float(output_error(rounded.dequantize() - weight, hessian))
            # Layers share the cross-attention weight, so their errors add up.
            known = self._measured.setdefault(CROSS_STATES if name == CROSS_KV else prefix + name, {})
            known |= {scheme: known.get(scheme, 0.0) + error for scheme, error in errors.items()}

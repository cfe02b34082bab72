"""Calibrated quantization in one pass: read, quantize, write and free each layer."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from vlmserve import __version__
from vlmserve.calibration.forward import LayerByLayer, OneLayer, cross_sources, encode_images
from vlmserve.devices.choice import open_device
from vlmserve.errors import ConfigurationError
from vlmserve.layers.linear import Linear, MergedLinear, Weight
from vlmserve.memory import return_free_memory
from vlmserve.models.blocks.cross import CROSS_KV
from vlmserve.models.decoder_layer import DecoderLayer
from vlmserve.models.identity import weights_digest
from vlmserve.models.quantized import QuantizedFolder, Saving
from vlmserve.models.weights import TEXT_ENCODER, merge_as_stored, module_slots, weight_names, weight_slots
from vlmserve.quant.calibration import Observer, Outcome, Target, quantize_layers
from vlmserve.quant.methods.rtn import round_to_nearest
from vlmserve.quant.model import choose_layers
from vlmserve.quant.statistics import InputStatistics
from vlmserve.settings.quantization import QuantizationConfig
from vlmserve.types import Prompt

logger = logging.getLogger(__name__)

UNFINISHED, STATES, CROSS = "unfinished.json", "states.unfinished", "cross.unfinished"
OBSERVED_BYTES = 256 * 1024**2
"""Bytes of input statistics, for layers outside the decoder that one pass observes."""
EXPERTS_BYTES = 1024**3
"""Bytes of input statistics, for experts of one layer that one pass observes."""
_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")
DECODER = "language_model."
TRANSFORM = f"{DECODER}head_transform."
CROSS_STATES = f"{DECODER}cross_states"

Settle = Callable[[dict[str, Target], Mapping[str, InputStatistics]], None]
"""Handles layers after their inputs were observed."""


@dataclass(frozen=True)
class Result:
    """errors: by layer, as in `Outcome`. notes: problems, as sentences."""

    saving: Saving
    errors: dict[str, float]
    notes: list[str]


class Calibration:
    """folder: as in `QuantizedFolder`. out: new, empty, or left by an interrupted run with the same settings, which
    resumes. prompts: with the weight of each of their tokens.

    Raises as `QuantizedFolder` does, and ConfigurationError for an `out` with other content, and for models that cannot
    be calibrated.
    """

    def __init__(
        self,
        folder: Path,
        out: Path,
        config: QuantizationConfig,
        prompts: Mapping[Prompt, float],
        *,
        kernels: str = "auto",
    ) -> None:
        if not prompts:
            raise ConfigurationError("calibration needs at least one prompt")
        self._writer = QuantizedFolder(folder, out, config)
        self._config, self._prompts = config, prompts
        description, checkpoint = self._writer.description, self._writer.checkpoint
        device = torch.device("cpu")
        with description.errors():
            spec = description.spec(checkpoint)
            self._device, dtype = open_device(device, kernels, description.dtype(checkpoint), automatic=True)
            backend = self._device.attention(spec.attention, dtype, cache_type="auto")
            self._executor = OneLayer()
            parts = description.build(spec, backend, self._executor, dtype=dtype, device=device)
        repeats = any(layer.values_are_keys for layer in spec.attention)
        if spec.first_sharing is not None or spec.per_layer is not None or repeats:
            raise ConfigurationError(
                f"{folder}: its layers share keys or values and cannot be calibrated; use --quantize int8 or int4"
            )
        self._model, self._decoder = parts.modules, parts.language_model
        self._vision, self._cross = parts.vision, parts.cross
        merge_as_stored(self._model, checkpoint.names)
        chosen = {path: (module, bits) for path, module, bits in choose_layers(self._model, config)}
        self._decoder.split_cross_states()
        self._slots = [name for name, _ in weight_slots(self._model)]
        self._targets = {path: Target(one, bits) for path, (one, bits) in chosen.items() if isinstance(one, Linear)}
        if (cross := self._targets.pop(CROSS_STATES, None)) is not None:
            for path, module in self._model.named_modules():
                if path.startswith(DECODER) and path.endswith(CROSS_KV):
                    self._targets[path] = Target(cast(Linear, module), cross.bits)
        self._errors: dict[str, float] = {}
        self._notes: list[str] = []

    @torch.inference_mode()
    def run(self, progress: Callable[[int, int], None] = lambda done, of: None) -> Result:
        flow = LayerByLayer(self._decoder, self._executor, self._device, self._prompts)
        count = len(self._decoder.layers)
        stage = self._begin(flow)
        progress(stage, count + 2)
        for index in range(stage, count + 2):
            if index == 0:
                self._embed(flow)
            elif index <= count:
                self._layer(flow, index - 1)
            else:
                self._rest(flow)
            if index <= count:
                self._note(flow, index + 1)
            return_free_memory()
            progress(index + 1, count + 2)
        out = self._writer.out
        for name in (UNFINISHED, STATES, CROSS):
            (out / name).unlink(missing_ok=True)
        return Result(self._writer.finish(), self._errors, self._notes)

    def _begin(self, flow: LayerByLayer) -> int:
        """Load an interrupted run and return its next stage; 0 in a new folder."""
        out = self._writer.out
        settings, path = self._settings(), out / UNFINISHED
        if not path.is_file():
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise ConfigurationError(f"{out} must be a new or an empty folder")
            out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"settings": settings}) + "\n", "utf-8")
            return 0
        if json.loads(path.read_text("utf-8")).get("settings") != settings:
            raise ConfigurationError(
                f"{out} holds an unfinished checkpoint from a run with other settings; use these settings again, or "
                "delete the folder"
            )
        if not (out / STATES).is_file():
            return 0
        with safe_open(out / STATES, framework="pt") as file:
            about = file.metadata()
            flow.states = [file.get_tensor(str(number)).clone() for number in range(len(file.keys()))]
        if (out / CROSS).is_file():
            flow.cross |= {bytes.fromhex(key): tensor for key, tensor in load_file(out / CROSS).items()}
        self._errors, self._notes = json.loads(about["errors"]), json.loads(about["notes"])
        stage = int(about["stage"])
        logger.info("resuming with layer %d", stage)
        return stage

    def _note(self, flow: LayerByLayer, stage: int) -> None:
        about = {"stage": str(stage), "errors": json.dumps(self._errors), "notes": json.dumps(self._notes)}
        tensors = {str(number): states for number, states in enumerate(flow.states)}
        self._writer.write(STATES, tensors, about)

    def _settings(self) -> str:
        """A digest of everything that determines the result."""
        hasher = blake3(weights_digest(self._writer.checkpoint.folder))
        config = self._config.model_dump_json(exclude={"calibration", "calibration_tokens"})  # the prompts follow
        hasher.update(f"{__version__} {config} {self._device.kernels} {self._decoder.dtype}".encode())
        for prompt, weight in self._prompts.items():
            asked = [] if prompt.cross is None else prompt.cross.token_ids
            keys = [image.key.hex() for image in prompt.image_inputs]
            hasher.update(json.dumps([prompt.token_ids, asked, keys, weight]).encode())
        return hasher.hexdigest()

    def _embed(self, flow: LayerByLayer) -> None:
        self._load_outer()
        for target in self._outer_targets().values():
            if target.module.weight.ndim != 2:
                self._round(target)
        outcome = Outcome()
        self._enter(flow, lambda some, statistics: outcome.add(self._quantize(some, statistics)))
        if self._vision is not None:
            self._write(0, [name for name in self._writer.names if not name.startswith(DECODER)], outcome)
        if flow.cross:
            self._writer.write(CROSS, {key.hex(): rows for key, rows in flow.cross.items()})
        self._forget_outer()

    def _load_outer(self) -> None:
        layers = f"{DECODER}layers."
        self._load(lambda name: not name.startswith(layers) and not name.startswith(f"{DECODER}lm_head"))

    def _forget_outer(self) -> None:
        forget(self._decoder.embed_tokens)
        for name, module in self._model.named_children():
            if name != DECODER.removesuffix("."):
                forget(module)

    def _enter(self, flow: LayerByLayer, settle: Settle) -> None:
        """settle: may change layers before the decoder; later layers observe the changed outputs."""
        images: dict[bytes, Tensor] = {}
        tower = self._outer_targets()
        questions = {path: tower.pop(path) for path in list(tower) if path.startswith(TEXT_ENCODER)}
        if self._vision is not None:
            encode = partial(encode_images, self._vision, self._device, list(self._prompts), self._decoder.dtype)
            self._watch(tower, encode, settle)
            images = dict(encode())
        if self._cross is not None:
            read = partial(cross_sources, self._cross, list(self._prompts), images)
            self._watch(questions, read, settle)
            flow.cross |= read()
        flow.embed(images)

    def _outer_targets(self) -> dict[str, Target]:
        return {path: target for path, target in self._targets.items() if not path.startswith(DECODER)}

    def _watch(self, targets: dict[str, Target], run: Callable[[], Iterable[object]], settle: Settle) -> None:
        """Observe and settle layers, as many at a time as fit into memory. Skips weights that are not matrices."""
        matrices = ({path: target} for path, target in targets.items() if target.module.weight.ndim == 2)
        for some in _within_memory(matrices, OBSERVED_BYTES):
            observer = Observer({path: target.module for path, target in some.items()})
            with observer.watching():
                for _ in run():
                    pass
            settle(some, observer.statistics)

    def _quantize(self, targets: dict[str, Target], statistics: Mapping[str, InputStatistics]) -> Outcome:
        return quantize_layers(targets, (), statistics, self._config)

    def _round(self, target: Target) -> None:
        """A patch embedding is a convolution of pixels: round to nearest."""
        weight = target.module.weight.data
        config = self._config
        rounded = round_to_nearest(
            weight.flatten(1),
            bits=target.bits,
            group_size=config.group_size,
            symmetric=config.symmetric,
            zero_points=config.zero_points,
        )
        weight.copy_(rounded.dequantize().view_as(weight))

    def _layer(self, flow: LayerByLayer, index: int) -> None:
        prefix = f"{DECODER}layers.{index}."
        layer = self._load_layer(index)
        targets = self._layer_targets(index)
        outcome = Outcome()
        for some in observed_together(targets):
            observer = Observer({name: target.module for name, target in some.items()})
            with observer.watching():
                flow.through(index, observer=observer, image_weight=self._config.image_weight, keep=False)
            outcome.add(quantize_layers(some, list(layer.folds()), observer.statistics, self._config))
            del observer
        flow.through(index)
        self._write(index + 1, [name for name in self._writer.names if name.startswith(prefix)], outcome, prefix)
        forget(layer)

    def _load_layer(self, index: int) -> DecoderLayer:
        prefix = f"{DECODER}layers.{index}."
        layer = cast(DecoderLayer, self._decoder.layers[index])
        self._load(lambda name: name.startswith(prefix))
        for module in layer.modules():
            if isinstance(module, Weight):
                module.settle()
        return layer

    def _layer_targets(self, index: int) -> dict[str, Target]:
        prefix = f"{DECODER}layers.{index}."
        return {path.removeprefix(prefix): target for path, target in self._targets.items() if path.startswith(prefix)}

    def _rest(self, flow: LayerByLayer) -> None:
        outcome = Outcome()
        self._transform(flow, lambda some, statistics: outcome.add(self._quantize(some, statistics)))
        layers = f"{DECODER}layers."
        names = [name for name in self._writer.names if name.startswith(DECODER) and not name.startswith(layers)]
        self._write(len(self._decoder.layers) + 1, names, outcome)

    def _transform(self, flow: LayerByLayer, settle: Settle) -> None:
        if (transform := self._decoder.head_transform) is not None:
            self._load(lambda name: name.startswith(TRANSFORM))
            targets = {path: target for path, target in self._targets.items() if path.startswith(TRANSFORM)}
            self._watch(targets, lambda: map(transform, flow.states), settle)

    def _load(self, wanted: Callable[[str], bool]) -> None:
        filled = {name for name in self._slots if not wanted(name)}
        self._writer.checkpoint.load(self._model, filled=filled)

    def _write(self, number: int, names: Sequence[str], outcome: Outcome, prefix: str = "") -> None:
        """names: canonical. prefix: goes before the outcome's names."""
        paths = {module: path for path, module in self._model.named_modules()}
        written: dict[str, dict[str, Tensor]] = {}
        for name, weight in outcome.weights.items():
            module = cast(Linear, self._model.get_submodule(prefix + name))
            for own, rows in _as_stored(prefix + name, module):
                written[own] = self._writer.packed(own, weight[rows])
        for changed in outcome.changed:
            for own, slot in _plain_slots(paths[changed], changed):
                written.setdefault(own, {self._writer.names[own]: slot.clone()})
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors |= written[name] if name in written else self._writer.rounded(name)
        total = len(self._decoder.layers) + 2
        if tensors:
            self._writer.write(f"model-{number + 1:05}-of-{total:05}.safetensors", tensors)
        self._errors |= {prefix + name: error for name, error in outcome.errors.items()}
        self._notes += [prefix + note for note in outcome.notes]


def _as_stored(path: str, module: Linear) -> Iterator[tuple[str, Tensor]]:
    order = torch.arange(module.out_features) if module.order is None else module.order.argsort()
    sizes = list(module.parts.values()) if isinstance(module, MergedLinear) else [module.out_features]
    yield from zip(weight_names(path, module), torch.split(order, sizes), strict=True)


def _plain_slots(path: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As the checkpoint stores them."""
    if not isinstance(module, Linear):
        yield from module_slots(path, module)
        return
    for name, rows in _as_stored(path, module):
        yield name, module.weight.data[rows]
        if module.bias is not None:
            yield name.removesuffix("weight") + "bias", module.bias.data[rows]


def observed_together(targets: dict[str, Target]) -> Iterator[dict[str, Target]]:
    """Group a layer's targets, each group for one pass.

    If experts exceed `EXPERTS_BYTES`, groups of experts come first: they change no input of another target of their
    layer.
    """
    experts: dict[str, dict[str, Target]] = {}
    for path, target in targets.items():
        if (match := _EXPERT.search(path)) is not None:
            experts.setdefault(path[: match.end()], {})[path] = target
    groups = list(_within_memory(experts.values(), EXPERTS_BYTES))
    if len(groups) < 2:
        yield targets
        return
    yield from groups
    yield {path: target for path, target in targets.items() if _EXPERT.search(path) is None}


def _within_memory(units: Iterable[dict[str, Target]], most: int) -> Iterator[dict[str, Target]]:
    """Join consecutive units while their inputs' statistics take at most `most` bytes."""
    some: dict[str, Target] = {}
    taken = 0
    for unit in units:
        needed = sum(4 * target.module.in_features**2 for target in unit.values())
        if some and taken + needed > most:
            yield some
            some, taken = {}, 0
        some |= unit
        taken += needed
    if some:
        yield some


def forget(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)

"""The configuration of an X-LoRA checkpoint by PEFT or mistral.rs, and its adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vlmserve.adapters.location import (
    CONFIG,
    DEEPEST,
    MAX_VALUE,
    WEIGHTS,
    XLORA_CONFIG,
    XLORA_WEIGHTS,
    check_header,
    read_object,
)
from vlmserve.errors import AdapterError

MAX_ADAPTERS = 64
"""Maximum number of adapters for one classifier."""
CLASSIFIER = "internal_xlora_classifier"
"""PEFT's prefix of the classifier's tensors."""

_READ = {
    "hidden_size", "adapters", "enable_softmax", "enable_softmax_topk", "layerwise_scalings", "xlora_depth",
    "softmax_temperature", "top_k_lora", "scaling_pass_value", "global_scaling_weight",
}  # fmt: skip
_ONLY_TRAINING = {"xlora_size", "xlora_dropout_p", "use_trainable_adapters"}
_OF_PEFT = {
    "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
}  # fmt: skip
_OF_MISTRAL = {"enable_relu_and_dropout", "use_bias", "base_model_id", "stop_token_id", "device"}
_OF_ORDERINGS = {"order", "layers", "base_model_id", "preload_adapters"}


@dataclass(frozen=True)
class XLoraConfig:
    hidden_size: int
    depth: int
    names: tuple[str, ...]
    """Names of adapters, in the order of the classifier's outputs."""
    softmax: bool
    """Softmax over adapters, of outputs divided by `temperature`."""
    softmax_topk: bool
    """Softmax over the adapters that `top_k` keeps."""
    temperature: float
    layerwise: bool
    """Each adapted layer has its own scalings."""
    top_k: int | None
    """Number of adapters that keep their scalings for a token; None: all."""
    relu: bool
    """ReLU between the classifier's linear layers."""
    pass_value: float | None
    """All scalings in the scaling pass, which computes the classifier's input; None: 1 / number of adapters."""
    weight: float
    """Global factor of all adapters."""

    @classmethod
    def parse(cls, content: Mapping[str, Any], file: str, order: Sequence[str] | None) -> XLoraConfig:
        """file: its name tells the layout. order: of the adapters; None: as in the content. Raises AdapterError for an
        invalid or unsupported configuration."""
        of_peft = file == CONFIG
        known = _READ | _ONLY_TRAINING | (_OF_PEFT if of_peft else _OF_MISTRAL)
        if unknown := sorted(name for name, value in content.items() if value and name not in known):
            raise AdapterError(f"{file}: not supported: {', '.join(unknown)}")
        names = _names(content.get("adapters"), file, of_peft) if order is None else tuple(order)
        try:
            value, top_k = content.get("scaling_pass_value", 0.0), content.get("top_k_lora")
            config = cls(
                hidden_size=int(content["hidden_size"]),
                depth=int(content.get("xlora_depth", 1)),
                names=names,
                softmax=bool(content.get("enable_softmax", True)),
                softmax_topk=bool(content.get("enable_softmax_topk")),
                temperature=float(content.get("softmax_temperature", 1.0)),
                layerwise=bool(content.get("layerwise_scalings")),
                top_k=None if top_k is None else int(top_k),
                relu=of_peft or bool(content.get("enable_relu_and_dropout")),
                pass_value=None if value is None else float(value),
                weight=float(content.get("global_scaling_weight", 1.0)),
            )
        except (TypeError, ValueError, OverflowError, KeyError) as error:
            raise AdapterError(f"{file} does not describe an X-LoRA model: {error}") from error
        config._check(file)
        return config

    def keeping(self, outputs: Sequence[int]) -> XLoraConfig:
        """Raises AdapterError if fewer adapters remain than `top_k` chooses."""
        needed = self.top_k or 1
        if len(outputs) < needed:
            what = f"top_k_lora chooses {self.top_k}" if self.top_k else "at least 1 is needed"
            raise AdapterError(f"{len(outputs)} of {len(self.names)} adapters would be left, and {what}")
        return replace(self, names=tuple(self.names[output] for output in outputs))

    def _check(self, file: str) -> None:
        for name, holds, what in [
            ("xlora_depth", self.depth >= 1, "at least 1"),
            ("softmax_temperature", math.isfinite(self.temperature) and self.temperature > 0, "above 0"),
            ("top_k_lora", self.top_k is None or 1 <= self.top_k <= len(self.names), f"1 to {len(self.names)}"),
            ("scaling_pass_value", abs(self.pass_value or 0.0) <= MAX_VALUE, f"{-MAX_VALUE:g} to {MAX_VALUE:g}"),
            ("global_scaling_weight", abs(self.weight) <= MAX_VALUE, f"{-MAX_VALUE:g} to {MAX_VALUE:g}"),
        ]:
            if not holds:
                raise AdapterError(f"{file}: {name} must be {what}")


def _names(adapters: object, file: str, of_peft: bool) -> tuple[str, ...]:
    if not isinstance(adapters, Mapping | Sequence) or isinstance(adapters, str) or not adapters:
        raise AdapterError(f"{file} names no adapters")
    names = tuple(str(name) for name in adapters)
    if len(names) > MAX_ADAPTERS:
        raise AdapterError(f"{file} names {len(names)} adapters, and at most {MAX_ADAPTERS} can be mixed")
    if not of_peft:
        return names
    # PEFT numbers adapters in the order of the classifier's outputs, but writes them in the order of their names.
    if set(names) != {str(number) for number in range(len(names))}:
        raise AdapterError(f'{file}: adapters must have the names "0" to "{len(names) - 1}", not {", ".join(names)}')
    return tuple(sorted(names, key=int))


@dataclass(frozen=True)
class XLoraFolder:
    config: XLoraConfig
    weights: Path
    """The classifier's file."""
    adapters: tuple[Path, ...]
    """Folders, in the order of the classifier's outputs."""
    layers: Mapping[str, int] | None
    """Index of each adapted layer among the scalings, by name; None: not stored."""

    @classmethod
    def find(cls, folder: Path) -> XLoraFolder:
        """Raises AdapterError for an incomplete folder, or if its adapters are neither inside nor next to it."""
        of_mistral = (folder / XLORA_CONFIG).is_file()
        file, weights = (XLORA_CONFIG, XLORA_WEIGHTS) if of_mistral else (CONFIG, WEIGHTS)
        content = read_object(folder, file)
        order, layers = _ordering(folder) if of_mistral else (None, None)
        config = XLoraConfig.parse(content, file, order)
        if not (folder / weights).is_file():
            raise AdapterError(f"{folder} has no {weights}, which holds the classifier")
        paths = content.get("adapters")
        paths = paths if isinstance(paths, Mapping) else {}
        adapters = tuple(_find_adapter(folder, name, str(paths.get(name, name))) for name in config.names)
        return cls(config, folder / weights, adapters, layers)

    def with_pool(self, pool: Mapping[str, str]) -> tuple[XLoraFolder, Sequence[int]]:
        """Replace or remove adapters; return also the classifier's remaining outputs.

        pool: see `read_xlora`. Raises AdapterError for adapters without an output, folders without an adapter, and too
        few remaining adapters.
        """
        names = self.config.names
        if unknown := sorted(pool.keys() - set(names)):
            known = ", ".join(names)
            raise AdapterError(
                f"the classifier has no output for {unknown[0]!r:.100}, only for {known}", param="lora_name"
            )
        kept = [output for output, name in enumerate(names) if pool.get(name) != ""]
        config = self.config.keeping(kept)
        adapters = tuple(Path(pool.get(names[output], self.adapters[output])) for output in kept)
        for path in adapters:
            if not _holds_adapter(path):
                raise AdapterError(f"{path} is no folder with an adapter", param="lora_path")
        return replace(self, config=config, adapters=adapters), kept


def _ordering(folder: Path) -> tuple[Sequence[str] | None, Mapping[str, int] | None]:
    """From mistral.rs' ordering file, if it tells them."""
    found = sorted(path for path in folder.glob("*order*.json") if path.is_file())
    if not found:
        return None, None
    if len(found) > 1:
        raise AdapterError(f"{folder} has several ordering files: {', '.join(path.name for path in found)}")
    content = read_object(folder, found[0].name)
    if unknown := sorted(name for name, value in content.items() if value and name not in _OF_ORDERINGS):
        raise AdapterError(f"{found[0].name}: {', '.join(unknown)} is not supported")
    if content.get("preload_adapters"):
        raise AdapterError(f"{found[0].name}: preload_adapters is not supported")
    order, layers = content.get("order"), content.get("layers")
    if order is not None:
        order = _names(order, found[0].name, of_peft=False)
        if len(set(order)) < len(order):
            raise AdapterError(f"{found[0].name} names an adapter twice")
    if layers is not None:
        places = layers.values() if isinstance(layers, Mapping) else ()
        if sorted(place for place in places if isinstance(place, int)) != list(range(len(layers))) or not layers:
            raise AdapterError(f'{found[0].name}: "layers" must number the layers from 0 on')
    return order, layers


def _find_adapter(folder: Path, name: str, path: str) -> Path:
    """Find an adapter inside or next to the checkpoint's folder.

    Its folder has the adapter's name, or the end of the configured path, which often points to the training machine.
    """
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    candidates = [folder / name]
    candidates += [root.joinpath(*parts[start:]) for root in (folder, folder.parent) for start in range(len(parts))]
    if _is_plain(name):
        candidates += [found for depth in range(1, DEEPEST) for found in sorted(folder.glob("*/" * depth + name))]
    root, around = folder.resolve(), folder.resolve().parent
    for candidate in candidates:
        found = candidate.resolve()
        if found not in (root, around) and found.is_relative_to(around) and _holds_adapter(found):
            return found
    raise AdapterError(f"{folder} has no adapter {name!r:.100}: put it into the folder {name!r:.100} inside of it")


def _is_plain(name: str) -> bool:
    return name.replace("_", "").replace("-", "").isalnum()


def _holds_adapter(folder: Path) -> bool:
    """False for copies of the classifier, which PEFT stores where adapters would be."""
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        return (folder / CONFIG).is_file()
    check_header(folder / WEIGHTS)
    try:
        with safe_open(folder / WEIGHTS, framework="numpy") as file:
            return not any(CLASSIFIER in key for key in file.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{folder / WEIGHTS} is broken: {error}") from error

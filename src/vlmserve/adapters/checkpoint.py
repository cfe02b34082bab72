"""LoRA adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vlmserve.adapters.location import CONFIG, MAX_VALUE, WEIGHTS, check_header, read_object
from vlmserve.adapters.patterns import ModulePatterns
from vlmserve.errors import AdapterError

PICKLE = "adapter_model.bin"
FLOATS = {"F64", "F32", "F16", "BF16"}
MAX_TENSORS = 150_000
"""Maximum number of tensors. Large mixtures of experts need about 90,000."""
MAX_KEY = 1000
"""Maximum characters of a tensor's name."""

Kind = Literal[
    "down", "up", "up_bias", "magnitude", "weight", "bias", "base_weight", "table_down", "table_up", "tokens"
]

_NAME = r"(?:\.(?!weight$|bias$)[^.]+)?"
"""The adapter's name, which PEFT omits when it saves."""
_KINDS: Sequence[tuple[str, Kind]] = (
    (rf"\.lora_A{_NAME}\.weight$", "down"),
    (rf"\.lora_B{_NAME}\.weight$", "up"),
    (rf"\.lora_B{_NAME}\.bias$", "up_bias"),
    (rf"\.lora_embedding_A{_NAME}$", "table_down"),
    (rf"\.lora_embedding_B{_NAME}$", "table_up"),
    (rf"\.lora_magnitude_vector{_NAME}(?:\.weight)?$", "magnitude"),
    (rf"\.(?:token_adapter\.)?trainable_tokens_delta{_NAME}$", "tokens"),
    (r"\.base_layer\.weight$", "base_weight"),
    (r"\.base_layer\.bias$", "bias"),
    (r"(?:\.modules_to_save(?:\.[^.]+)?)?\.weight$", "weight"),
    (r"(?:\.modules_to_save(?:\.[^.]+)?)?\.bias$", "bias"),
)

_REFUSED: Mapping[str, str] = {
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "layer_replication": "replicated layers",
    "megatron_config": "Megatron's layers",
    "monteclora_config": "MonteCLoRA",
    "target_parameters": "adapters of single parameters",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
}
_ONLY_TRAINING = {
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version", "peft_type",
    "lora_dropout", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "layers_to_transform", "layers_pattern", "target_modules", "exclude_modules", "runtime_config", "megatron_core",
    "qalora_group_size",
}  # fmt: skip
"""Fields about training, and fields about the changed modules, which tensor names show."""
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to initialize an adapter without changing the base model."""


_NO_RANKS, _NO_ALPHAS = ModulePatterns("rank_pattern", {}), ModulePatterns("alpha_pattern", {})


@dataclass(frozen=True)
class LoraConfig:
    rank: int = 8
    alpha: float = 8
    rslora: bool = False
    dora: bool = False
    rank_pattern: ModulePatterns = _NO_RANKS
    alpha_pattern: ModulePatterns = _NO_ALPHAS
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Tokens with trained embeddings, by module; "" is the embedding table."""
    fan_in_fan_out: bool = False
    tied: bool = False
    base: str = ""

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> LoraConfig:
        """Raises AdapterError for an invalid or unsupported configuration."""
        kind = content.get("peft_type", "LORA")
        if kind != "LORA":
            raise AdapterError(f"an adapter of type {kind!r} is not supported; supported is LORA")
        for name, what in _REFUSED.items():
            if content.get(name):
                raise AdapterError(f"{CONFIG}: {name} is set, and {what} is not supported")
        initial = content.get("init_lora_weights")
        if initial not in _INITIAL:
            raise AdapterError(
                f"{CONFIG}: init_lora_weights {initial!r} changes the base model as well; save the adapter with "
                "path_initial_model_for_weight_conversion, which makes it one for the original model"
            )
        known = _REFUSED.keys() | _ONLY_TRAINING | _READ
        if unknown := sorted(name for name, value in content.items() if value and name not in known):
            raise AdapterError(f"{CONFIG}: {', '.join(unknown)} is not supported")
        try:
            return cls(
                rank=_rank("r", content.get("r", 8)),
                alpha=_alpha("lora_alpha", content.get("lora_alpha", 8)),
                rslora=bool(content.get("use_rslora")),
                dora=bool(content.get("use_dora")),
                rank_pattern=_patterns("rank_pattern", content.get("rank_pattern"), _rank),
                alpha_pattern=_patterns("alpha_pattern", content.get("alpha_pattern"), _alpha),
                tokens=_tokens(content.get("trainable_token_indices") or {}),
                fan_in_fan_out=bool(content.get("fan_in_fan_out")),
                tied=bool(content.get("ensure_weight_tying")),
                base=str(content.get("base_model_name_or_path") or ""),
            )
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise AdapterError(f"{CONFIG} does not describe an adapter: {error}") from error

    def rank_of(self, module: str) -> int:
        return int(self.rank_pattern.value(module, self.rank))

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), self.alpha_pattern.value(module, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def tokens_of(self, module: str) -> Sequence[int]:
        named = (tokens for name, tokens in self.tokens.items() if name and module.endswith(name))
        return next(named, self.tokens.get("", ()))


_READ = {
    "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "trainable_token_indices",
    "fan_in_fan_out", "ensure_weight_tying", "bias", "lora_bias", "modules_to_save",
}  # fmt: skip


class AdapterCheckpoint:
    """An adapter's folder; opening reads only headers.

    Raises AdapterError for a folder without an adapter, for pickled weights, and for an unknown tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._content = read_object(folder, CONFIG)
        self.config = LoraConfig.parse(self._content)
        self._path = folder / WEIGHTS
        if not self._path.is_file():
            pickled = (folder / PICKLE).is_file()
            reason = f"its weights are a pickle, {PICKLE}, which could run code" if pickled else f"it has no {WEIGHTS}"
            hint = "; convert it to safetensors where you trust it" if pickled else ""
            raise AdapterError(f"{folder} cannot be read: {reason}{hint}")
        self.layers: dict[str, dict[Kind, str]] = {}
        """Names of tensors in the file, by kind, for each module of the base model."""
        self.shapes: dict[str, list[int]] = {}
        """Shapes of all tensors, by name in the file."""
        check_header(self._path)
        try:
            with safe_open(self._path, framework="pt") as file:
                keys = file.keys()
                if len(keys) > MAX_TENSORS:
                    raise AdapterError(f"{WEIGHTS} has {len(keys):,} tensors; at most {MAX_TENSORS:,} are supported")
                for key in keys:
                    part = file.get_slice(key)
                    if part.get_dtype() not in FLOATS:
                        raise AdapterError(f"{key} has values of type {part.get_dtype()}, which no adapter has")
                    self.shapes[key] = part.get_shape()
                    self._enter(key)
        except (SafetensorError, OSError) as error:
            raise AdapterError(f"{self._path} is broken: {error}") from error
        if not self.layers:
            raise AdapterError(f"{self._path} holds no tensors")

    def _enter(self, key: str) -> None:
        if len(key) > MAX_KEY:
            raise AdapterError(f"{key[:40]}… has {len(key):,} characters; a tensor's name has at most {MAX_KEY:,}")
        name = key.removeprefix("base_model.model.")
        for pattern, kind in _KINDS:
            if match := re.search(pattern, name):
                tensors = self.layers.setdefault(name[: match.start()], {})
                if kind in tensors:
                    raise AdapterError(f"{key} and {tensors[kind]} are the same tensor")
                tensors[kind] = key
                return
        raise AdapterError(f"{key} is a tensor that vlmserve does not know")

    def read(self, key: str) -> Tensor:
        """Read float32. Raises AdapterError for a broken file, and as `check_values` does."""
        try:
            with safe_open(self._path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(key).float()
        except (SafetensorError, OSError) as error:
            raise AdapterError(f"{self._path} is broken: {error}") from error
        check_values(key, tensor)
        return tensor

    def digest(self) -> bytes:
        """32 bytes over all tensors and the settings that affect the result."""
        about = {key: value for key, value in self._content.items() if key in _READ}
        hasher = blake3(json.dumps(about, sort_keys=True).encode())
        try:
            with safe_open(self._path, framework="pt") as file:
                for key in sorted(self.shapes):
                    tensor = file.get_tensor(key)
                    hasher.update(json.dumps([key, str(tensor.dtype), list(tensor.shape)]).encode())
                    hasher.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        except (SafetensorError, OSError) as error:
            raise AdapterError(f"{self._path} is broken: {error}") from error
        return hasher.digest()


def check_values(name: str, tensor: Tensor) -> None:
    """Raises AdapterError for values that are not finite or exceed `MAX_VALUE`."""
    if not bool(torch.isfinite(tensor).all()):
        raise AdapterError(f"{name} holds values that are not finite")
    if tensor.numel() and float(tensor.abs().max()) > MAX_VALUE:
        raise AdapterError(f"{name} holds values beyond {MAX_VALUE:g}, which is the largest that is allowed")


def _rank(name: str, value: Any) -> int:
    if (rank := int(value)) < 1:
        raise AdapterError(f"{CONFIG}: {name} is {value!r:.50}; a rank is at least 1")
    return rank


def _alpha(name: str, value: Any) -> float:
    alpha = float(value)
    if not abs(alpha) <= MAX_VALUE:
        raise AdapterError(f"{CONFIG}: {name} is {value!r:.50}; allowed are {-MAX_VALUE:g} to {MAX_VALUE:g}")
    return alpha


def _patterns(field: str, content: Any, number: Callable[[str, Any], float]) -> ModulePatterns:
    values = {str(key): number(f"{field}[{key!r:.50}]", value) for key, value in (content or {}).items()}
    return ModulePatterns(f"{CONFIG}: {field}", values)


def _tokens(content: Any) -> Mapping[str, Sequence[int]]:
    by_module = content if isinstance(content, Mapping) else {"": content}
    return {str(module): [int(token) for token in tokens] for module, tokens in by_module.items()}

"""Settings of quantization, shared by commands, files and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import AfterValidator, Field, model_validator

from vlmserve.settings.base import ByteSize, Settings

Scheme = Literal["none", "int8", "int4"]
"""Quantization of a layer's weights."""
Quantize = Literal["none", "int8", "int4", "w8a8"]
"""w8a8 is int8 with 8-bit inputs."""
QuantizeMethod = Literal["rtn", "awq", "gptq", "awq+gptq", "smoothquant"]
GroupSize = Literal[32, 64, 128]
TokenCount = Annotated[int, Field(ge=1)]


def check_rules(rules: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ValueError for a rule other than PATTERN=SCHEME."""
    for rule in rules:
        pattern, _, scheme = rule.rpartition("=")
        if not pattern or scheme not in get_args(Scheme):
            raise ValueError(
                f"write PATTERN=SCHEME, like 'lm_head=none' (schemes: {', '.join(get_args(Scheme))}), not {rule}"
            )
    return rules


LayerRules = Annotated[tuple[str, ...], AfterValidator(check_rules)]


class QuantizationConfig(Settings):
    """How weights are quantized.

    int8 has a scale per output row. int4 has a scale and a minimum per group of inputs of an output row; with
    `symmetric`, zero is the middle of the range; with `zero_points`, it is a whole number of steps above the minimum.
    """

    scheme: Quantize = Field(
        default="none", description="Quantize weights to 8-bit or 4-bit; w8a8 also rounds inputs to 8-bit."
    )
    method: QuantizeMethod = Field(
        default="rtn",
        description="rtn rounds to nearest; the others calibrate with data, once. smoothquant is for 8-bit inputs.",
    )
    group_size: GroupSize = Field(default=32, description="4-bit: inputs that share a scale.")
    symmetric: bool = Field(default=False, description="4-bit: zero in the middle of the range, for other servers.")
    zero_points: bool = Field(
        default=False, description="4-bit: zero is a whole number of steps above the minimum, for other servers."
    )
    vision: bool = Field(default=False, description="Also quantize the vision tower and the projector.")
    layers: LayerRules = Field(
        default=(), description="Layers with another scheme, as PATTERN=SCHEME: 'language_model.layers.0.*=int8'."
    )
    weight_memory: ByteSize | None = Field(
        default=None,
        description="Memory for weights, like 3GiB: each layer gets as many bits as fit, by what fewer would cost. "
        "Calibrates with data, once.",
    )
    calibration: str | None = Field(
        default=None,
        description="Prompts to calibrate with: a file (JSONL) or a folder of images (default: built-in prompts).",
    )
    calibration_tokens: TokenCount = Field(
        default=16384, description="Tokens to calibrate with, image tokens included."
    )
    image_weight: float = Field(
        default=0.1, ge=0, le=1, description="Weight of an image's token in calibration; a token of text has 1."
    )

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        if self.symmetric and self.zero_points:
            raise ValueError("weights have zero points or are symmetric, not both")
        if self.rounds_inputs and self.weight_memory is not None:
            raise ValueError("w8a8 and the method smoothquant are for 8 bits: leave the memory for weights out")
        if self.method == "smoothquant" and "int4" in (self.scheme, *self.overrides.values()):
            raise ValueError("the method smoothquant is for 8 bits")
        if self.scheme == "w8a8" and self.method not in ("rtn", "smoothquant"):
            raise ValueError("w8a8 goes with the methods rtn and smoothquant")
        return self

    @property
    def overrides(self) -> Mapping[str, Scheme]:
        """Schemes by pattern of layer names; the last matching pattern wins."""
        return cast(Mapping[str, Scheme], dict(rule.rpartition("=")[::2] for rule in self.layers))

    def with_overrides(self, schemes: Mapping[str, Scheme]) -> Self:
        """Add rules, which take precedence over the existing ones."""
        return self.model_copy(update={"layers": (*self.layers, *(f"{name}={one}" for name, one in schemes.items()))})

    @property
    def usual(self) -> Scheme:
        """The scheme of layers without a rule; with `weight_memory`, of layers that calibration skips."""
        return "int8" if self.scheme == "w8a8" or self.weight_memory is not None else self.scheme

    @property
    def rounds_inputs(self) -> bool:
        """True if kernels may round inputs of 8-bit weights to 8-bit, except in output heads."""
        return self.scheme == "w8a8" or self.method == "smoothquant"

    @property
    def wanted(self) -> bool:
        """True if anything is to be quantized."""
        return any(scheme != "none" for scheme in (self.usual, *self.overrides.values()))

    @property
    def calibrates(self) -> bool:
        """True if quantizing needs data."""
        return self.wanted and (self.method != "rtn" or self.weight_memory is not None)


def same_as(name: str) -> Any:
    field = QuantizationConfig.model_fields[name]
    return Field(field.default, description=field.description)


def engine_name(name: str) -> str:
    """The engine setting's name for a field of `QuantizationConfig`."""
    return {"scheme": "quantize", "weight_memory": "weight_memory"}.get(name, f"quantize_{name}")

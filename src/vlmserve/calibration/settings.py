"""What `vlmserve quantize` is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from vlmserve.config import QuantizationConfig, QuantizeMethod, Scheme, check_overrides
from vlmserve.settings import ByteSize, Settings, read_settings


class QuantizeConfig(Settings):
    """How weights are quantized."""

    method: QuantizeMethod = Field(
        "rtn",
        description="rtn rounds to nearest; gptq and awq calibrate with data, awq+gptq does both; smoothquant prepares "
        "8 bits for servers that round inputs as well.",
    )
    bits: Literal[8, 4] = Field(8, description="Bits of weights; output heads have 8 at least.")
    group_size: Literal[32, 64, 128] = Field(32, description="4 bits: inputs that share a scale.")
    symmetric: bool = Field(False, description="4 bits: zero in the middle of the range, as other servers read it.")
    zero_points: bool = Field(
        False, description="4 bits: zero is a whole number of steps above the least value, as other servers read it."
    )
    vision: bool = Field(False, description="Quantize the vision tower and the projector as well.")
    layers: Annotated[tuple[str, ...], AfterValidator(check_overrides)] = Field(
        (), description="Layers with a scheme of their own, as PATTERN=SCHEME: '*.down_proj=int8'."
    )
    weight_memory: ByteSize | None = Field(
        None,
        description="In place of --bits: memory for weights, like 3GiB. Each layer gets as many bits as fit, by what "
        "fewer would cost, which is measured.",
    )
    calibration: str | None = Field(
        None,
        description="Prompts to calibrate with: a file as load tests read it (JSONL), or a folder of images; default: "
        "text and drawn images that come along.",
    )
    calibration_tokens: int = Field(16384, ge=1, description="Tokens to calibrate with, those of images included.")
    image_weight: float = Field(
        0.1, ge=0, le=1, description="How much a token of an image counts in calibration, beside 1 for one of text."
    )

    @property
    def quantization(self) -> QuantizationConfig:
        """What decides which weights become what; with `weight_memory`, those that rules and data say nothing about."""
        scheme: Scheme = "int8" if self.bits == 8 or self.weight_memory is not None else "int4"
        overrides: Mapping[str, Scheme] = dict(one.rpartition("=")[::2] for one in self.layers)  # type: ignore[misc]
        values = {
            "scheme": scheme,
            "method": self.method,
            "rounds_inputs": self.method == "smoothquant",
            "group_size": self.group_size,
            "symmetric": self.symmetric,
            "zero_points": self.zero_points,
            "vision": self.vision,
            "overrides": overrides,
        }
        return read_settings(QuantizationConfig, values, lambda name: f"--{name}")

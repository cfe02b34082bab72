from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vlmserve.devices.choice import find_device
from vlmserve.engine.engine import USUAL_TOKENS
from vlmserve.errors import ConfigurationError
from vlmserve.kernels.quantized import GROUP_SIZES
from vlmserve.models.estimate import MemoryEstimate
from vlmserve.models.hub import resolve_model
from vlmserve.models.quantized import check_groups
from vlmserve.settings.config import EngineConfig
from vlmserve.settings.quantization import QuantizationConfig


def show_estimate(engine: EngineConfig, how: QuantizationConfig) -> None:
    """Print a row per scheme, including the flags' scheme."""
    folder = resolve_model(engine.model, engine.revision, engine.mmproj)
    estimate = MemoryEstimate(folder, find_device("auto"), engine.kernels)
    length = min(USUAL_TOKENS, estimate.max_position)
    table = Table("weights", "MB", "of plain", f"requests of {length:,} tokens", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    plain = estimate.weights(None)
    for name, config in _schemes(estimate, how):
        size = estimate.weights(config)
        room = estimate.cache(size, engine.memory_fraction) / (estimate.token_bytes * length)
        table.add_row(name, f"{size / 1e6:.1f}", f"{size / plain:.0%}", f"{int(room):,}")
    console = Console(highlight=False)
    console.print(
        f"On {estimate.device.torch_device} in {str(estimate.dtype).removeprefix('torch.')}: the KV cache takes "
        f"{estimate.token_bytes * 1000 / 1e6:.1f} MB for 1,000 tokens.",
        soft_wrap=True,
    )
    console.print(table)


def _schemes(estimate: MemoryEstimate, asked: QuantizationConfig) -> Iterator[tuple[str, QuantizationConfig | None]]:
    """All schemes whose group size divides every layer's inputs, and the flags' scheme."""
    check_groups(estimate.model, asked)
    usual = asked.model_copy(update={"layers": (), "weight_memory": None})
    yield "plain", None
    yield "int8", usual.model_copy(update={"scheme": "int8"})
    for size in GROUP_SIZES:
        config = usual.model_copy(update={"scheme": "int4", "group_size": size})
        try:
            check_groups(estimate.model, config)
        except ConfigurationError:
            continue
        yield f"int4, groups of {size}", config
    if asked.weight_memory is None:
        yield "these flags", asked

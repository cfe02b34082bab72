"""Where a decoder layer can take factors of its inputs without computing anything else."""

from __future__ import annotations

from collections.abc import Iterator

from vlmserve.families.spec import ArchSpec
from vlmserve.layer_specs import AttentionSpec
from vlmserve.models.decoder_layer import DecoderLayer
from vlmserve.quant.calibration import Fold

QKV, OUT, GATE_UP, UP, DOWN = (
    "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
CROSS_KV, CROSS_OUT = "cross_attn.kv_proj", "cross_attn.o_proj"


def layer_folds(layer: DecoderLayer, spec: ArchSpec) -> Iterator[Fold]:
    """The folds of a layer, by the names that its modules have inside it.

    Norms take factors of what they feed; values take those of the output projection, one for all heads that attend to
    the same; ups take those of downs, as they are only multiplied.
    """
    first = GATE_UP if spec.gated else UP
    if layer.attention_norm is not None:
        yield Fold((QKV, first) if spec.parallel else (QKV,), norm=layer.attention_norm)
    yield _of_values(OUT, QKV, layer.self_attn.qkv_proj.out_features, layer.self_attn.spec)
    if layer.cross_attn is not None and layer.cross_attn.kv_proj is not None:
        yield _of_values(CROSS_OUT, CROSS_KV, layer.cross_attn.kv_proj.out_features, layer.cross_attn.spec)
    if layer.mlp_norm is not None:
        yield Fold((first,), norm=layer.mlp_norm)
    if spec.gated:
        yield Fold((DOWN,), producer=GATE_UP, rows=(spec.intermediate_size, 2 * spec.intermediate_size))


def _of_values(consumer: str, producer: str, outputs: int, attention: AttentionSpec) -> Fold:
    """Values are the last of the `outputs` of what makes them."""
    values = attention.num_kv_heads * attention.head_size
    return Fold(
        (consumer,),
        producer=producer,
        rows=(outputs - values, outputs),
        heads=attention.num_heads,
        shared=attention.num_heads // attention.num_kv_heads,
    )

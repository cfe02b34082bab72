from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.families.family import LanguageFamily, NamedModel, VisionFamily
from vlmserve.families.gemma import GEMMA2, SANDWICH_NAMES
from vlmserve.families.gguf import GGUFText, Metadata
from vlmserve.families.spec import (
    ArchSpec,
    Config,
    ExpertsSpec,
    HeadNormSpec,
    Names,
    NormSpec,
    PerLayerSpec,
    layer_windows,
    require,
    usual_spec,
)
from vlmserve.layer_specs import AttentionSpec, RopeSpec

_TEXT: Config = {
    **GEMMA2,
    "vocab_size": 262144,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "use_bidirectional_attention": None,
    "pad_token_id": 0,
}
_GLOBAL_HEAD_SIZE = 512
_ROPES: Config = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_NAMES: Names = (
    *SANDWICH_NAMES,
    (r"^embed_tokens_per_layer\.", "per_layer.table."),
    (r"^per_layer_model_projection\.", "per_layer.projection."),
    (r"^per_layer_projection_norm\.", "per_layer.norm."),
    (r"\.per_layer_input_gate\.", ".per_layer.gate."),
    (r"\.per_layer_projection\.", ".per_layer.projection."),
    (r"\.post_per_layer_input_norm\.", ".per_layer_norm."),
    (r"\.router\.proj\.", ".beside.routed.router.linear."),
    (r"(?<!\.routed)\.router\.(scale|per_expert_scale)$", r".beside.routed.router.\1"),
    (r"(?<!\.routed)\.experts\.", ".beside.routed.experts."),
    (r"\.pre_feedforward_layernorm_2\.", ".beside.routed.norm."),
    (r"\.post_feedforward_layernorm_1\.", ".beside.mlp_norm."),
    (r"\.post_feedforward_layernorm_2\.", ".beside.routed_norm."),
)

_UNIFIED_TEXT: Config = {
    **_TEXT,
    "hidden_size": 2304,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 0,
}
_VISION_NAMES: Names = (
    (r"^(model\.)?(vision_embedder|embed_vision)\.(patch|pos)_", r"vision_tower.\3_"),
    (r"^(model\.)?embed_vision\.(multimodal_embedder\.)?", "multi_modal_projector."),
    (r"(_proj)\.linear\.", r"\1."),
)


def _gemma4(config: Config) -> ArchSpec:
    require(
        config,
        {
            "pad_token_id": (0, "the token whose embeddings images get"),
        },
    )
    if (ahead := config["use_bidirectional_attention"]) not in (None, "vision"):
        raise UnsupportedModelError(f"use_bidirectional_attention {ahead!r} is not supported; supported: 'vision'")
    windows = layer_windows(config, lambda layer: (layer + 1) % 6 != 0)
    layers, num_shared = len(windows), config["num_kv_shared_layers"]
    windows[-1] = None
    norm = NormSpec(config["rms_norm_eps"])
    size = config["hidden_size_per_layer_input"]
    spec = usual_spec(
        config,
        windows=windows,
        ropes=_ropes(config, windows),
        scale=1.0,
        norm=norm,
        norms="sandwich",
        head_norm=HeadNormSpec("head", norm, values=True),
        activation=config["hidden_activation"],
        embedding_scale=config["hidden_size"] ** 0.5,
        qkv_bias=config["attention_bias"],
        output_bias=config["attention_bias"],
        logit_cap=config["final_logit_softcapping"],
        per_layer=PerLayerSpec(size, config["vocab_size_per_layer_input"]) if size else None,
        layer_scalar=True,
        bidirectional=None if ahead is None else "images",
    )
    inner = config["intermediate_size"]
    wide = 2 * inner if config["use_double_wide_mlp"] else inner
    return replace(
        spec,
        mixers=tuple(_shared(_attention(config, spec.attention), num_shared)),
        intermediate_sizes=(inner,) * (layers - num_shared) + (wide,) * num_shared,
        experts=(_experts(config),) * layers if config["enable_moe_block"] else (),
    )


def _experts(config: Config) -> ExpertsSpec:
    return ExpertsSpec(
        count=config["num_experts"],
        top_k=config["top_k_experts"],
        inner_size=config["moe_intermediate_size"],
        router_norm=NormSpec(config["rms_norm_eps"]),
    )


def _ropes(config: Config, windows: Sequence[int | None]) -> list[RopeSpec]:
    by_kind, positions = config.get("rope_parameters") or _ROPES, config["max_position_embeddings"]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    sizes = [int(_changes(config, n, kind).get("head_dim") or config["head_dim"]) for n, kind in enumerate(kinds)]
    return [RopeSpec.from_config(size, 1e4, by_kind[kind], positions) for size, kind in zip(sizes, kinds, strict=True)]


def _changes(config: Config, layer: int, kind: str) -> dict[str, Any]:
    """Settings of one layer, stated by layer or for all full-attention layers."""
    if (by_layer := config.get("per_layer_config")) is not None:
        return next((dict(changes) for key, changes in by_layer.items() if int(key) == layer), {})
    if kind == "sliding_attention":
        return {}
    heads = config.get("num_global_key_value_heads") if config["attention_k_eq_v"] else None
    return {"head_dim": config.get("global_head_dim") or _GLOBAL_HEAD_SIZE, "num_key_value_heads": heads}


def _attention(config: Config, layers: Sequence[AttentionSpec]) -> list[AttentionSpec]:
    """Give the layers their own sizes."""
    found = []
    for number, layer in enumerate(layers):
        changes = _changes(config, number, "full_attention" if layer.window is None else "sliding_attention")
        is_full = layer.window is None
        kv_heads = changes.get("num_key_value_heads") or layer.num_kv_heads
        if layer.num_heads % kv_heads:
            raise ModelLoadError(f"config.json: {layer.num_heads} heads cannot share {kv_heads} of keys and values")
        found.append(
            replace(
                layer,
                num_kv_heads=kv_heads,
                head_size=changes.get("head_dim") or layer.head_size,
                is_causal=is_full and config["use_bidirectional_attention"] is not None,
                values_are_keys=is_full and config["attention_k_eq_v"],
            )
        )
    return found


def _shared(layers: list[AttentionSpec], num_shared: int) -> list[AttentionSpec]:
    """Let the last layers read the keys of the last earlier layer with the same window. Layers of an assistant, which
    all share, read another model's.
    """
    if num_shared == len(layers):
        return [replace(layer, shares_with=number) for number, layer in enumerate(layers)]
    own = layers[: len(layers) - num_shared]
    sources = {layer.window: number for number, layer in enumerate(own)}
    for layer in layers[len(own) :]:
        if layer.window not in sources:
            raise ModelLoadError("config.json: layers share keys, and no earlier layer of their kind has any")
        own.append(replace(layer, shares_with=sources[layer.window]))
    return own


def _gguf_traits(metadata: Metadata) -> Config:
    """Values that llama.cpp's conversion writes for each layer, or for window layers (``_swa``)."""
    slides, tensors = metadata.array("attention.sliding_window_pattern"), metadata.header.tensors
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    if set(kinds) != {"sliding_attention", "full_attention"} or len(kinds) < metadata.num_layers:
        raise UnsupportedModelError(
            f"{metadata.header.path}: only layers of both kinds, with and without windows, are supported"
        )
    full, sliding = (kinds.index(kind) for kind in ("full_attention", "sliding_attention"))
    heads = metadata.array("attention.head_count_kv") or [metadata["attention.head_count_kv"]] * len(kinds)
    widths = metadata.array("feed_forward_length") or [metadata["feed_forward_length"]]
    size, count = (metadata.get(name, 0) for name in ("embedding_length_per_layer_input", "expert_count"))
    bases = {"full_attention": "rope.freq_base", "sliding_attention": "rope.freq_base_swa"}
    found: dict[str, Any] = {
        "head_dim": metadata["attention.key_length_swa"],
        "global_head_dim": metadata["attention.key_length"],
        "num_key_value_heads": heads[sliding],
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        "num_kv_shared_layers": metadata.get("attention.shared_kv_layers", 0),
        "layer_types": kinds[: metadata.num_layers],
        "sliding_window": metadata["attention.sliding_window"],
        "rope_parameters": {
            kind: {**_ROPES[kind], "rope_theta": metadata.get(key, _ROPES[kind]["rope_theta"])}
            for kind, key in bases.items()
        },
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": size,
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }
    if size:
        found["vocab_size_per_layer_input"] = tensors["per_layer_token_embd.weight"].shape[0]
    if count:
        found |= {"enable_moe_block": True, "num_experts": count, "top_k_experts": metadata["expert_used_count"]}
        found["moe_intermediate_size"] = metadata["expert_feed_forward_length"]
    return found


_ROUTED = "beside.routed"
_GGUF = GGUFText(
    _gguf_traits,
    has_experts=True,
    layers_differ=True,
    layer_names={
        "inp_gate": "per_layer.gate",
        "proj": "per_layer.projection",
        "post_norm": "per_layer_norm",
        "layer_output_scale": "layer_scalar",
        "pre_ffw_norm_2": f"{_ROUTED}.norm",
        "post_ffw_norm_1": "beside.mlp_norm",
        "post_ffw_norm_2": "beside.routed_norm",
        "ffn_gate_inp": f"{_ROUTED}.router.linear",
        "ffn_gate_inp.scale": f"{_ROUTED}.router.scale",
        "ffn_gate_up_exps": f"{_ROUTED}.experts.gate_up_proj",
        "ffn_down_exps": f"{_ROUTED}.experts.down_proj",
        "ffn_down_exps.scale": f"{_ROUTED}.router.per_expert_scale",
    },
)

FAMILIES = (
    VisionFamily(
        model_type="gemma4",
        architecture="Gemma4ForConditionalGeneration",
        text_type="gemma4_text",
        tied=True,
        tower="vlmserve.models.vision.gemma4:Gemma4Vision",
        names=_VISION_NAMES,
        image_processor="vlmserve.media.pooled:PooledProcessor.from_files",
        image_processor_types=("Gemma4ImageProcessor",),
        image_token_id=258880,
        models="Gemma 4 E2B, E4B, 26B-A4B and 31B",
        short_names=(
            NamedModel("gemma4:e2b", "google/gemma-4-E2B-it", 4797114083, 402653184, 2558642880),
            NamedModel("gemma4:e4b", "google/gemma-4-E4B-it", 7632344554, 671088640, 3070479040),
            NamedModel("gemma4:26b", "google/gemma-4-26B-A4B-it", 25805936206, 738197504, 572794416),
            NamedModel("gemma4:31b", "google/gemma-4-31B-it", 31273088876, 1409286144, 575743536),
        ),
    ),
    VisionFamily(
        model_type="gemma4_unified",
        architecture="Gemma4UnifiedForConditionalGeneration",
        text_type="gemma4_unified_text",
        tied=True,
        tower="vlmserve.models.vision.gemma4_unified:Gemma4UnifiedVision",
        names=_VISION_NAMES,
        image_processor="vlmserve.media.pooled:UnifiedProcessor.from_files",
        image_processor_types=("Gemma4UnifiedImageProcessor",),
        image_token_id=258880,
        models="Gemma 4 12B",
        short_names=(NamedModel("gemma4:12b", "google/gemma-4-12B-it", 11957272624, 1006632960, 49922304),),
    ),
    LanguageFamily(
        model_type="gemma4_unified_text",
        architecture="Gemma4UnifiedForCausalLM",
        defaults=_UNIFIED_TEXT,
        build=_gemma4,
        names=_NAMES,
        models="Gemma 4 12B, text",
    ),
    LanguageFamily(
        model_type="gemma4_text",
        architecture="Gemma4ForCausalLM",
        defaults=_TEXT,
        build=_gemma4,
        names=_NAMES,
        gguf={"gemma4": _GGUF},
        models="Gemma 4 E2B, E4B, 26B-A4B and 31B, text",
    ),
)

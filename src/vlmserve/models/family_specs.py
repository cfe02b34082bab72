"""How the config.json of each decoder family becomes an `ArchSpec`: a function for each, from the family's name and a
config completed by its defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.layer_specs import AttentionSpec, RopeSpec
from vlmserve.models.spec import ArchSpec, Config, HeadNormSpec, NormSpec, QueryGrowth

GPT: Final[Mapping[str, Any]] = {"gated": False, "qkv_bias": True, "output_bias": True, "mlp_bias": True}
"""Two projections with biases instead of a gate, as GPT-2 has them."""


def _decoder(family: str, config: Config, **differences: Any) -> ArchSpec:
    """A spec with what most configs call by the same names; differences: fields of it that are otherwise.

    Beside those fields: windows, scale, soft_cap of attention; rope_part and interleaved of `RopeSpec`.
    """
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads or not (config.get("head_dim") or hidden_size % num_heads == 0):
        raise ModelLoadError(
            f"config.json: {num_heads} attention heads do not fit {num_kv_heads} key-value heads or width {hidden_size}"
        )
    head_size = config.get("head_dim") or hidden_size // num_heads
    layers = config["num_hidden_layers"]
    windows = differences.pop("windows", [None] * layers)
    scale = differences.pop("scale", head_size**-0.5)
    soft_cap = differences.pop("soft_cap", None)
    ropes = differences.pop("ropes", None)
    if ropes is None:
        ropes = [_rope(config, head_size, differences)] * layers
    values: dict[str, Any] = {
        "norm": NormSpec(config.get("rms_norm_eps", 1e-6)),
        "activation": config.get("hidden_act"),
        "tied_embeddings": bool(config["tie_word_embeddings"]),
        "max_position": next((rope.context for rope in ropes if rope), config["max_position_embeddings"]),
        **differences,
    }
    values.pop("rope_part", None)
    values.pop("interleaved", None)
    return ArchSpec(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        attention=tuple(
            AttentionSpec(num_heads, num_kv_heads, head_size, scale, window, soft_cap) for window in windows
        ),
        ropes=tuple(ropes),
        **values,
    )


def _rope(config: Config, head_size: int, differences: Config) -> RopeSpec:
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if "original_max_position_embeddings" in config:
        parameters.setdefault("original_max_position_embeddings", config["original_max_position_embeddings"])
    return RopeSpec.from_config(
        head_size,
        config["rope_theta"],
        parameters,
        config["max_position_embeddings"],
        part=config.get("partial_rotary_factor", differences.get("rope_part", 1.0)),
        interleaved=differences.get("interleaved", False),
    )


def _windows(config: Config, default: Callable[[int], bool]) -> list[int | None]:
    """A window for each layer that slides; default: which these are where the config names no kinds."""
    layers = range(config["num_hidden_layers"])
    kinds = config.get("layer_types") or ["sliding_attention" if default(layer) else "" for layer in layers]
    return [config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]


def llama(family: str, config: Config) -> ArchSpec:
    bias = config.get("attention_bias", False)
    return _decoder(family, config, qkv_bias=bias, output_bias=bias, mlp_bias=config.get("mlp_bias", False))


def mistral(family: str, config: Config) -> ArchSpec:
    return _decoder(family, config, windows=[config["sliding_window"]] * config["num_hidden_layers"])


def ministral3(family: str, config: Config) -> ArchSpec:
    spec = mistral(family, config)
    beta = (config.get("rope_scaling") or config["rope_parameters"]).get("llama_4_scaling_beta")
    rope = spec.ropes[0]
    assert rope is not None
    return spec if beta is None else replace(spec, query_growth=QueryGrowth(rope.original_context, beta))


def qwen2(family: str, config: Config) -> ArchSpec:
    return _decoder(family, config, windows=_qwen_windows(config), qkv_bias=True)


def qwen3(family: str, config: Config) -> ArchSpec:
    return _decoder(
        family,
        config,
        windows=_qwen_windows(config),
        qkv_bias=config["attention_bias"],
        output_bias=config["attention_bias"],
        head_norm=HeadNormSpec("head", NormSpec(config["rms_norm_eps"])),
    )


def qwen3_vl(family: str, config: Config) -> ArchSpec:
    """The text model of Qwen3-VL, whose frames, rows and columns always rotate pairs in turn."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    sections = {"mrope_section": [24, 20, 20], **rope, "mrope_interleaved": True}
    spec = qwen3(family, {**config, "rope_scaling": sections})
    if config["deepstack"] > len(spec.attention):
        raise ModelLoadError(
            f"config.json: images have features for {config['deepstack']} layers (deepstack_visual_indexes), and the "
            f"decoder has {len(spec.attention)}"
        )
    return replace(spec, deepstack=config["deepstack"])


def _qwen_windows(config: Config) -> list[int | None]:
    if not config["use_sliding_window"]:
        return [None] * config["num_hidden_layers"]
    return _windows(config, lambda layer: layer >= config["max_window_layers"])


def phi(family: str, config: Config) -> ArchSpec:
    norm = NormSpec(config["layer_norm_eps"], layer=True)
    return _decoder(
        family,
        config,
        norm=norm,
        head_norm=HeadNormSpec("head", norm, bias=True) if config["qk_layernorm"] else None,
        rope_part=0.5,
        parallel=True,
        **GPT,
        head_bias=True,
    )


def phi3(family: str, config: Config) -> ArchSpec:
    return _decoder(family, config, windows=[config["sliding_window"]] * config["num_hidden_layers"])


def stablelm(family: str, config: Config) -> ArchSpec:
    norm = NormSpec(config["layer_norm_eps"], layer=True)
    return _decoder(
        family,
        config,
        norm=norm,
        head_norm=HeadNormSpec("each head", norm) if config["qk_layernorm"] else None,
        rope_part=0.25,
        parallel=config["use_parallel_residual"],
        qkv_bias=config["use_qkv_bias"],
    )


def starcoder2(family: str, config: Config) -> ArchSpec:
    bias = config["use_bias"]
    return _decoder(
        family,
        config,
        norm=NormSpec(config["norm_epsilon"], layer=True),
        windows=[config["sliding_window"]] * config["num_hidden_layers"],
        gated=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def gpt_bigcode(family: str, config: Config) -> ArchSpec:
    if not config["multi_query"]:
        raise UnsupportedModelError("GPTBigCode with a key and value head for each query head is not supported")
    hidden_size, positions = config["n_embd"], config["n_positions"]
    settings = {
        **config,
        "hidden_size": hidden_size,
        "num_attention_heads": config["n_head"],
        "num_key_value_heads": 1,
        "num_hidden_layers": config["n_layer"],
        "intermediate_size": config["n_inner"] or 4 * hidden_size,
        "max_position_embeddings": positions,
    }
    return _decoder(
        family,
        settings,
        norm=NormSpec(config["layer_norm_epsilon"], layer=True),
        activation=config["activation_function"],
        ropes=[None] * config["n_layer"],
        learned_positions=positions,
        **GPT,
        **({} if config["scale_attn_weights"] else {"scale": 1.0}),
    )


def glm(family: str, config: Config) -> ArchSpec:
    return _decoder(
        family,
        config,
        rope_part=0.5,
        interleaved=True,
        qkv_bias=config["attention_bias"],
        norms="sandwich" if family == "glm4" else "pre",
    )


def glm_ocr(family: str, config: Config) -> ArchSpec:
    """The text model of GLM-OCR: GLM-4's layers, of which positions in three axes rotate whole heads."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    sections = {"mrope_section": [8, 12, 12], **rope}
    return _decoder(family, {**config, "rope_scaling": sections}, interleaved=True, norms="sandwich")


def paddleocr_vl(family: str, config: Config) -> ArchSpec:
    """The text model of PaddleOCR-VL, that of ERNIE 4.5 with positions in three axes."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    bias = config["use_bias"]
    return _decoder(
        family,
        {**config, "rope_scaling": {"mrope_section": [16, 24, 24], **rope}},
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def chatglm(family: str, config: Config) -> ArchSpec:
    """ChatGLM2, ChatGLM3 and GLM-4 as they were first published (https://arxiv.org/abs/2406.12793)."""
    needed = {
        "position_encoding_2d": (False, "the first ChatGLM-6B"),
        "vision_config": (None, "GLM-4V"),
        "multi_query_attention": (True, "a key and value head for each query head"),
        "apply_residual_connection_post_layernorm": (False, "residuals of normed states"),
        "post_layer_norm": (True, "no norm after the last layer"),
        "pre_seq_len": (None, "a learned prefix"),
        "quantization_bit": (0, "weights in ChatGLM's own format of few bits"),
    }
    _refuse_others(config, needed)
    norm = NormSpec(config["layernorm_epsilon"], layer=not config["rmsnorm"])
    settings = {
        **config,
        "vocab_size": config["padded_vocab_size"],
        "num_hidden_layers": config["num_layers"],
        "num_key_value_heads": config["multi_query_group_num"],
        "head_dim": config["kv_channels"],
        "intermediate_size": config["ffn_hidden_size"],
        "max_position_embeddings": config["seq_length"],
        "rope_theta": 10000.0 * config["rope_ratio"],
    }
    bias = config["add_bias_linear"]
    return _decoder(
        family,
        settings,
        norm=norm,
        activation="silu",
        rope_part=0.5,
        interleaved=config["original_rope"],
        qkv_bias=bias or config["add_qkv_bias"],
        output_bias=bias,
        mlp_bias=bias,
    )


def qwen(family: str, config: Config) -> ArchSpec:
    """The first Qwen (https://arxiv.org/abs/2309.16609). The base of its wavelengths grows with the length of a prompt
    that is longer than what it was trained on, and its queries with their position."""
    trained = config["seq_length"]
    longest = max(trained, config["max_position_embeddings"]) if config["use_dynamic_ntk"] else trained
    head_size, layers, bias = config["kv_channels"], config["num_hidden_layers"], not config["no_bias"]
    settings = {
        **config,
        "num_key_value_heads": None,
        "head_dim": head_size,
        # Of both projections together.
        "intermediate_size": config["intermediate_size"] // 2,
    }
    stretching = {"rope_type": "prompt_ntk", "original_max_position_embeddings": trained}
    rope = RopeSpec.from_config(head_size, config["rotary_emb_base"], stretching, longest, part=config["rotary_pct"])
    return _decoder(
        family,
        settings,
        norm=NormSpec(config["layer_norm_epsilon"]),
        activation="silu",
        ropes=[rope] * layers,
        query_growth=QueryGrowth(trained) if config["use_logn_attn"] else None,
        qkv_bias=True,
        output_bias=bias,
        mlp_bias=bias,
        **({} if config["scale_attn_weights"] else {"scale": 1.0}),
    )


def _refuse_others(config: Config, needed: Mapping[str, tuple[Any, str]]) -> None:
    """Raises UnsupportedModelError where a setting is not the one needed; needed: it, and what another one means."""
    for name, (wanted, meaning) in needed.items():
        if (config.get(name) or None) != (wanted or None):
            raise UnsupportedModelError(
                f"config.json: {name} is {config.get(name)!r} ({meaning}), which is not supported"
            )


def gemma(family: str, config: Config) -> ArchSpec:
    return _decoder(family, config, **_gemma_traits(config))


def gemma2(family: str, config: Config) -> ArchSpec:
    return _decoder(
        family,
        config,
        **_gemma_traits(config),
        windows=_windows(config, lambda layer: layer % 2 == 0),
        scale=config["query_pre_attn_scalar"] ** -0.5,
        soft_cap=config["attn_logit_softcapping"],
        logit_cap=config["final_logit_softcapping"],
        norms="sandwich",
    )


def gemma3(family: str, config: Config) -> ArchSpec:
    windows = _windows(config, lambda layer: (layer + 1) % config["sliding_window_pattern"] != 0)
    return _decoder(
        family,
        config,
        **_gemma_traits(config),
        windows=windows,
        ropes=_gemma3_ropes(config, windows),
        head_norm=HeadNormSpec("head", NormSpec(config["rms_norm_eps"], offset=1.0)),
        scale=config["query_pre_attn_scalar"] ** -0.5,
        soft_cap=config["attn_logit_softcapping"],
        logit_cap=config["final_logit_softcapping"],
        norms="sandwich",
    )


def _gemma_traits(config: Config) -> dict[str, Any]:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("bidirectional attention (use_bidirectional_attention) is not supported")
    return {
        "norm": NormSpec(config["rms_norm_eps"], offset=1.0),
        "activation": config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh",
        "embedding_scale": config["hidden_size"] ** 0.5,
        "qkv_bias": config["attention_bias"],
        "output_bias": config["attention_bias"],
    }


def _gemma3_ropes(config: Config, windows: Sequence[int | None]) -> list[RopeSpec]:
    """Layers with a window are rotated by a shorter wavelength than those without, and are not stretched."""
    by_kind = config.get("rope_parameters") or {}
    everywhere = by_kind.get("full_attention") or {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {})}
    nearby = by_kind.get("sliding_attention") or {"rope_theta": config["rope_local_base_freq"]}
    head_size, positions = config["head_dim"], config["max_position_embeddings"]
    full, sliding = (RopeSpec.from_config(head_size, 1e4, parameters, positions) for parameters in (everywhere, nearby))
    return [full if window is None else sliding for window in windows]


def smollm3(family: str, config: Config) -> ArchSpec:
    layers = config["num_hidden_layers"]
    interval = config["no_rope_layer_interval"]
    rotated = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(layers)]
    rope = _rope(config, config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"], {})
    windows: list[int | None] = [None] * layers
    if config["use_sliding_window"]:
        windows = _windows(config, lambda layer: not rotated[layer])
    return _decoder(
        family,
        config,
        windows=windows,
        ropes=[rope if rotates else None for rotates in rotated],
        qkv_bias=config["attention_bias"],
        output_bias=config["attention_bias"],
        mlp_bias=config["mlp_bias"],
    )


def olmo2(family: str, config: Config) -> ArchSpec:
    return _decoder(
        family,
        config,
        norms="output",
        head_norm=HeadNormSpec("row", NormSpec(config["rms_norm_eps"])),
        qkv_bias=config["attention_bias"],
        output_bias=config["attention_bias"],
    )


def moondream(family: str, config: Config) -> ArchSpec:
    return _decoder(
        family,
        config,
        norm=NormSpec(1e-5, layer=True),
        rope_part=0.5,
        parallel=True,
        **GPT,
        head_bias=True,
    )


def bert_decoder(family: str, config: Config) -> ArchSpec:
    layers, positions = config["num_hidden_layers"], config["max_position_embeddings"]
    return _decoder(
        family,
        config,
        norm=NormSpec(config["layer_norm_eps"], layer=True),
        norms="post",
        ropes=[None] * layers,
        learned_positions=positions,
        embedding_norm=True,
        **GPT,
        head_transform=True,
        head_bias=True,
        cross_size=config["encoder_hidden_size"],
    )

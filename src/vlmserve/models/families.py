"""The decoder families: how each one's config.json becomes an `ArchSpec`, and its tensors' names ours.

A family is a row of `FAMILIES`. Published configs leave out what equals the defaults of transformers' own classes, so a
row has those that matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.kernels.attention import AttentionSpec
from vlmserve.layers.rope import RopeSpec
from vlmserve.models.spec import ArchSpec, Config, HeadNormSpec, NormSpec

Names = Sequence[tuple[str, str]]

DEFAULT_FAMILY = "llama"
"""Of configs that name none, like those of the first LLaVA checkpoints."""


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table.

    architecture: as config.json names it. build: from the family's name and a config completed by `defaults`.
    names: regular expressions for tensors' names and what to put in their place, tried in turn, those of `COMMON` last.
    also: other names of the architecture. ends: tokens that end an answer whatever the files say, from such a config.
    end_token: the field of configs that says which token ends an answer. models: what people know of it; nothing for
    what is only ever half of a vision-language model.
    """

    architecture: str
    defaults: Config
    build: Callable[[str, Config], ArchSpec]
    names: Names = ()
    also: tuple[str, ...] = ()
    ends: Callable[[Config], Collection[int]] = lambda config: ()
    end_token: str = "eos_token_id"
    models: str = ""

    def rename(self, name: str) -> str:
        """A tensor's name in the language model of a checkpoint to its name here."""
        for pattern, replacement in (*self.names, *COMMON):
            name = re.sub(pattern, replacement, name)
        return name


COMMON: Names = (
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".mlp_norm."),
)


def decoder_family(config: Config) -> Family:
    """The row of a text config. Raises UnsupportedModelError for a family that is not implemented."""
    name = config.get("model_type", DEFAULT_FAMILY)
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"language model type {name!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]


def decoder_spec(config: Config) -> ArchSpec:
    """The spec of a text config, as it stands in config.json or in its ``text_config``.

    Raises UnsupportedModelError for a family or option that is not implemented, ModelLoadError for impossible sizes.
    """
    family = decoder_family(config)
    return family.build(config.get("model_type", DEFAULT_FAMILY), {**family.defaults, **config})


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


def _llama(family: str, config: Config) -> ArchSpec:
    bias = config.get("attention_bias", False)
    return _decoder(family, config, qkv_bias=bias, output_bias=bias, mlp_bias=config.get("mlp_bias", False))


def _mistral(family: str, config: Config) -> ArchSpec:
    return _decoder(family, config, windows=[config["sliding_window"]] * config["num_hidden_layers"])


def _qwen2(family: str, config: Config) -> ArchSpec:
    return _decoder(family, config, windows=_qwen_windows(config), qkv_bias=True)


def _qwen3(family: str, config: Config) -> ArchSpec:
    return _decoder(
        family,
        config,
        windows=_qwen_windows(config),
        qkv_bias=config["attention_bias"],
        output_bias=config["attention_bias"],
        head_norm=HeadNormSpec("head", NormSpec(config["rms_norm_eps"])),
    )


def _qwen_windows(config: Config) -> list[int | None]:
    if not config["use_sliding_window"]:
        return [None] * config["num_hidden_layers"]
    return _windows(config, lambda layer: layer >= config["max_window_layers"])


def _phi(family: str, config: Config) -> ArchSpec:
    norm = NormSpec(config["layer_norm_eps"], layer=True)
    return _decoder(
        family,
        config,
        norm=norm,
        head_norm=HeadNormSpec("head", norm, bias=True) if config["qk_layernorm"] else None,
        rope_part=0.5,
        parallel=True,
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


def _phi3(family: str, config: Config) -> ArchSpec:
    return _decoder(family, config, windows=[config["sliding_window"]] * config["num_hidden_layers"])


def _stablelm(family: str, config: Config) -> ArchSpec:
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


def _starcoder2(family: str, config: Config) -> ArchSpec:
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


def _gpt_bigcode(family: str, config: Config) -> ArchSpec:
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
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        **({} if config["scale_attn_weights"] else {"scale": 1.0}),
    )


def _glm(family: str, config: Config) -> ArchSpec:
    return _decoder(
        family,
        config,
        rope_part=0.5,
        interleaved=True,
        qkv_bias=config["attention_bias"],
        norms="around" if family == "glm4" else "before",
    )


def _chatglm(family: str, config: Config) -> ArchSpec:
    """ChatGLM2, ChatGLM3 and GLM-4 as they were first published (https://arxiv.org/abs/2406.12793)."""
    needed = {
        "position_encoding_2d": (False, "the first ChatGLM-6B"),
        "vision_config": (None, "GLM-4V"),
        "multi_query_attention": (True, "a key and value head for each query head"),
        "apply_residual_connection_post_layernorm": (False, "residuals of normed states"),
        "post_layer_norm": (True, "no norm behind the last layer"),
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


def _qwen(family: str, config: Config) -> ArchSpec:
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
        log_context=trained if config["use_logn_attn"] else None,
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


def _gemma(family: str, config: Config) -> ArchSpec:
    return _decoder(family, config, **_gemma_traits(config))


def _gemma2(family: str, config: Config) -> ArchSpec:
    return _decoder(
        family,
        config,
        **_gemma_traits(config),
        windows=_windows(config, lambda layer: layer % 2 == 0),
        scale=config["query_pre_attn_scalar"] ** -0.5,
        soft_cap=config["attn_logit_softcapping"],
        logit_cap=config["final_logit_softcapping"],
        norms="around",
    )


def _gemma3(family: str, config: Config) -> ArchSpec:
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
        norms="around",
    )


def _gemma_traits(config: Config) -> dict[str, Any]:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("a Gemma that sees what comes later (use_bidirectional_attention) is not supported")
    return {
        "norm": NormSpec(config["rms_norm_eps"], offset=1.0),
        "activation": config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh",
        "embedding_scale": config["hidden_size"] ** 0.5,
        "qkv_bias": config["attention_bias"],
        "output_bias": config["attention_bias"],
    }


def _gemma3_ropes(config: Config, windows: Sequence[int | None]) -> list[RopeSpec]:
    """Layers with a window turn by a shorter wavelength than those that see all, and are not stretched."""
    by_kind = config.get("rope_parameters") or {}
    everywhere = by_kind.get("full_attention") or {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {})}
    nearby = by_kind.get("sliding_attention") or {"rope_theta": config["rope_local_base_freq"]}
    head_size, positions = config["head_dim"], config["max_position_embeddings"]
    full, sliding = (RopeSpec.from_config(head_size, 1e4, parameters, positions) for parameters in (everywhere, nearby))
    return [full if window is None else sliding for window in windows]


def _smollm3(family: str, config: Config) -> ArchSpec:
    layers = config["num_hidden_layers"]
    interval = config["no_rope_layer_interval"]
    turns = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(layers)]
    rope = _rope(config, config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"], {})
    windows: list[int | None] = [None] * layers
    if config["use_sliding_window"]:
        windows = _windows(config, lambda layer: not turns[layer])
    return _decoder(
        family,
        config,
        windows=windows,
        ropes=[rope if turn else None for turn in turns],
        qkv_bias=config["attention_bias"],
        output_bias=config["attention_bias"],
        mlp_bias=config["mlp_bias"],
    )


def _olmo2(family: str, config: Config) -> ArchSpec:
    return _decoder(
        family,
        config,
        norms="after",
        head_norm=HeadNormSpec("row", NormSpec(config["rms_norm_eps"])),
        qkv_bias=config["attention_bias"],
        output_bias=config["attention_bias"],
    )


def _moondream(family: str, config: Config) -> ArchSpec:
    return _decoder(
        family,
        config,
        norm=NormSpec(1e-5, layer=True),
        rope_part=0.5,
        parallel=True,
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


def _bert_decoder(family: str, config: Config) -> ArchSpec:
    layers, positions = config["num_hidden_layers"], config["max_position_embeddings"]
    return _decoder(
        family,
        config,
        norm=NormSpec(config["layer_norm_eps"], layer=True),
        norms="sums",
        ropes=[None] * layers,
        learned_positions=positions,
        embedding_norm=True,
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_transform=True,
        head_bias=True,
        cross_size=config["encoder_hidden_size"],
    )


_LLAMA: Config = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 2,
}
_QWEN: Config = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "eos_token_id": None,
}
_QWEN2_VL: Config = {
    **_QWEN,
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
}
_GLM: Config = {
    **_LLAMA,
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}
_GEMMA: Config = {
    **_LLAMA,
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": None,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_GEMMA2: Config = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_PHI_MLP: Names = ((r"\.mlp\.fc1\.", ".mlp.up_proj."), (r"\.mlp\.fc2\.", ".mlp.down_proj."))
_GPT_MLP: Names = ((r"\.mlp\.c_fc\.", ".mlp.up_proj."), (r"\.mlp\.c_proj\.", ".mlp.down_proj."))
_GPT: Names = (
    (r"^(transformer\.)?wte\.", "embed_tokens."),
    (r"^(transformer\.)?wpe\.", "position_embeddings."),
    (r"^(transformer\.)?h\.", "layers."),
    (r"^(transformer\.)?ln_f\.", "norm."),
    (r"\.ln_1\.", ".attention_norm."),
    (r"\.ln_2\.", ".mlp_norm."),
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    *_GPT_MLP,
)
_HEAD_NORMS: Names = ((r"\.([qk])_layernorm\.", r".\1_norm."),)
# With norms on both sides, the name that others give to the norm before the MLP means the one after attention.
_AROUND: Names = (
    (r"\.post_attention_layernorm\.", ".attention_output_norm."),
    (r"\.pre_feedforward_layernorm\.", ".mlp_norm."),
    (r"\.post_feedforward_layernorm\.", ".mlp_output_norm."),
)

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _LLAMA, _llama, models="Llama 1 to 3.3, Vicuna, Yi, SmolLM 1 and 2, TinyLlama"),
    "mistral": Family(
        "MistralForCausalLM",
        {
            **_LLAMA,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
        _mistral,
        models="Mistral, Zephyr",
    ),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN, _qwen2, models="Qwen 2 and 2.5"),
    "qwen2_vl_text": Family("Qwen2VLForConditionalGeneration", _QWEN2_VL, _qwen2),
    "qwen2_5_vl_text": Family("Qwen2_5_VLForConditionalGeneration", _QWEN2_VL, _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", {**_QWEN, "head_dim": 128}, _qwen3, models="Qwen 3"),
    "phi": Family(
        "PhiForCausalLM",
        {
            **_LLAMA,
            "vocab_size": 51200,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "qk_layernorm": False,
        },
        _phi,
        (*_PHI_MLP, *_HEAD_NORMS, (r"\.self_attn\.dense\.", ".self_attn.o_proj."), (r"^final_layernorm\.", "norm.")),
        models="Phi 1, 1.5 and 2",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {
            **_LLAMA,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "eos_token_id": 32000,
        },
        _phi3,
        models="Phi 3, 3.5 and 4",
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        {
            **_LLAMA,
            "vocab_size": 50304,
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": False,
            "eos_token_id": 0,
        },
        _stablelm,
        ((r"\.([qk])_layernorm\.norms\.", r".\1_norm."),),
        models="StableLM 1 and 2",
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        {
            **_LLAMA,
            "vocab_size": 49152,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "sliding_window": None,
            "use_bias": True,
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
        },
        _starcoder2,
        _GPT_MLP,
        models="StarCoder 2",
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM",
        {
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_inner": None,
            "activation_function": "gelu_pytorch_tanh",
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "multi_query": True,
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
        },
        _gpt_bigcode,
        _GPT,
        models="StarCoder, SantaCoder",
    ),
    "qwen": Family(
        "QWenLMHeadModel",
        {
            **_LLAMA,
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "kv_channels": 128,
            "layer_norm_epsilon": 1e-6,
            "rotary_emb_base": 10000.0,
            "rotary_pct": 1.0,
            "seq_length": 2048,
            "max_position_embeddings": 8192,
            "use_dynamic_ntk": True,
            "use_logn_attn": True,
            "scale_attn_weights": True,
            "no_bias": True,
            "eos_token_id": 151643,
        },
        _qwen,
        (*_GPT, (r"\.mlp\.w1\.", ".mlp.up_proj."), (r"\.mlp\.w2\.", ".mlp.gate_proj.")),
        # The ends of turns, of which its files name none.
        ends=lambda config: () if config["vocab_size"] < 151646 else (151644, 151645),
        models="Qwen 1",
    ),
    "glm": Family("GlmForCausalLM", _GLM, _glm, models="GLM-4 9B (-hf)"),
    "glm4": Family(
        "Glm4ForCausalLM",
        _GLM,
        _glm,
        (
            (r"\.post_self_attn_layernorm\.", ".attention_output_norm."),
            (r"\.post_mlp_layernorm\.", ".mlp_output_norm."),
        ),
        models="GLM-4-0414",
    ),
    "chatglm": Family(
        "ChatGLMForConditionalGeneration",
        {
            "padded_vocab_size": 65024,
            "hidden_size": 4096,
            "num_layers": 28,
            "num_attention_heads": 32,
            "multi_query_attention": False,
            "multi_query_group_num": 1,
            "kv_channels": 128,
            "ffn_hidden_size": 13696,
            "seq_length": 2048,
            "layernorm_epsilon": 1e-5,
            "rmsnorm": True,
            "rope_ratio": 1,
            "original_rope": True,
            "add_qkv_bias": False,
            "add_bias_linear": False,
            "apply_residual_connection_post_layernorm": False,
            "post_layer_norm": True,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
        },
        _chatglm,
        (
            (r"^embedding\.word_embeddings\.", "embed_tokens."),
            (r"^encoder\.layers\.", "layers."),
            (r"^encoder\.final_layernorm\.", "norm."),
            (r"^output_layer\.", "lm_head."),
            (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
            (r"\.mlp\.dense_h_to_4h\.", ".mlp.gate_up_proj."),
            (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
        ),
        also=("ChatGLMModel",),
        # ChatGLM3's answers end where another turn would begin, which its files do not say.
        ends=lambda config: (64795, 64797) if config["padded_vocab_size"] == 65024 else (),
        models="ChatGLM 2 and 3, GLM-4 9B",
    ),
    "gemma": Family("GemmaForCausalLM", _GEMMA, _gemma, models="Gemma"),
    "gemma2": Family("Gemma2ForCausalLM", _GEMMA2, _gemma2, _AROUND, models="Gemma 2"),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **_GEMMA2,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": None,
            "sliding_window_pattern": 6,
        },
        _gemma3,
        _AROUND,
        models="Gemma 3 1B",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            **_LLAMA,
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layer_interval": 4,
            "eos_token_id": 128001,
        },
        _smollm3,
        models="SmolLM 3",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {**_LLAMA, "vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
        _olmo2,
        (
            (r"\.post_attention_layernorm\.", ".attention_output_norm."),
            (r"\.post_feedforward_layernorm\.", ".mlp_output_norm."),
        ),
        models="OLMo 2",
    ),
    "moondream_text": Family(
        "HfMoondream",
        {
            **_LLAMA,
            "vocab_size": 51200,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 2048,
            "eos_token_id": 50256,
        },
        _moondream,
        (
            (r"^wte$", "embed_tokens.weight"),
            (r"^post_ln\.", "norm."),
            (r"^blocks\.", "layers."),
            (r"\.ln\.", ".attention_norm."),
            (r"\.attn\.qkv\.", ".self_attn.qkv_proj."),
            (r"\.attn\.proj\.", ".self_attn.o_proj."),
            *_PHI_MLP,
        ),
    ),
    "blip_text_model": Family(
        "BlipForConditionalGeneration",
        {
            "vocab_size": 30524,
            "hidden_size": 768,
            "encoder_hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "max_position_embeddings": 512,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "tie_word_embeddings": True,
            "sep_token_id": 102,
        },
        _bert_decoder,
        (
            (r"^encoder\.layer\.", "layers."),
            (r"^embeddings\.word_embeddings\.", "embed_tokens."),
            (r"^embeddings\.position_embeddings\.", "position_embeddings."),
            (r"^embeddings\.LayerNorm\.", "embedding_norm."),
            (r"^cls\.predictions\.transform\.LayerNorm\.", "head_transform.norm."),
            (r"^cls\.predictions\.transform\.", "head_transform."),
            # The bias is there twice.
            (r"^cls\.predictions\.decoder\.weight$", "lm_head.weight"),
            (r"^cls\.predictions\.bias$", "lm_head.bias"),
            (r"\.crossattention\.self\.query\.", ".cross_attn.q_proj."),
            (r"\.crossattention\.self\.key\.", ".cross_attn.k_proj."),
            (r"\.crossattention\.self\.value\.", ".cross_attn.v_proj."),
            (r"\.crossattention\.output\.dense\.", ".cross_attn.o_proj."),
            (r"\.crossattention\.output\.LayerNorm\.", ".cross_output_norm."),
            (r"\.attention\.self\.query\.", ".self_attn.q_proj."),
            (r"\.attention\.self\.key\.", ".self_attn.k_proj."),
            (r"\.attention\.self\.value\.", ".self_attn.v_proj."),
            (r"\.attention\.output\.dense\.", ".self_attn.o_proj."),
            (r"\.attention\.output\.LayerNorm\.", ".attention_output_norm."),
            (r"\.intermediate\.dense\.", ".mlp.up_proj."),
            (r"\.output\.dense\.", ".mlp.down_proj."),
            (r"\.output\.LayerNorm\.", ".mlp_output_norm."),
        ),
        end_token="sep_token_id",
    ),
}

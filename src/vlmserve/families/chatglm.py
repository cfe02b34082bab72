"""ChatGLM2, ChatGLM3 and GLM-4 as first published (https://arxiv.org/abs/2406.12793)."""

from __future__ import annotations

from vlmserve.families.family import LanguageFamily
from vlmserve.families.spec import ArchSpec, Config, Names, NormSpec, require, usual_spec

_CHATGLM: Config = {
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
}
_NEEDED = {
    "position_encoding_2d": (False, "the first ChatGLM-6B"),
    "vision_config": (None, "GLM-4V"),
    "multi_query_attention": (True, "a key and value head for each query head"),
    "apply_residual_connection_post_layernorm": (False, "residuals of normed states"),
    "post_layer_norm": (True, "no norm after the last layer"),
    "pre_seq_len": (None, "a learned prefix"),
    "quantization_bit": (0, "weights in ChatGLM's own format of few bits"),
}
_NAMES: Names = (
    (r"^embedding\.word_embeddings\.", "embed_tokens."),
    (r"^encoder\.layers\.", "layers."),
    (r"^encoder\.final_layernorm\.", "norm."),
    (r"^output_layer\.", "lm_head."),
    (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
)
_TEMPLATE = (
    "[gMASK]sop{% for message in messages %}<|{{ message.role }}|>\n {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The first revisions of ChatGLM3 build their prompt in code."""


def _chatglm(config: Config) -> ArchSpec:
    require(config, _NEEDED)
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
    return usual_spec(
        settings,
        norm=NormSpec(config["layernorm_epsilon"], layer=not config["rmsnorm"]),
        activation="silu",
        rope_part=0.5,
        interleaved=config["original_rope"],
        qkv_bias=bias or config["add_qkv_bias"],
        output_bias=bias,
        mlp_bias=bias,
    )


def _template(config: Config, generation_config: Config) -> str | None:
    return _TEMPLATE if "chatglm3" in str(config.get("_name_or_path")) else None


FAMILIES = (
    LanguageFamily(
        model_type="chatglm",
        architecture="ChatGLMForConditionalGeneration",
        other_architectures=("ChatGLMModel",),
        defaults=_CHATGLM,
        build=_chatglm,
        names=_NAMES,
        # ChatGLM3's answers end where the next turn would begin, which its files do not say.
        more_ends=lambda config: (64795, 64797) if config["padded_vocab_size"] == 65024 else (),
        tokenizer="vlmserve.prompt.convert:chatglm",
        chat_template=_template,
        models="ChatGLM 2 and 3, GLM-4 9B",
    ),
)

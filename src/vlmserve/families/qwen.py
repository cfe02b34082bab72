"""The first Qwen (https://arxiv.org/abs/2309.16609) and Qwen-VL (https://arxiv.org/abs/2308.12966)."""

from __future__ import annotations

from collections.abc import Mapping

from vlmserve.families.family import LanguageFamily, VisionFamily
from vlmserve.families.gpt import GPT_NAMES
from vlmserve.families.llama import LLAMA
from vlmserve.families.spec import ArchSpec, Config, Names, NormSpec, QueryGrowth, usual_spec
from vlmserve.layer_specs import RopeSpec

_QWEN: Config = {
    **LLAMA,
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
}
_NAMES: Names = (*GPT_NAMES, (r"\.mlp\.w1\.", ".mlp.up_proj."), (r"\.mlp\.w2\.", ".mlp.gate_proj."))
_TOKENIZER = "vlmserve.prompt.convert:qwen"
_TEMPLATE = (
    "{% set images = namespace(count=0) %}"
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{% set images.count = images.count + 1 %}"
    "Picture {{ images.count }}: <img>{{ image_token }}</img>{{ '\n' }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with numbered images, which the checkpoints' own code writes."""


def _qwen(config: Config) -> ArchSpec:
    """For prompts longer than the trained context, RoPE's base grows, and queries grow with their position."""
    trained = config["seq_length"]
    longest = max(trained, config["max_position_embeddings"]) if config["use_dynamic_ntk"] else trained
    head_size, layers, bias = config["kv_channels"], config["num_hidden_layers"], not config["no_bias"]
    # Checkpoints count both projections of the MLP.
    settings = {
        **config,
        "num_key_value_heads": None,
        "head_dim": head_size,
        "intermediate_size": config["intermediate_size"] // 2,
    }
    stretching = {"rope_type": "prompt_ntk", "original_max_position_embeddings": trained}
    rope = RopeSpec.from_config(head_size, config["rotary_emb_base"], stretching, longest, part=config["rotary_pct"])
    return usual_spec(
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


def _template(config: Config, generation_config: Config) -> str | None:
    return _TEMPLATE if generation_config.get("chat_format") == "chatml" else None


def _placeholder(config: Config) -> object:
    """The token between the tokens for an image's beginning and end."""
    begin = config["visual"].get("image_start_id")
    if begin is None:
        return config.get("image_token_id")
    return begin + 2 if isinstance(begin, int) else begin


def _image_settings(config: Config) -> Config:
    side = config["visual"].get("image_size", 448)
    return {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"height": side, "width": side},
        "do_center_crop": False,
    }


FAMILIES = (
    LanguageFamily(
        model_type="qwen",
        architecture="QWenLMHeadModel",
        defaults=_QWEN,
        build=_qwen,
        names=_NAMES,
        # The ends of turns, which no file names.
        more_ends=lambda config: () if config["vocab_size"] < 151646 else (151644, 151645),
        tokenizer=_TOKENIZER,
        chat_template=_template,
        models="Qwen 1",
    ),
    VisionFamily(
        name="qwen_vl",
        model_type="qwen",
        architecture="QWenLMHeadModel",
        matches=lambda config: isinstance(config.get("visual"), Mapping),
        text_type="qwen",
        tower="vlmserve.models.vision.resampled:ResampledVision.from_config",
        tower_name="visual",
        image_settings=_image_settings,
        image_tokens=lambda config: config["visual"].get("n_queries", 256),
        image_token_id=151859,
        config_placeholder=_placeholder,
        tokenizer=_TOKENIZER,
        chat_template=_template,
        models="Qwen-VL, Qwen-VL-Chat",
    ),
)

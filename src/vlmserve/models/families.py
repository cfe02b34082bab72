"""The decoder families: what makes an `ArchSpec` of each one's config.json, and how its tensors are renamed.

A family is a row of `FAMILIES`. Published configs leave out what equals the defaults of transformers' own classes, so a
row has those that matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from vlmserve.errors import UnsupportedModelError
from vlmserve.models import family_specs as specs
from vlmserve.models.family_defaults import GEMMA, GEMMA2, GLM, GLM_OCR, LLAMA, QWEN, QWEN2_VL
from vlmserve.models.spec import ArchSpec, Config

Names = Sequence[tuple[str, str]]

DEFAULT_FAMILY = "llama"
"""Of configs that name none, like those of the first LLaVA checkpoints."""


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table.

    architecture: as config.json names it. build: from the family's name and a config completed by `defaults`.
    names: regular expressions for tensors' names and what to put in their place, tried in turn, those of `COMMON` last.
    also: other names of the architecture. ends: tokens that end an answer whatever the files say, from such a config.
    end_token: the field of configs that says which token ends an answer. models: its well-known names; empty for a
    family that occurs only inside vision-language models.
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
_SANDWICH_NORMS: Names = (
    (r"\.post_attention_layernorm\.", ".attention_output_norm."),
    (r"\.pre_feedforward_layernorm\.", ".mlp_norm."),
    (r"\.post_feedforward_layernorm\.", ".mlp_output_norm."),
)
_GLM4_NORMS: Names = (
    (r"\.post_self_attn_layernorm\.", ".attention_output_norm."),
    (r"\.post_mlp_layernorm\.", ".mlp_output_norm."),
)

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", LLAMA, specs.llama, models="Llama 1 to 3.3, Vicuna, Yi, SmolLM 1 and 2"),
    "mistral": Family(
        "MistralForCausalLM",
        {
            **LLAMA,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
        specs.mistral,
        models="Mistral, Zephyr",
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        {
            **LLAMA,
            "vocab_size": 131072,
            "intermediate_size": 14336,
            "num_hidden_layers": 34,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            "sliding_window": None,
        },
        specs.ministral3,
        models="Ministral 3, language model only",
    ),
    "qwen2": Family("Qwen2ForCausalLM", QWEN, specs.qwen2, models="Qwen 2 and 2.5"),
    "qwen2_vl_text": Family("Qwen2VLForConditionalGeneration", QWEN2_VL, specs.qwen2),
    "qwen2_5_vl_text": Family("Qwen2_5_VLForConditionalGeneration", QWEN2_VL, specs.qwen2),
    "qwen3": Family("Qwen3ForCausalLM", {**QWEN, "head_dim": 128}, specs.qwen3, models="Qwen 3"),
    "qwen3_vl_text": Family(
        "Qwen3VLForConditionalGeneration",
        {
            **QWEN,
            "head_dim": 128,
            "max_position_embeddings": 128000,
            "rope_theta": 5e5,
            "deepstack": 0,
        },
        specs.qwen3_vl,
    ),
    "paddleocr_vl_text": Family(
        "PaddleOCRVLForConditionalGeneration",
        {
            **LLAMA,
            "vocab_size": 103424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "use_bias": False,
        },
        specs.paddleocr_vl,
    ),
    "phi": Family(
        "PhiForCausalLM",
        {
            **LLAMA,
            "vocab_size": 51200,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "qk_layernorm": False,
        },
        specs.phi,
        (*_PHI_MLP, *_HEAD_NORMS, (r"\.self_attn\.dense\.", ".self_attn.o_proj."), (r"^final_layernorm\.", "norm.")),
        models="Phi 1, 1.5 and 2",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {
            **LLAMA,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "eos_token_id": 32000,
        },
        specs.phi3,
        models="Phi 3, 3.5 and 4",
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        {
            **LLAMA,
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
        specs.stablelm,
        ((r"\.([qk])_layernorm\.norms\.", r".\1_norm."),),
        models="StableLM 1 and 2",
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        {
            **LLAMA,
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
        specs.starcoder2,
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
        specs.gpt_bigcode,
        _GPT,
        models="StarCoder, SantaCoder",
    ),
    "qwen": Family(
        "QWenLMHeadModel",
        {
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
        },
        specs.qwen,
        (*_GPT, (r"\.mlp\.w1\.", ".mlp.up_proj."), (r"\.mlp\.w2\.", ".mlp.gate_proj.")),
        # The ends of turns, of which its files name none.
        ends=lambda config: () if config["vocab_size"] < 151646 else (151644, 151645),
        models="Qwen 1",
    ),
    "glm": Family("GlmForCausalLM", GLM, specs.glm, models="GLM-4 9B (-hf)"),
    "glm4": Family("Glm4ForCausalLM", GLM, specs.glm, _GLM4_NORMS, models="GLM-4-0414"),
    "glm_ocr_text": Family("GlmOcrForConditionalGeneration", GLM_OCR, specs.glm_ocr, _GLM4_NORMS),
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
        specs.chatglm,
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
    "gemma": Family("GemmaForCausalLM", GEMMA, specs.gemma, models="Gemma"),
    "gemma2": Family("Gemma2ForCausalLM", GEMMA2, specs.gemma2, _SANDWICH_NORMS, models="Gemma 2"),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **GEMMA2,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": None,
            "sliding_window_pattern": 6,
        },
        specs.gemma3,
        _SANDWICH_NORMS,
        models="Gemma 3 1B",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            **LLAMA,
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
        specs.smollm3,
        models="SmolLM 3",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {**LLAMA, "vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
        specs.olmo2,
        (
            (r"\.post_attention_layernorm\.", ".attention_output_norm."),
            (r"\.post_feedforward_layernorm\.", ".mlp_output_norm."),
        ),
        models="OLMo 2",
    ),
    "moondream_text": Family(
        "HfMoondream",
        {
            **LLAMA,
            "vocab_size": 51200,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 2048,
            "eos_token_id": 50256,
        },
        specs.moondream,
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
        specs.bert_decoder,
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

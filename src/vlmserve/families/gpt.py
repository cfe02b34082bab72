"""Models with GPT-2's blocks: StarCoder 1 and 2."""

from __future__ import annotations

from vlmserve.errors import UnsupportedModelError
from vlmserve.families.family import LanguageFamily
from vlmserve.families.gguf import GGUFText, Metadata
from vlmserve.families.llama import LLAMA
from vlmserve.families.spec import GPT, ArchSpec, Config, Names, NormSpec, same_window, usual_spec

_MLP_NAMES: Names = ((r"\.mlp\.c_fc\.", ".mlp.up_proj."), (r"\.mlp\.c_proj\.", ".mlp.down_proj."))
GPT_NAMES: Names = (
    (r"^(transformer\.)?wte\.", "embed_tokens."),
    (r"^(transformer\.)?wpe\.", "position_embeddings."),
    (r"^(transformer\.)?h\.", "layers."),
    (r"^(transformer\.)?ln_f\.", "norm."),
    (r"\.ln_1\.", ".attention_norm."),
    (r"\.ln_2\.", ".mlp_norm."),
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    *_MLP_NAMES,
)
_BIGCODE: Config = {
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
}
_STARCODER2: Config = {
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
}


def _gpt_bigcode(config: Config) -> ArchSpec:
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
    return usual_spec(
        settings,
        norm=NormSpec(config["layer_norm_epsilon"], layer=True),
        activation=config["activation_function"],
        ropes=[None] * config["n_layer"],
        learned_positions=positions,
        **GPT,
        **({} if config["scale_attn_weights"] else {"scale": 1.0}),
    )


def _starcoder2(config: Config) -> ArchSpec:
    bias = config["use_bias"]
    return usual_spec(
        config,
        norm=NormSpec(config["norm_epsilon"], layer=True),
        windows=same_window(config),
        gated=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def _bigcode_traits(metadata: Metadata) -> Config:
    return {
        "n_embd": metadata["embedding_length"],
        "n_head": metadata["attention.head_count"],
        "n_layer": metadata["block_count"],
        "n_inner": metadata["feed_forward_length"],
        "n_positions": metadata["context_length"],
        "layer_norm_epsilon": metadata["attention.layer_norm_epsilon"],
        "multi_query": metadata.get("attention.head_count_kv") == 1,
    }


def _starcoder2_traits(metadata: Metadata) -> Config:
    return {
        "norm_epsilon": metadata["attention.layer_norm_epsilon"],
        "use_bias": metadata.has("attn_q.bias"),
        "sliding_window": metadata.get("attention.sliding_window") or None,
    }


FAMILIES = (
    LanguageFamily(
        model_type="gpt_bigcode",
        architecture="GPTBigCodeForCausalLM",
        defaults=_BIGCODE,
        build=_gpt_bigcode,
        names=GPT_NAMES,
        gguf={"starcoder": GGUFText(_bigcode_traits)},
        models="StarCoder, SantaCoder",
    ),
    LanguageFamily(
        model_type="starcoder2",
        architecture="Starcoder2ForCausalLM",
        defaults=_STARCODER2,
        build=_starcoder2,
        names=_MLP_NAMES,
        gguf={"starcoder2": GGUFText(_starcoder2_traits)},
        models="StarCoder 2",
    ),
)

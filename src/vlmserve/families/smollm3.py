from __future__ import annotations

from vlmserve.families.family import LanguageFamily, NamedModel
from vlmserve.families.gguf import GGUFText
from vlmserve.families.llama import LLAMA
from vlmserve.families.spec import ArchSpec, Config, layer_windows, usual_rope, usual_spec

_SMOLLM3: Config = {
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
}


def _smollm3(config: Config) -> ArchSpec:
    layers = config["num_hidden_layers"]
    interval = config["no_rope_layer_interval"]
    rotated = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(layers)]
    rope = usual_rope(config, config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    windows: list[int | None] = [None] * layers
    if config["use_sliding_window"]:
        windows = layer_windows(config, lambda layer: not rotated[layer])
    return usual_spec(
        config,
        windows=windows,
        ropes=[rope if rotates else None for rotates in rotated],
        qkv_bias=config["attention_bias"],
        output_bias=config["attention_bias"],
        mlp_bias=config["mlp_bias"],
    )


FAMILIES = (
    LanguageFamily(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        defaults=_SMOLLM3,
        build=_smollm3,
        gguf={"smollm3": GGUFText(interleaved=True)},
        models="SmolLM 3",
        short_names=(NamedModel("smollm3:3b", "HuggingFaceTB/SmolLM3-3B", 3075098624, 262668288),),
    ),
)

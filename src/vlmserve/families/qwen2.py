from __future__ import annotations

from vlmserve.families.family import LanguageFamily, NamedModel
from vlmserve.families.gguf import GGUFText, with_sections
from vlmserve.families.llama import LLAMA
from vlmserve.families.spec import ArchSpec, Config, layer_windows, usual_spec

QWEN: Config = {
    **LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "eos_token_id": None,
}


def qwen2(config: Config) -> ArchSpec:
    return usual_spec(config, windows=qwen_windows(config), qkv_bias=True)


def qwen_windows(config: Config) -> list[int | None]:
    if not config["use_sliding_window"]:
        return [None] * config["num_hidden_layers"]
    return layer_windows(config, lambda layer: layer >= config["max_window_layers"])


FAMILIES = (
    LanguageFamily(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        defaults=QWEN,
        build=qwen2,
        # Without its tower, Qwen2-VL is Qwen 2.
        gguf={"qwen2": GGUFText(), "qwen2vl": GGUFText(with_sections, has_sections=True)},
        models="Qwen 2 and 2.5",
        short_names=(
            NamedModel("qwen2.5:0.5b", "Qwen/Qwen2.5-0.5B-Instruct", 494032768, 136134656),
            NamedModel("qwen2.5:1.5b", "Qwen/Qwen2.5-1.5B-Instruct", 1543714304, 233373696),
            NamedModel("qwen2.5:7b", "Qwen/Qwen2.5-7B-Instruct", 7615616512, 544997376, 544997376),
        ),
    ),
)

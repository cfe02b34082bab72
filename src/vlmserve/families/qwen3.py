"""Qwen 3."""

from __future__ import annotations

from vlmserve.families.family import LanguageFamily, NamedModel
from vlmserve.families.gguf import GGUFText, with_sections
from vlmserve.families.qwen2 import QWEN, qwen_windows
from vlmserve.families.spec import ArchSpec, Config, HeadNormSpec, NormSpec, usual_spec

QWEN3: Config = {**QWEN, "head_dim": 128}


def qwen3(config: Config) -> ArchSpec:
    return usual_spec(
        config,
        windows=qwen_windows(config),
        qkv_bias=config["attention_bias"],
        output_bias=config["attention_bias"],
        head_norm=HeadNormSpec("head", NormSpec(config["rms_norm_eps"])),
    )


FAMILIES = (
    LanguageFamily(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        defaults=QWEN3,
        build=qwen3,
        # Without its tower, Qwen3-VL is Qwen 3.
        gguf={"qwen3": GGUFText(), "qwen3vl": GGUFText(with_sections, has_sections=True)},
        models="Qwen 3",
        short_names=(
            NamedModel("qwen3:0.6b", "Qwen/Qwen3-0.6B", 596049920, 155582464),
            NamedModel("qwen3:1.7b", "Qwen/Qwen3-1.7B", 1720574976, 311164928),
            NamedModel("qwen3:4b", "Qwen/Qwen3-4B", 4022468096, 388956160),
            NamedModel("qwen3:8b", "Qwen/Qwen3-8B", 8190735360, 622329856, 622329856),
            NamedModel("qwen3:14b", "Qwen/Qwen3-14B", 14768307200, 777912320, 777912320),
        ),
    ),
)

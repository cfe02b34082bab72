from __future__ import annotations

from dataclasses import replace

from vlmserve.families.family import LanguageFamily, NamedModel
from vlmserve.families.gguf import GGUFText, Metadata
from vlmserve.families.gguf import with_sections as gguf_sections
from vlmserve.families.qwen2 import QWEN, qwen_windows
from vlmserve.families.spec import ArchSpec, Config, ExpertsSpec, HeadNormSpec, Names, NormSpec, usual_spec

QWEN3: Config = {**QWEN, "head_dim": 128}
QWEN3_MOE: Config = {
    **QWEN,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
}
QWEN3_MOE_NAMES: Names = (
    (r"\.mlp\.gate\.", ".mlp.router.linear."),
    (r"\.mlp\.shared_expert_gate\.", ".mlp.shared_gate."),
    (r"\.mlp\.shared_expert\.", ".mlp.shared."),
)


def qwen3(config: Config) -> ArchSpec:
    return usual_spec(
        config,
        windows=qwen_windows(config),
        qkv_bias=config["attention_bias"],
        output_bias=config["attention_bias"],
        head_norm=HeadNormSpec("head", NormSpec(config["rms_norm_eps"])),
    )


def qwen3_experts(config: Config, *, shared_size: int = 0) -> tuple[ExpertsSpec | None, ...]:
    """`ArchSpec.experts` of a config with the usual names of Qwen's mixtures. shared_size: as in `ExpertsSpec`."""
    experts = ExpertsSpec(
        count=config.get("num_experts", config.get("num_local_experts", 128)),
        top_k=config["num_experts_per_tok"],
        inner_size=config["moe_intermediate_size"],
        renormalized=config.get("norm_topk_prob", True),
        shared_size=shared_size,
        shared_gate=shared_size > 0,
    )
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    return tuple(None if layer in dense or (layer + 1) % step else experts for layer in layers)


def _qwen3_moe(config: Config) -> ArchSpec:
    return replace(qwen3({**config, "max_window_layers": 0}), experts=qwen3_experts(config))


def gguf_experts(metadata: Metadata) -> Config:
    """llama.cpp always divides by the sum of the chosen scores."""
    return {
        **(gguf_sections(metadata) if metadata.sections else {}),
        "num_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
        "norm_topk_prob": True,
    }


FAMILIES = (
    LanguageFamily(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        defaults=QWEN3,
        build=qwen3,
        # Without its tower, Qwen3-VL is Qwen 3.
        gguf={"qwen3": GGUFText(), "qwen3vl": GGUFText(gguf_sections, has_sections=True)},
        models="Qwen 3",
        short_names=(
            NamedModel("qwen3:0.6b", "Qwen/Qwen3-0.6B", 596049920, 155582464),
            NamedModel("qwen3:1.7b", "Qwen/Qwen3-1.7B", 1720574976, 311164928),
            NamedModel("qwen3:4b", "Qwen/Qwen3-4B", 4022468096, 388956160),
            NamedModel("qwen3:8b", "Qwen/Qwen3-8B", 8190735360, 622329856, 622329856),
            NamedModel("qwen3:14b", "Qwen/Qwen3-14B", 14768307200, 777912320, 777912320),
            NamedModel("qwen3-embedding:0.6b", "Qwen/Qwen3-Embedding-0.6B", 595776512, 155309056),
            NamedModel("qwen3-embedding:4b", "Qwen/Qwen3-Embedding-4B", 4021774336, 388262400),
            NamedModel("qwen3-embedding:8b", "Qwen/Qwen3-Embedding-8B", 7567295488, 621219840),
            NamedModel("qwen3-reranker:0.6b", "Qwen/Qwen3-Reranker-0.6B", 595776512, 155309056),
            NamedModel("qwen3-reranker:4b", "Qwen/Qwen3-Reranker-4B", 4021774336, 388262400),
            NamedModel("qwen3-reranker:8b", "Qwen/Qwen3-Reranker-8B", 8188515328, 621219840, 621219840),
        ),
    ),
    LanguageFamily(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        defaults=QWEN3_MOE,
        build=_qwen3_moe,
        names=QWEN3_MOE_NAMES,
        gguf={
            "qwen3moe": GGUFText(gguf_experts, has_experts=True),
            "qwen3vlmoe": GGUFText(gguf_experts, has_sections=True, has_experts=True),
        },
        models="Qwen 3 with experts",
        short_names=(NamedModel("qwen3:30b", "Qwen/Qwen3-30B-A3B", 30532122624, 311164928, 311164928),),
    ),
)

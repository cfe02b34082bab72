"""Models that run by transformers' code in our engine: its tokens, alone, batched, chunked, cached and preempted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.checkpoints import change_config, change_tensors, make_llama, make_text_model
from tests.engine.test_families import LENGTHS, check_bfloat16, check_tokens
from tests.engine.test_parity import Oracle, generate, text_oracle
from vlmserve import LLM, SamplingParams
from vlmserve.engine.engine import Engine
from vlmserve.engine.loading import load
from vlmserve.errors import ConfigurationError, MissingWeightsError, ModelLoadError, UnsupportedModelError
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.registry import load_model
from vlmserve.models.transformers_backend import TransformersModel
from vlmserve.settings.config import EngineConfig
from vlmserve.settings.quantization import QuantizationConfig
from vlmserve.types import Prompt

CPU = torch.device("cpu")
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Each has something that no family of our own has.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "learned positions": ("GPT2", {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 512}),
    "scaled logits, windows": ("Cohere2", {"pad_token_id": 0, "sliding_window": 7}),
    "scaled residuals": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}),
    "experts": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "pad_token_id": 0}),
    "sinks, windows": ("GptOss", {"head_dim": 8, "num_local_experts": 4, "pad_token_id": 0, "sliding_window": 7}),
    "narrow values": (
        "DeepseekV3",
        {
            **EXPERTS, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1,
        },
    ),
}  # fmt: skip


def make(folder: Path, family: str, **overrides: Any) -> Path:
    classes = (getattr(transformers, family + suffix, None) for suffix in ("ForCausalLM", "LMHeadModel"))
    model_class = next(found for found in classes if found is not None)
    config_class = getattr(transformers, family + "TextConfig", None) or getattr(transformers, family + "Config")
    return make_text_model(folder, model_class, config_class, **overrides)


@pytest.fixture(scope="module", params=MODELS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    family, overrides = MODELS[request.param]
    return text_oracle(make(tmp_path_factory.mktemp("theirs"), family, **overrides))


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[Prompt]:
    return [oracle.prompt(seed, length) for seed, length in enumerate(LENGTHS)]


def test_tokens_are_those_of_transformers(oracle: Oracle, prompts: list[Prompt], kernels: str) -> None:
    check_tokens(oracle, prompts, kernels)


def test_bfloat16_is_within_its_own_rounding(oracle: Oracle, prompts: list[Prompt]) -> None:
    check_bfloat16(oracle, prompts)


@pytest.mark.parametrize("asked", [None, torch.bfloat16, torch.float16], ids=str)
def test_a_cpu_slow_in_16_bits_takes_float32(
    asked: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native kernels, which would compute bfloat16 well, have no part in transformers' layers."""
    folder = make_llama(tmp_path, dtype=torch.bfloat16)
    for hardware, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("vlmserve.devices.choice.multiplies_bfloat16", lambda: hardware)  # noqa: B023
        monkeypatch.setattr("vlmserve.devices.cpu.multiplies_bfloat16", lambda: hardware)  # noqa: B023
        assert (
            load_model(folder, LoadSettings(device=CPU, dtype=asked, implementation="transformers")).dtype == expected
        )


def engine(folder: Path, **settings: Any) -> Engine:
    settings = {"kv_cache_memory": "1MiB", "dtype": "float32", "device": "cpu", **settings}
    return Engine(EngineConfig(model=str(folder), **settings), folder)


def test_our_implementation_is_preferred(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_llama(tmp_path / "ours")
    prompts = [Prompt([5, 6, 7, 8])]
    with caplog.at_level(logging.INFO, "vlmserve"):
        ours = generate(engine(folder), prompts)
        assert not caplog.messages or "transformers" not in " ".join(caplog.messages)
        assert generate(engine(folder, model_impl="transformers"), prompts) == ours
        assert "LlamaForCausalLM runs by transformers' implementation" in " ".join(caplog.messages)
        caplog.clear()
        engine(make(tmp_path / "theirs", "GPTNeoX"))
        assert "vlmserve has no implementation: architecture 'GPTNeoXForCausalLM'" in caplog.messages[0]
        assert "GPTNeoXForCausalLM runs by transformers'" in " ".join(caplog.messages)
    with pytest.raises(UnsupportedModelError, match=r"'GPTNeoXForCausalLM' is not supported.*all that are: "):
        engine(tmp_path / "theirs", model_impl="vlmserve")


def test_conversations_work_as_with_every_model(tmp_path: Path) -> None:
    llm = LLM(str(make(tmp_path, "GPTNeoX")), kv_cache_memory="1MiB")
    [result] = llm.chat([[{"role": "user", "content": "How many?"}]], SamplingParams(max_tokens=3), use_tqdm=False)
    assert len(result.outputs[0].token_ids) == 3 or result.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("Bloom", {"n_head": 6, "n_layer": 3}, "its layers do not attend by transformers' attention interface"),
        ("Falcon", {}, "its layers do not attend by transformers' attention interface"),
        (
            "Llama4",
            {**EXPERTS, "num_local_experts": 4, "attention_chunk_size": 16, "pad_token_id": 0},
            "attention in chunks of 16",
        ),
        ("Mamba", {}, "its layers do not attend"),
        (
            "Lfm2Moe",
            {**EXPERTS, "num_experts": 4, "layer_types": ["conv", "full_attention", "conv"]},
            "more than keys and values",
        ),
    ],
)
def test_unpageable_models_say_why(tmp_path: Path, family: str, overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"is not supported.*--model-impl transformers: .*{reason}"):
        engine(make(tmp_path, family, **overrides))


def nearly_equal_experts(folder: Path) -> Path:
    """An OLMoE of which rounding decides what experts it takes, which makes much of a difference."""
    family, overrides = MODELS["experts"]
    generator = torch.Generator().manual_seed(0)

    def change(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        if "experts" in name:
            return name, tensor * 6
        if name.endswith("gate.weight"):
            return name, tensor[:1] * (1 + 0.001 * torch.randn(tensor.shape, generator=generator))
        return name, tensor

    change_tensors(make(folder, family, **overrides), change)
    return folder


def test_near_ties_of_experts_are_accepted(tmp_path: Path) -> None:
    folder = nearly_equal_experts(tmp_path)
    assert len(generate(engine(folder, dtype="bfloat16"), [Prompt([5, 6, 7, 8])])) == 1


def test_experts_with_wrong_logits_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = nearly_equal_experts(tmp_path)
    forward = TransformersModel.forward

    def late(self: Any, embeddings: Any, positions: torch.Tensor, *others: Any, **named: Any) -> Any:
        return forward(self, embeddings, positions * 2, *others, **named)

    monkeypatch.setattr(TransformersModel, "forward", late)
    with pytest.raises(UnsupportedModelError, match="its logits differ from transformers' own"):
        engine(folder, dtype="bfloat16")


def test_broken_transformers_models_say_so(tmp_path: Path) -> None:
    folder = make(tmp_path, "GPTNeoX")
    with pytest.raises(ConfigurationError, match="--quantize is for vlmserve's own"):
        load_model(folder, LoadSettings(device=CPU, quantization=QuantizationConfig(scheme="int8")))
    change_tensors(folder, lambda name, tensor: None if "layers.1.mlp" in name else (name, tensor))
    with pytest.raises(MissingWeightsError, match=r"no tensor .*layers.1.mlp.*and 3 more"):
        engine(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="transformers cannot load"):
        engine(folder)
    change_config(folder, model_type="unheard-of", architectures=["Unheard"])
    with pytest.raises(UnsupportedModelError, match=r"'Unheard' is not supported.*does not know it either"):
        engine(folder)


@pytest.mark.parametrize(
    "settings", [{"quantize": "int4", "quantize_method": "gptq"}, {"weight_memory": 10**6}], ids=["method", "memory"]
)
def test_calibrating_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("vlmserve.engine.loading.calibrated_copy", lambda *_: pytest.fail("calibrated"))
    config = EngineConfig(model=str(make_llama(tmp_path)), model_impl="transformers", **settings)
    with pytest.raises(ConfigurationError, match="not for --model-impl transformers"):
        load(config)


def test_bits_of_inputs_are_refused(tmp_path: Path) -> None:
    folder = make_llama(tmp_path)
    with pytest.raises(ConfigurationError, match="--input-bits is for vlmserve's own"):
        load_model(folder, LoadSettings(device=CPU, dtype=torch.float32, input_bits=8, implementation="transformers"))


def test_longrope_context_ends_at_its_original_length(tmp_path: Path) -> None:
    """Under transformers' longrope the longest sequence of a batch decides how all of them turn."""
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "factor": 8.0,
    }  # fmt: skip
    folder = make_text_model(
        tmp_path,
        transformers.Phi3ForCausalLM,
        transformers.Phi3Config,
        pad_token_id=0,
        rope_parameters=rope,
        original_max_position_embeddings=64,
    )
    assert engine(folder).info.max_model_len == 512
    assert engine(folder, model_impl="transformers").info.max_model_len == 64

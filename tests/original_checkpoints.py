"""Small random checkpoints of models that transformers does not have, with their published names and settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.oracles.qwen_vl_vision import sines_and_cosines

CHATGLM: dict[str, Any] = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "ffn_hidden_size": 80,
    "hidden_size": 48,
    "kv_channels": 8,
    "layernorm_epsilon": 1e-5,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 6,
    "num_layers": 3,
    "original_rope": True,
    "padded_vocab_size": 300,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 512,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
QWEN: dict[str, Any] = {
    "architectures": ["QWenLMHeadModel"],
    "model_type": "qwen",
    "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig"},
    "hidden_size": 48,
    "intermediate_size": 160,
    "kv_channels": 8,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 256,
    "no_bias": True,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "seq_length": 32,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "vocab_size": 600,
}
VISUAL: dict[str, Any] = {
    "heads": 2, "image_size": 80, "image_start_id": 590, "layers": 2, "mlp_ratio": 2.5, "n_queries": 4,
    "output_dim": 128, "patch_size": 4, "width": 32,
}  # fmt: skip


class Tensors:
    """Random tensors; norms' weights lie around 1."""

    def __init__(self, seed: int = 0) -> None:
        self.all: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, name: str, *shape: int, mean: float = 0.0, std: float = 0.2) -> None:
        self.all[name] = mean + std * torch.randn(shape, generator=self._generator)

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool = False) -> None:
        self.add(f"{name}.weight", outputs, inputs)
        if bias:
            self.add(f"{name}.bias", outputs)

    def norm(self, name: str, size: int, *, bias: bool = False) -> None:
        self.add(f"{name}.weight", size, mean=1.0)
        if bias:
            self.add(f"{name}.bias", size)

    def save(self, folder: Path, config: dict[str, Any]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.all, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        return folder


def make_chatglm(folder: Path, **overrides: Any) -> Path:
    config = {**CHATGLM, **overrides}
    hidden, size, inner = config["hidden_size"], config["kv_channels"], config["ffn_hidden_size"]
    heads, groups = config["num_attention_heads"], config["multi_query_group_num"]
    bias, layer_norm = config["add_bias_linear"], not config["rmsnorm"]
    tensors = Tensors()
    tensors.add("transformer.embedding.word_embeddings.weight", config["padded_vocab_size"], hidden, std=1.0)
    tensors.add("transformer.rotary_pos_emb.inv_freq", size // 4)
    for number in range(config["num_layers"]):
        name = f"transformer.encoder.layers.{number}."
        tensors.norm(name + "input_layernorm", hidden, bias=layer_norm)
        tensors.norm(name + "post_attention_layernorm", hidden, bias=layer_norm)
        outputs = (heads + 2 * groups) * size
        qkv_bias = bias or config["add_qkv_bias"]
        tensors.linear(name + "self_attention.query_key_value", hidden, outputs, bias=qkv_bias)
        tensors.linear(name + "self_attention.dense", heads * size, hidden, bias=bias)
        tensors.linear(name + "mlp.dense_h_to_4h", hidden, 2 * inner, bias=bias)
        tensors.linear(name + "mlp.dense_4h_to_h", inner, hidden, bias=bias)
    tensors.norm("transformer.encoder.final_layernorm", hidden, bias=layer_norm)
    tensors.linear("transformer.output_layer", hidden, config["padded_vocab_size"])
    return tensors.save(folder, config)


def make_qwen(folder: Path, **overrides: Any) -> Path:
    config = {**QWEN, **overrides}
    hidden, inner, bias = config["hidden_size"], config["intermediate_size"] // 2, not config["no_bias"]
    projected = config["kv_channels"] * config["num_attention_heads"]
    tensors = Tensors()
    tensors.add("transformer.wte.weight", config["vocab_size"], hidden, std=1.0)
    for number in range(config["num_hidden_layers"]):
        name = f"transformer.h.{number}."
        tensors.norm(name + "ln_1", hidden)
        tensors.norm(name + "ln_2", hidden)
        tensors.linear(name + "attn.c_attn", hidden, 3 * projected, bias=True)
        tensors.linear(name + "attn.c_proj", projected, hidden, bias=bias)
        tensors.linear(name + "mlp.w1", hidden, inner, bias=bias)
        tensors.linear(name + "mlp.w2", hidden, inner, bias=bias)
        tensors.linear(name + "mlp.c_proj", inner, hidden, bias=bias)
    tensors.norm("transformer.ln_f", hidden)
    tensors.linear("lm_head", hidden, config["vocab_size"])
    if "visual" in config:
        _add_vision(tensors, config["visual"])
    return tensors.save(folder, config)


def make_qwen_vl(folder: Path, *, visual: dict[str, Any] | None = None, **overrides: Any) -> Path:
    width = {"hidden_size": VISUAL["output_dim"], "kv_channels": 32, "num_attention_heads": 4, "seq_length": 64}
    return make_qwen(folder, **{**width, "visual": {**VISUAL, **(visual or {})}, **overrides})


def _add_vision(tensors: Tensors, visual: dict[str, Any]) -> None:
    width, size, patch = visual["width"], visual["output_dim"], visual["patch_size"]
    inner, queries = int(width * visual["mlp_ratio"]), visual["n_queries"]
    name = "transformer.visual."
    tensors.add(name + "conv1.weight", width, 3, patch, patch)
    tensors.add(name + "positional_embedding", 256, width, std=0.5)
    tensors.norm(name + "ln_pre", width, bias=True)
    for number in range(visual["layers"]):
        layer = f"{name}transformer.resblocks.{number}."
        tensors.norm(layer + "ln_1", width, bias=True)
        tensors.norm(layer + "ln_2", width, bias=True)
        tensors.linear(layer + "attn.in_proj", width, 3 * width, bias=True)
        tensors.linear(layer + "attn.out_proj", width, width, bias=True)
        tensors.linear(layer + "mlp.c_fc", width, inner, bias=True)
        tensors.linear(layer + "mlp.c_proj", inner, width, bias=True)
    pool = name + "attn_pool."
    tensors.all[pool + "pos_embed"] = sines_and_cosines(round(queries**0.5), size).float()
    tensors.add(pool + "query", queries, size)
    if width != size:
        tensors.linear(pool + "kv_proj", width, size)
    tensors.add(pool + "attn.in_proj_weight", 3 * size, size, std=0.1)
    tensors.add(pool + "attn.in_proj_bias", 3 * size)
    tensors.linear(pool + "attn.out_proj", size, size, bias=True)
    tensors.norm(pool + "ln_q", size, bias=True)
    tensors.norm(pool + "ln_kv", size, bias=True)
    tensors.norm(name + "ln_post", size, bias=True)
    tensors.add(name + "proj", size, size)

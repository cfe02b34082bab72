"""Decoders that transformers does not have, written out in float64 over whole sequences, without a cache.

Sources: ChatGLM3 and GLM-4, https://huggingface.co/THUDM/chatglm3-6b (``modeling_chatglm.py``) and
https://arxiv.org/abs/2406.12793; the first Qwen, https://huggingface.co/Qwen/Qwen-7B (``modeling_qwen.py``) and
https://arxiv.org/abs/2309.16609. Tensors have their published names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class OriginalDecoder:
    """A checkpoint's tensors in float64. Subclasses say what a layer is."""

    embeddings = final_norm = head = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}

    def layer(self, number: int, x: Tensor, prompt_len: int) -> Tensor:
        raise NotImplementedError

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], prompt_len: int | None = None, images: Any = ()) -> Tensor:
        """``[tokens, vocabulary]``. prompt_len: how many of them are the prompt; None: all. images: pairs of a place
        and the ``[embeddings, width]`` that stand there."""
        x = self.tensors[self.embeddings][torch.tensor(token_ids)].clone()
        for start, rows in images:
            x[start : start + len(rows)] = rows
        for number in range(self.num_layers):
            x = self.layer(number, x, prompt_len or len(token_ids))
        return self.norm(x, self.final_norm) @ self.tensors[self.head].T

    def greedy(self, token_ids: Sequence[int], count: int, images: Any = ()) -> list[int]:
        ids = list(token_ids)
        for _ in range(count):
            ids.append(int(self.logits(ids, len(token_ids), images)[-1].argmax()))
        return ids[len(token_ids) :]

    @property
    def num_layers(self) -> int:
        raise NotImplementedError

    def norm(self, x: Tensor, name: str) -> Tensor:
        raise NotImplementedError

    def linear(self, x: Tensor, name: str) -> Tensor:
        output = x @ self.tensors[name + ".weight"].T
        return output + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else output


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return weight * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() + bias


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """query: ``[tokens, heads, size]``; key, value: ``[tokens, groups, size]``. Returns ``[tokens, heads * size]``."""
    tokens, heads, size = query.shape
    outputs = []
    for head in range(heads):
        group = head * key.shape[1] // heads
        scores = query[:, head] @ key[:, group].T / math.sqrt(size)
        scores.masked_fill_(torch.ones(tokens, tokens).triu(1).bool(), -math.inf)
        outputs.append(scores.softmax(-1) @ value[:, group])
    return torch.cat(outputs, -1)


class ChatGLM(OriginalDecoder):
    embeddings = "transformer.embedding.word_embeddings.weight"
    final_norm = "transformer.encoder.final_layernorm"
    head = "transformer.output_layer.weight"

    @property
    def num_layers(self) -> int:
        return int(self.config["num_layers"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, eps = self.tensors[name + ".weight"], self.config["layernorm_epsilon"]
        if self.config["rmsnorm"]:
            return rms_norm(x, weight, eps)
        return layer_norm(x, weight, self.tensors[name + ".bias"], eps)

    def turn(self, heads: Tensor) -> Tensor:
        """The first half of each head, its elements 2 i and 2 i + 1 together."""
        size = heads.shape[-1] // 2
        base = 10000 * self.config.get("rope_ratio", 1)
        rotated = heads.clone()
        for pair in range(size // 2):
            angle = torch.arange(len(heads)).double() / base ** (2 * pair / size)
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            first, second = (2 * pair, 2 * pair + 1)
            if not self.config.get("original_rope", True):
                first, second = pair, pair + size // 2
            x, y = heads[..., first], heads[..., second]
            rotated[..., first] = x * cos - y * sin
            rotated[..., second] = y * cos + x * sin
        return rotated

    def layer(self, number: int, x: Tensor, prompt_len: int) -> Tensor:
        config, name = self.config, f"transformer.encoder.layers.{number}."
        size, heads, groups = config["kv_channels"], config["num_attention_heads"], config["multi_query_group_num"]
        mixed = self.linear(self.norm(x, name + "input_layernorm"), name + "self_attention.query_key_value")
        query, key, value = mixed.view(len(x), -1, size).split((heads, groups, groups), 1)
        attended = causal_attention(self.turn(query), self.turn(key), value)
        x = x + self.linear(attended, name + "self_attention.dense")
        inner = self.linear(self.norm(x, name + "post_attention_layernorm"), name + "mlp.dense_h_to_4h")
        gate, up = inner.chunk(2, -1)
        return x + self.linear(gate * gate.sigmoid() * up, name + "mlp.dense_4h_to_h")


class Qwen(OriginalDecoder):
    embeddings, final_norm, head = "transformer.wte.weight", "transformer.ln_f", "lm_head.weight"

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.tensors[name + ".weight"], self.config["layer_norm_epsilon"])

    def base(self, prompt_len: int, size: int) -> float:
        """Of the wavelengths: it grows with a prompt that is longer than what the model was trained on."""
        alpha = 1
        if self.config["use_dynamic_ntk"]:
            alpha = max(1, 2 ** math.ceil(math.log2(prompt_len / self.config["seq_length"]) + 1) - 1)
        return float(self.config["rotary_emb_base"] * alpha ** (size / (size - 2)))

    def turn(self, heads: Tensor, prompt_len: int) -> Tensor:
        """The first elements of each head, i and i + half of them together."""
        size = int(heads.shape[-1] * self.config["rotary_pct"])
        base = self.base(prompt_len, size)
        rotated = heads.clone()
        for pair in range(size // 2):
            angle = torch.arange(len(heads)).double() / base ** (2 * pair / size)
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            x, y = heads[..., pair], heads[..., pair + size // 2]
            rotated[..., pair] = x * cos - y * sin
            rotated[..., pair + size // 2] = y * cos + x * sin
        return rotated

    def layer(self, number: int, x: Tensor, prompt_len: int) -> Tensor:
        config, name = self.config, f"transformer.h.{number}."
        mixed = self.linear(self.norm(x, name + "ln_1"), name + "attn.c_attn")
        query, key, value = (part.unflatten(1, (-1, config["kv_channels"])) for part in mixed.chunk(3, -1))
        query, key = self.turn(query, prompt_len), self.turn(key, prompt_len)
        if config["use_logn_attn"]:
            trained = config["seq_length"]
            scale = [math.log(place, trained) if place > trained else 1.0 for place in range(1, len(x) + 1)]
            query = query * torch.tensor(scale).double()[:, None, None]
        x = x + self.linear(causal_attention(query, key, value), name + "attn.c_proj")
        normed = self.norm(x, name + "ln_2")
        up, gate = self.linear(normed, name + "mlp.w1"), self.linear(normed, name + "mlp.w2")
        return x + self.linear(up * gate * gate.sigmoid(), name + "mlp.c_proj")

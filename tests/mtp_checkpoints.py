"""Layers for multi-token prediction (MTP) in random checkpoints of Qwen3.5 and GLM, and their results in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

_NORMS = ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
_GLM_NAMES = {
    "fc.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
}


def add_mtp(folder: Path, *, seed: int = 0) -> Path:
    """Give a checkpoint a random layer, shaped like its last layer with attention."""
    generator = torch.Generator().manual_seed(seed)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    dtype = next(iter(tensors.values())).dtype
    shapes = _last_attention(tensors)
    size = shapes["input_layernorm.weight"][0]
    shapes = {f"layers.0.{name}": shape for name, shape in shapes.items()}
    shapes |= {name: torch.Size([size]) for name in _NORMS} | {"fc.weight": torch.Size([size, 2 * size])}
    for name, shape in sorted(shapes.items()):
        tensors[f"mtp.{name}"] = (0.2 * torch.randn(shape, generator=generator)).to(dtype)
    save_file(tensors, path, {"format": "pt"})
    return folder


def add_glm_mtp(folder: Path, *, seed: int = 0) -> Path:
    """Like `add_mtp`, stored as GLM does: as a layer after the last one, with copies of embeddings and head."""
    add_mtp(folder, seed=seed)
    path, number = folder / "model.safetensors", _text_config(folder)["num_hidden_layers"]
    tensors = load_file(path)
    [embeddings] = [name for name in tensors if name.endswith("embed_tokens.weight")]
    extra = f"{embeddings.removesuffix('embed_tokens.weight')}layers.{number}."
    for name in [name for name in tensors if name.startswith("mtp.")]:
        own, tensor = name.removeprefix("mtp."), tensors.pop(name)
        tensors[extra + _GLM_NAMES.get(own, own.removeprefix("layers.0."))] = tensor + 1 if "norm" in own else tensor
    tensors[f"{extra}embed_tokens.weight"] = tensors[embeddings].clone()
    tensors[f"{extra}shared_head.head.weight"] = tensors.get("lm_head.weight", tensors[embeddings]).clone()
    save_file(tensors, path, {"format": "pt"})
    return folder


def make_counting(folder: Path) -> Path:
    """Change a checkpoint with an untied head: the next token, also the predicted one, is the last token plus 1."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "o_proj.bias")):
            tensor.zero_()
        if "norm" in name:
            tensor.zero_()
    size = len(tensors["mtp.norm.weight"])
    tensors["mtp.fc.weight"] = torch.eye(size, 2 * size)
    embeddings = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = F.normalize(embeddings).roll(1, 0).contiguous() * 30
    save_file(tensors, path, {"format": "pt"})
    return folder


def _last_attention(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    """The shapes of a layer's tensors."""
    before = max(name.partition("self_attn.")[0] for name in tensors if "self_attn.q_proj.weight" in name)
    return {name.removeprefix(before): tensor.shape for name, tensor in tensors.items() if name.startswith(before)}


def _text_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config.get("text_config", config)


class Reference:
    """The layer's formula: https://arxiv.org/abs/2412.19437, equation 21, with Qwen3.5's norms and attention."""

    _offset = 1.0
    """Added to weights of norms."""

    def __init__(self, folder: Path) -> None:
        self._config = _text_config(folder)
        tensors = load_file(folder / "model.safetensors")
        self._own = {
            name.removeprefix("mtp."): tensor.double() for name, tensor in tensors.items() if name.startswith("mtp.")
        }
        self.embeddings = next(
            one for name, one in tensors.items() if name.endswith("embed_tokens.weight") and ".layers." not in name
        ).double()
        head = tensors.get("lm_head.weight")
        self._head = self.embeddings if head is None else head.double()

    def states(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """float64 ``[tokens, hidden_size]``, for tokens from position 0 on."""
        joined = [
            self._norm(embeddings.double(), "pre_fc_norm_embedding"),
            self._norm(hidden.double(), "pre_fc_norm_hidden"),
        ]
        return self._norm(self._layer(torch.cat(joined, 1) @ self._own["fc.weight"].T), "norm")

    def _layer(self, x: Tensor) -> Tensor:
        x = x + self._attention(self._norm(x, "layers.0.input_layernorm"))
        normed = self._norm(x, "layers.0.post_attention_layernorm")
        gate, up = (self._linear(normed, f"layers.0.mlp.{name}_proj") for name in ("gate", "up"))
        return x + self._linear(F.silu(gate) * up, "layers.0.mlp.down_proj")

    def chain(self, known: list[int], hidden: Tensor, count: int) -> list[int]:
        """The most likely `count` tokens after `known` tokens. hidden: states of all but the last known token."""
        drafts: list[int] = []
        hidden = hidden.double()
        while len(drafts) < count:
            following = self.embeddings[torch.tensor(known[1:] + drafts)]
            last = self.states(following, hidden)[-1:]
            drafts.append(int(self.logits(last).argmax()))
            hidden = torch.cat([hidden, last])
        return drafts

    def logits(self, states: Tensor) -> Tensor:
        return states @ self._head.T

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._own[f"{name}.weight"], self._own.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x / (x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).sqrt()
        return scaled * (self._offset + self._own[f"{name}.weight"])

    def _attention(self, x: Tensor) -> Tensor:
        size, name = self._config["head_dim"], "layers.0.self_attn"
        both = self._linear(x, f"{name}.q_proj").view(len(x), -1, 2, size)
        query, gate = self._norm(both[:, :, 0], f"{name}.q_norm"), both[:, :, 1].flatten(1)
        key = self._norm(self._linear(x, f"{name}.k_proj").view(len(x), -1, size), f"{name}.k_norm")
        value = self._linear(x, f"{name}.v_proj").view(len(x), -1, size)
        query, key = self._rotated(query), self._rotated(key)
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(size)
        ahead = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -math.inf).softmax(-1), value)
        return self._linear(attended.flatten(1) * gate.sigmoid(), f"{name}.o_proj")

    def _rotated(self, x: Tensor) -> Tensor:
        rope = self._config["rope_parameters"]
        half = int(self._config["head_dim"] * rope["partial_rotary_factor"]) // 2
        angles = torch.arange(len(x)).double()[:, None] / rope["rope_theta"] ** (torch.arange(half).double() / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


class GLMReference(Reference):
    """GLM's formula, with the decoder layer of transformers."""

    _offset = 0.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        number = self._config["num_hidden_layers"]
        extra = f"layers.{number}."
        stored = {
            name.partition(extra)[2]: tensor.double()
            for name, tensor in load_file(folder / "model.safetensors").items()
            if extra in name
        }
        self._own = {own: stored[name] for own, name in _GLM_NAMES.items()}
        config = AutoConfig.from_pretrained(folder)
        text = config.get_text_config()
        text.num_hidden_layers += 1
        for name, kinds in text.to_dict().items():
            if isinstance(kinds, list) and len(kinds) == number and name.endswith("layer_types"):
                setattr(text, name, [*kinds, kinds[-1]])
        kind = AutoModelForCausalLM if text is config else AutoModelForImageTextToText
        ways = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = kind.from_pretrained(folder, config=config, dtype=torch.float64, **ways).eval()
        self._decoder = model.model if text is config else model.model.language_model

    def _layer(self, x: Tensor) -> Tensor:
        ahead = torch.full((len(x), len(x)), -math.inf, dtype=torch.float64).triu(1)
        positions = torch.arange(len(x))[None]
        if "mrope_section" in self._config["rope_parameters"]:
            positions = positions.expand(3, 1, -1)
        angles = self._decoder.rotary_emb(x[None], positions)
        found: Tensor = self._decoder.layers[-1](x[None], attention_mask=ahead[None, None], position_embeddings=angles)
        return found[0]

"""pixie as it is trained: the same architecture as in the Hugging Face folder, in plain modules that train fast.

Attention is two batched matrix products: in bfloat16 on a CPU that is several times faster, forward and backward,
than the fused operator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.pixie.export import IMAGE_TOKENS, PATCH_SIZE, pixie_config
from training.pixie.labels import CELLS_PER_PATCH, LABELS
from training.pixie.tokenizer import IMAGE

_CONFIG: Final = pixie_config()
_VISION: Final = _CONFIG.vision_config
_TEXT: Final = _CONFIG.text_config
_SIDE: Final = _VISION.image_size // PATCH_SIZE
_CELLS: Final = CELLS_PER_PATCH**2


class TowerBlock(nn.Module):
    """A layer of the vision tower."""

    def __init__(self) -> None:
        super().__init__()
        width, depth = _VISION.hidden_size, _VISION.num_hidden_layers
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, _VISION.intermediate_size), nn.Linear(_VISION.intermediate_size, width)
        for last in (self.out, self.fc2):
            nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * depth))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = _VISION.num_attention_heads
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = (part.reshape(batch * heads, length, -1) for part in qkv)
        weights = torch.bmm(query * query.shape[-1] ** -0.5, key.transpose(1, 2)).softmax(-1)
        attended = torch.bmm(weights, value).view(batch, heads, length, -1).transpose(1, 2)
        x = x + self.out(attended.reshape(batch, length, width))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Tower(nn.Module):
    """uint8 images ``[batch, height, width, 3]`` to features ``[batch, patches, width]``."""

    def __init__(self) -> None:
        super().__init__()
        width = _VISION.hidden_size
        self.class_embedding = nn.Parameter(torch.randn(width) * 0.02)
        self.positions = nn.Parameter(torch.randn(IMAGE_TOKENS + 1, width) * 0.02)
        self.patch = nn.Linear(3 * PATCH_SIZE**2, width, bias=False)
        self.pre_norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(TowerBlock() for _ in range(_VISION.num_hidden_layers))

    def forward(self, images: Tensor) -> Tensor:
        batch = len(images)
        pixels = images.float().div(127.5).sub(1)
        patches = pixels.view(batch, _SIDE, PATCH_SIZE, _SIDE, PATCH_SIZE, 3).permute(0, 1, 3, 5, 2, 4)
        tokens = self.patch(patches.reshape(batch, IMAGE_TOKENS, -1).to(self.patch.weight.dtype))
        x = torch.cat((self.class_embedding.expand(batch, 1, -1), tokens), 1) + self.positions
        x = self.pre_norm(x)
        for block in self.blocks:
            x = block(x)
        return x[:, 1:]


class DenseHeads(nn.Module):
    """Features to logits of every kind of label: a list of ``[batch, patches, cells of a patch, classes]``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_VISION.hidden_size)
        self.heads = nn.ModuleList(nn.Linear(_VISION.hidden_size, _CELLS * kind.num_classes) for kind in LABELS)

    def forward(self, features: Tensor) -> list[Tensor]:
        x = self.norm(features)
        return [head(x).view(*x.shape[:2], _CELLS, -1) for head in self.heads]


def dense_loss(logits: list[Tensor], labels: Tensor, *, late: bool) -> tuple[Tensor, list[float]]:
    """The loss over uint8 ``[batch, kinds, grid, grid]`` labels, and of each kind the share of things named right.

    late: whether the kinds count that come late.
    """
    batch = len(labels)
    cells = labels.view(batch, len(LABELS), _SIDE, CELLS_PER_PATCH, _SIDE, CELLS_PER_PATCH)
    targets = cells.permute(1, 0, 2, 4, 3, 5).reshape(len(LABELS), -1).long()
    total, right = torch.zeros((), device=labels.device), []
    for kind, scores, target in zip(LABELS, logits, targets, strict=True):
        if kind.late and not late:
            continue
        scores = scores.float().flatten(0, 2)
        losses = F.cross_entropy(scores, target, reduction="none")
        thing = target > 0
        num_things = thing.sum().clamp(min=1)
        # Most cells are empty: things count as much again.
        total = total + kind.weight * (losses.mean() + 0.5 * (losses * thing).sum() / num_things)
        right.append(float(((scores.argmax(-1) == target) & thing).sum() / num_things))
    return total, right


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_TEXT.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, _TEXT.rms_norm_eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rotations(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `rotate`: ``[..., 1, half of a head]`` for each position."""
    half = _TEXT.head_dim // 2
    frequencies = _TEXT.rope_parameters["rope_theta"] ** -(torch.arange(half, device=positions.device) / half)
    angles = positions.float()[..., None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


class DecoderBlock(nn.Module):
    """A layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        width, head = _TEXT.hidden_size, _TEXT.head_dim
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()
        self.q = nn.Linear(width, _TEXT.num_attention_heads * head, bias=False)
        self.k = nn.Linear(width, _TEXT.num_key_value_heads * head, bias=False)
        self.v = nn.Linear(width, _TEXT.num_key_value_heads * head, bias=False)
        self.o = nn.Linear(_TEXT.num_attention_heads * head, width, bias=False)
        self.gate = nn.Linear(width, _TEXT.intermediate_size, bias=False)
        self.up = nn.Linear(width, _TEXT.intermediate_size, bias=False)
        self.down = nn.Linear(_TEXT.intermediate_size, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        kv_heads, head = _TEXT.num_key_value_heads, _TEXT.head_dim
        h = self.norm1(x)
        query = rotate(self.q(h).view(batch, length, -1, head), cos, sin) * head**-0.5
        key = rotate(self.k(h).view(batch, length, kv_heads, head), cos, sin)
        value = self.v(h).view(batch, length, kv_heads, head)
        query = query.view(batch, length, kv_heads, -1, head).permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, -1, head)
        key = key.permute(0, 2, 3, 1).reshape(batch * kv_heads, head, length)
        value = value.permute(0, 2, 1, 3).reshape(batch * kv_heads, length, head)
        scores = torch.bmm(query, key).view(batch, -1, length, length) + mask
        weights = scores.softmax(-1).view(batch * kv_heads, -1, length)
        attended = torch.bmm(weights, value).view(batch, kv_heads, -1, length, head).permute(0, 3, 1, 2, 4)
        x = x + self.o(attended.reshape(batch, length, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Projector and language model over packed rows of tokens."""

    def __init__(self) -> None:
        super().__init__()
        width = _TEXT.hidden_size
        self.embeddings = nn.Embedding(_TEXT.vocab_size, width)
        self.blocks = nn.ModuleList(DecoderBlock() for _ in range(_TEXT.num_hidden_layers))
        self.norm = RMSNorm()
        self.project1 = nn.Linear(_VISION.hidden_size, width)
        self.project2 = nn.Linear(width, width)
        nn.init.normal_(self.embeddings.weight, std=0.1)
        for name, parameter in self.blocks.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(parameter, std=width**-0.5 * (0.3 if residual else 1.0))

    @torch.no_grad()
    def fit_projector(self, features: Tensor) -> None:
        """Start the projector so that features, which share a large mean, come out centred and as large as text."""
        x = features.float().reshape(-1, features.shape[-1])
        first, second = self.project1, self.project2
        first.weight.normal_(0, x.shape[1] ** -0.5).div_(x.std(0))
        first.bias.copy_(-(first.weight @ x.mean(0)))
        second.weight.normal_(0, second.weight.shape[1] ** -0.5)
        second.bias.zero_()
        second.weight.mul_(0.3 / second(F.gelu(first(x))).pow(2).mean().sqrt())

    def project(self, features: Tensor) -> Tensor:
        projected: Tensor = self.project2(F.gelu(self.project1(features)))
        return projected

    def forward(
        self, tokens: Tensor, positions: Tensor, groups: Tensor, branches: Tensor, features: Tensor, said: Tensor
    ) -> Tensor:
        """Logits ``[tokens that are said, vocabulary]`` of packed rows.

        tokens, positions, groups, branches: int64 ``[rows, length]``; see `rows.pack`. features: ``[images, patches,
        width]`` in the order of their placeholders. said: bool ``[rows, length]``, after which tokens one is predicted.
        """
        x = self.embeddings(tokens)
        if len(features):
            x = x.masked_scatter((tokens == IMAGE)[..., None], self.project(features).reshape(-1, x.shape[-1]))
        cos, sin = rotations(positions, x.dtype)
        hidden = ~seen(groups, branches)
        mask = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device).masked_fill_(hidden, -1e4)
        for block in self.blocks:
            x = block(x, mask, cos, sin)
        return F.linear(self.norm(x)[said], self.embeddings.weight)


def seen(groups: Tensor, branches: Tensor) -> Tensor:
    """Which tokens of packed rows a token sees: bool ``[rows, 1, length, length]``. groups, branches: ``[rows,
    length]``; see `rows.pack`."""
    before = torch.ones(groups.shape[1], groups.shape[1], dtype=torch.bool, device=groups.device).tril()
    together = groups[:, :, None] == groups[:, None, :]
    together &= (branches[:, None, :] == 0) | (branches[:, :, None] == branches[:, None, :])
    return (before & together)[:, None]


def hugging_face_names(tower: dict[str, Tensor], decoder: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of `Tower` and `Decoder` under the names of transformers' LLaVA."""
    width = _VISION.hidden_size
    vision, text, projector = "model.vision_tower.", "model.language_model.", "model.multi_modal_projector."
    named = {
        f"{vision}embeddings.class_embedding": tower["class_embedding"],
        f"{vision}embeddings.patch_embedding.weight": tower["patch.weight"].view(width, 3, PATCH_SIZE, PATCH_SIZE),
        f"{vision}embeddings.position_embedding.weight": tower["positions"],
        # LLaVA takes the features from before this norm.
        f"{vision}post_layernorm.weight": torch.ones(width),
        f"{vision}post_layernorm.bias": torch.zeros(width),
        f"{text}embed_tokens.weight": decoder["embeddings.weight"],
        f"{text}norm.weight": decoder["norm.weight"],
    }
    tower_names = {"norm1": "layer_norm1", "norm2": "layer_norm2", "out": "self_attn.out_proj"}
    tower_names |= {"fc1": "mlp.fc1", "fc2": "mlp.fc2"}
    for kind in ("weight", "bias"):
        named[f"{vision}pre_layrnorm.{kind}"] = tower[f"pre_norm.{kind}"]
        for index in (1, 2):
            named[f"{projector}linear_{index}.{kind}"] = decoder[f"project{index}.{kind}"]
        for layer in range(_VISION.num_hidden_layers):
            ours, theirs = f"blocks.{layer}.", f"{vision}encoder.layers.{layer}."
            for part, tensor in zip("qkv", tower[f"{ours}qkv.{kind}"].chunk(3), strict=True):
                named[f"{theirs}self_attn.{part}_proj.{kind}"] = tensor
            named |= {f"{theirs}{to}.{kind}": tower[f"{ours}{name}.{kind}"] for name, to in tower_names.items()}
    decoder_names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    decoder_names |= {part: f"self_attn.{part}_proj" for part in "qkvo"}
    decoder_names |= {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    for layer in range(_TEXT.num_hidden_layers):
        for name, to in decoder_names.items():
            named[f"{text}layers.{layer}.{to}.weight"] = decoder[f"blocks.{layer}.{name}.weight"]
    return {name: tensor.float().contiguous() for name, tensor in named.items()}


@torch.no_grad()
def take_weights(tower: Tower, decoder: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights of transformers' LLaVA into float32 modules."""
    # The parameters under other names are views of the modules' own.
    for name, parameter in hugging_face_names(tower.state_dict(), decoder.state_dict()).items():
        parameter.copy_(weights[name])

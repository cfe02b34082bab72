"""Small random Moondream checkpoints as the hub's files look, and the oracle's opinion of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tests.normalized import processed
from tests.oracles.moondream import MoondreamOracle
from tests.prompt.tokenizers_for_tests import CORPUS
from vlmserve.media.crops import CropProcessor
from vlmserve.media.images import DecodedImage
from vlmserve.types import ImageInput, ImageSpan, Prompt

BEGIN = 0
TOKENS = 25
"""Of an image."""
NEW_TOKENS = 12
TEXT: dict[str, int] = {
    "dim": 48,
    "ff_dim": 80,
    "n_layers": 3,
    "vocab_size": 320,
    "max_context": 256,
    "n_heads": 4,
    "n_kv_heads": 4,
    "prefix_attn": 1 + TOKENS,
}
VISION: dict[str, int] = {
    "enc_dim": 32,
    "enc_patch_size": 4,
    "enc_n_layers": 2,
    "enc_ff_dim": 56,
    "enc_n_heads": 4,
    "proj_out_dim": 48,
    "crop_size": 20,
    "in_channels": 3,
    "max_crops": 6,
    "overlap_margin": 1,
    "proj_inner_dim": 72,
}
SETTINGS: dict[str, Any] = {"text": TEXT, "vision": VISION, "tokenizer": {"bos_id": BEGIN, "eos_id": BEGIN}}


def make_moondream(folder: Path, *, prefix: str = "model.", **text: int) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint in `folder`, and its tensors. prefix: of their names. text: fields of the text model's settings."""
    settings = {**SETTINGS, "text": {**TEXT, **text}}
    config = {
        "architectures": ["HfMoondream"],
        "auto_map": {"AutoModelForCausalLM": "hf_moondream.HfMoondream"},
        "config": settings,
        "model_type": "moondream1",
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {prefix + name: tensor for name, tensor in _weights(settings["text"]).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)
    return folder, weights


def _weights(text: dict[str, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}

    def random(*shape: int, std: float = 0.15) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    def linear(name: str, inputs: int, outputs: int, std: float = 0.15) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = random(outputs, inputs, std=std), random(outputs, std=0.2)

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + random(size, std=0.2), random(size, std=0.2)

    def block(name: str, size: int, inner: int, qkv: int, std: float) -> None:
        linear(f"{name}.attn.qkv", size, qkv, std)
        linear(f"{name}.attn.proj", size, size)
        linear(f"{name}.mlp.fc1", size, inner)
        linear(f"{name}.mlp.fc2", inner, size)

    vision = VISION
    size, dim = vision["enc_dim"], text["dim"]
    linear("vision.patch_emb", 3 * vision["enc_patch_size"] ** 2, size)
    weights["vision.pos_emb"] = random(1, TOKENS, size)
    for layer in range(vision["enc_n_layers"]):
        block(f"vision.blocks.{layer}", size, vision["enc_ff_dim"], 3 * size, 0.15)
        norm(f"vision.blocks.{layer}.ln1", size)
        norm(f"vision.blocks.{layer}.ln2", size)
    norm("vision.post_ln", size)
    linear("vision.proj_mlp.fc1", 2 * size, vision["proj_inner_dim"])
    linear("vision.proj_mlp.fc2", vision["proj_inner_dim"], vision["proj_out_dim"])
    weights["text.wte"] = random(text["vocab_size"], dim, std=0.5)
    for layer in range(text["n_layers"]):
        qkv = dim + 2 * dim * text["n_kv_heads"] // text["n_heads"]
        block(f"text.blocks.{layer}", dim, text["ff_dim"], qkv, 0.3)
        norm(f"text.blocks.{layer}.ln", dim)
    norm("text.post_ln", dim)
    linear("text.lm_head", dim, text["vocab_size"])
    linear("region.coord_decoder.fc1", 8, 8)
    return weights


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT["vocab_size"] - 8,
        special_tokens=[AddedToken("<|endoftext|>", special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS, "\n\nQuestion: What?\n\nAnswer: This.\n\nCaption: That."], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CodeGenTokenizer", **named}))


def noise(seed: int, width: int, height: int) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(levels)


@dataclass
class Moondream:
    """A checkpoint and the oracle's opinion of it."""

    folder: Path
    oracle: MoondreamOracle

    @classmethod
    def make(cls, folder: Path, **options: Any) -> Moondream:
        folder, weights = make_moondream(folder, **options)
        settings = json.loads((folder / "config.json").read_text())["config"]
        return cls(folder, MoondreamOracle(settings, weights))

    def make_image(self, seed: int) -> tuple[Image.Image, ImageInput]:
        """Of some shape."""
        width, height = [(20, 20), (61, 30), (17, 90), (45, 44), (200, 30), (36, 80)][seed % 6]
        pil_image = noise(seed, width, height)
        processor = CropProcessor({"config": SETTINGS})
        pixels = processed(processor, DecodedImage.whole(pil_image))
        return pil_image, ImageInput(
            hashlib.sha256(pixels.tobytes()).digest(), pixels, processor.placeholders(pixels, pil_image.size).num_tokens
        )

    def prompt(self, image_seed: int, length: int, text: int = 0) -> Prompt:
        """An image and so many tokens of a question."""
        ids = np.random.default_rng(1000 + text).integers(1, TEXT["vocab_size"], length).tolist()
        _, image = self.make_image(image_seed)
        return Prompt([BEGIN] * (1 + TOKENS) + ids, (ImageSpan(image, 1),))

    def greedy(self, image_seed: int, prompt: Prompt, count: int = NEW_TOKENS) -> list[int]:
        """image_seed: of the prompt's."""
        embeddings = self.oracle.embed(prompt.token_ids)
        embeddings[1 : 1 + TOKENS] = self.oracle.see(*self.oracle.crops(self.make_image(image_seed)[0]))
        answer: list[int] = []
        for _ in range(count):
            answer.append(int(self.oracle.logits(embeddings, 1 + TOKENS)[-1].argmax()))
            embeddings = torch.cat((embeddings, self.oracle.embed(answer[-1:])))
        return answer

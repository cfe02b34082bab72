"""Small random BLIP checkpoints with the files that a server needs, and transformers' opinion of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BlipConfig, BlipForConditionalGeneration, BlipForQuestionAnswering

from tests.checkpoints import change_tensors
from tests.normalized import normalized
from tests.prompt.tokenizers_for_tests import CORPUS
from tests.saved_models import save_model
from vlmserve.types import CrossInput, ImageInput, Prompt

CAPTION, QUESTION = BlipForConditionalGeneration, BlipForQuestionAnswering
CLASSES = {"caption": CAPTION, "question": QUESTION}
VOCABULARY = 200
"""Tokens of the tokenizer; the model has two more, the first of which begins every answer."""
BEGIN = VOCABULARY
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY + 2,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "bos_token_id": BEGIN,
    "sep_token_id": 3,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 8,
    "initializer_range": 0.15,
}
FEATURES = 10
"""Of an image: the class token and 3 x 3 patches."""
NEW_TOKENS = 12


def make_blip(
    folder: Path,
    kind: str = "caption",
    *,
    dtype: torch.dtype = torch.float32,
    text: Mapping[str, Any] = MappingProxyType({}),
    **vision: Any,
) -> Path:
    """A checkpoint in `folder`; kind: of `CLASSES`; text, vision: fields of the decoder's and the tower's configs."""
    text_config = {**TEXT, **text}
    width = {} if kind == "caption" else {"hidden_size": text_config["hidden_size"]}
    write_wordpiece(folder)
    config = BlipConfig(text_config=text_config, vision_config={**VISION, **width, **vision}, initializer_range=0.15)
    save_model(folder, CLASSES[kind], config, 0, torch.float32, "1GB")
    torch.manual_seed(1)
    change_tensors(folder, lambda name, tensor: (name, _livelier(name, tensor).to(dtype)))
    processor = {"image_processor_type": "BlipImageProcessor", "size": {"height": 24, "width": 24}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def _livelier(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Weights that make answers which vary, and depend on images and positions."""
    if name.endswith("LayerNorm.weight"):
        return tensor + 0.2 * torch.randn(tensor.shape)
    if "position_embeddings" in name:
        return 8 * tensor
    return 3 * tensor if name.endswith(("query.weight", "key.weight")) else tensor


def write_wordpiece(folder: Path) -> Tokenizer:
    """A tokenizer like BERT's."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    settings = {"tokenizer_class": "BertTokenizer", "mask_token": "[MASK]", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


@dataclass
class BlipOracle:
    """A checkpoint and transformers' opinion of it."""

    folder: Path
    kind: str
    model: Any

    @classmethod
    def make(cls, folder: Path, kind: str) -> BlipOracle:
        return cls.of(make_blip(folder, kind), kind)

    @classmethod
    def of(cls, folder: Path, kind: str) -> BlipOracle:
        """Of a checkpoint that is there."""
        model = CLASSES[kind].from_pretrained(folder, dtype=torch.float32).eval()
        model.config.text_config.sep_token_id = None  # answers go on behind the end token, as `ignore_eos` has it
        model.text_decoder.generation_config.eos_token_id = None
        return cls(folder, kind, model)

    def make_image(self, seed: int) -> ImageInput:
        shape = (1, 3, VISION["image_size"], VISION["image_size"])
        pixels = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        return ImageInput(hashlib.sha256(pixels.tobytes()).digest(), pixels, FEATURES)

    def prompt(self, image_seed: int, length: int, text: int = 0) -> Prompt:
        """About an image, with so many tokens of a text: how a caption begins, or a question."""
        ids = np.random.default_rng(1000 + text).integers(5, VOCABULARY, length).tolist()
        image = self.make_image(image_seed)
        if self.kind == "caption":
            return Prompt([BEGIN, *ids], cross=CrossInput(image))
        return Prompt([BEGIN], cross=CrossInput(image, [2, *ids, 3]))

    @torch.inference_mode()
    def greedy(self, prompt: Prompt, count: int = NEW_TOKENS) -> list[int]:
        assert prompt.cross is not None
        # A caption's text comes between [CLS], in whose place the first token is put, and [SEP], which is cut off.
        text = [2, *prompt.token_ids[1:], 3] if self.kind == "caption" else prompt.cross.token_ids
        generated = self.model.generate(
            pixel_values=torch.from_numpy(normalized(prompt.cross.image)),
            input_ids=torch.tensor([text]),
            max_new_tokens=count,
            do_sample=False,
        )
        return generated[0, len(prompt.token_ids) :].tolist()

"""Conversations with images of any shape, what transformers says of them from the files of a checkpoint, and checks of
that for every family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from transformers import AutoModelForImageTextToText

from tests.engine.test_parity import NEW_TOKENS, assert_no_further, engine_for, first_logits, generate
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.settings.config import MediaConfig
from vlmserve.types import Prompt

Part = str | tuple[int, int]


def user(*parts: Part, seed: int = 0) -> dict[str, Any]:
    """A message of texts and of images of some width and height."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": make_image(*part, seed)}
        for part in parts
    ]
    return {"role": "user", "content": content}


def make_image(width: int, height: int, seed: int = 0) -> Image.Image:
    levels = np.random.default_rng([width, height, seed]).integers(
        0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8
    )
    return Image.fromarray(levels).resize((width, height))


def shown(message: dict[str, Any]) -> list[Image.Image]:
    return [part["image"] for part in message["content"] if part["type"] == "image"]


@dataclass
class Oracle:
    """A checkpoint, our prompts of it, and transformers' opinion of it."""

    folder: Path
    model: nn.Module
    preparer: RequestPreparer
    processor: Any

    def prompt(self, *messages: dict[str, Any]) -> Prompt:
        return self.preparer.chat(messages, allow_local=True)

    def inputs(self, *messages: dict[str, Any]) -> dict[str, torch.Tensor]:
        inputs = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        return {name: value for name, value in inputs.items() if name not in ("rows", "cols")}

    @torch.inference_mode()
    def greedy(self, *messages: dict[str, Any], guess: Sequence[int] = ()) -> list[int]:
        """guess: an answer that need not be right. One pass over all of it tells, which is faster than to find it."""
        inputs = self.inputs(*messages)
        if len(guess) == NEW_TOKENS and self.preparer.tokenizer.image_token_id not in guess:
            likeliest = self._logits(inputs, list(guess[:-1])).argmax(-1).tolist()
            if likeliest == list(guess):
                return likeliest
        generated = self.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        return generated[0, inputs["input_ids"].shape[1] :].tolist()

    def _logits(self, inputs: dict[str, torch.Tensor], answer: list[int]) -> torch.Tensor:
        """After the prompt and after each token of the answer."""
        prompt = inputs["input_ids"]
        longer = {"input_ids": torch.cat((prompt, torch.tensor([answer], dtype=prompt.dtype)), 1)}
        for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                value = int(name == "attention_mask")
                longer[name] = functional.pad(inputs[name], (0, len(answer)), value=value)
        return self.model(**{**inputs, **longer}).logits[0, prompt.shape[1] - 1 :]


CONVERSATIONS: list[dict[str, Any]] = [
    user((40, 30), "What is this?"),
    user("Look: ", (20, 60)),
    user("hello"),
    user((90, 10), "and", (16, 16), "differ", seed=1),
    user("How many green triangles are there in the picture?\n"),
    user((30, 31), (64, 20), "?"),
    user("a", (5, 47), "b\n"),
    user((48, 48), "\nDescribe the image, please: USER ASSISTANT system.", seed=2),
]


def open_oracle(folder: Path, processor: Any) -> Oracle:
    """In float32, and it never ends an answer. processor: of transformers."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return Oracle(folder, model, RequestPreparer(folder, MediaConfig()), processor)


def check_a_further_turn(oracle: Oracle) -> None:
    """It finds the images of the first."""
    turns = [user((40, 30), "What is this?"), {"role": "assistant", "content": [{"type": "text", "text": "a red"}]}]
    turns.append(user("And", (64, 20), "?"))
    engine = engine_for(oracle, block_size=4)
    generate(engine, [oracle.prompt(turns[0])])
    prompt = oracle.prompt(*turns)
    assert prompt.token_ids == oracle.inputs(*turns)["input_ids"][0].tolist()
    [answer] = generate(engine, [prompt])
    assert answer == oracle.greedy(*turns, guess=answer)
    assert engine.stats().prefix_cached_tokens >= prompt.images[0].end - 4
    assert engine.stats().images_encoded == 2


@torch.inference_mode()
def check_bfloat16(oracle: Oracle, prompts: list[Prompt]) -> None:
    """As far from float32 as transformers' own bfloat16 is, and no further."""
    inputs = [oracle.inputs(message) for message in CONVERSATIONS]
    exact = [oracle.model(**own).logits[0, -1] for own in inputs]
    rounded = AutoModelForImageTextToText.from_pretrained(oracle.folder, dtype=torch.bfloat16).eval()
    theirs = []
    for own in inputs:
        pixels = {"pixel_values": own["pixel_values"].bfloat16()} if "pixel_values" in own else {}
        theirs.append(rounded(**{**own, **pixels}).logits[0, -1].float())
    ours = first_logits(engine_for(oracle, dtype="bfloat16"), prompts)
    assert_no_further(ours, torch.stack(theirs), torch.stack(exact))

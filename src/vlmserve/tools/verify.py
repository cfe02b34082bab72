"""Compares a checkpoint with Transformers: templates, tokens, images, logits, greedy answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from vlmserve.devices.choice import type_for_torch
from vlmserve.engine.engine import Engine
from vlmserve.engine.loading import load
from vlmserve.errors import UnsupportedModelError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.models.registry import read_json
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.types import EngineRequest, Prompt, SamplingParams

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Maximum difference of logits, in standard deviations of a row. Rounding errors add up over layers on both sides."""

Conversation = list[dict[str, Any]]
Verdict = Literal["same", "near tie", "other prompt", "other logits", "other tokens"]


class Comparison(msgspec.Struct, frozen=True):
    error: float
    """Maximum difference of logits up to the first differing token, in standard deviations of Transformers' logits."""
    ours: list[int]
    """Answer tokens of vlmserve."""
    theirs: list[int]
    """Answer tokens of Transformers."""
    prompt_place: int | None
    """First differing prompt token; None: all are equal."""
    gap: float | None
    """Difference of both tokens' logits in Transformers at the first differing token, in the unit of `error`; None: all
    are equal.
    """
    tolerance: float
    """Maximum `error`."""

    @property
    def verdict(self) -> Verdict:
        if self.prompt_place is not None:
            return "other prompt"
        if not self.error <= self.tolerance:
            return "other logits"
        if self.gap is None:
            return "same"
        # Rounding can swap two tokens only if their logits are this close.
        return "near tie" if self.gap <= 2.01 * self.error else "other tokens"

    @property
    def place(self) -> int:
        """Number of equal leading tokens."""
        pairs = zip(self.ours, self.theirs, strict=False)
        return next((place for place, (our, their) in enumerate(pairs) if our != their), len(self.ours))


class Answer(msgspec.Struct, frozen=True):
    prompt_ids: list[int]
    token_ids: list[int]
    logits: Tensor
    """float32 ``[len(token_ids), vocabulary]``."""


class Ours:
    def __init__(self, config: EngineConfig, folder: Path) -> None:
        config = config.model_copy(update={"enable_prefix_caching": False})
        self.model = load(config, folder)
        self._engine = Engine.from_model(config, self.model)
        self._preparer = RequestPreparer(folder, read_settings(MediaConfig, {}), config.model_impl)

    def answer(self, conversation: Conversation, num_tokens: int) -> Answer:
        prompt = self._prepare(conversation)
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        with record_logits(self.model.language_model) as rows:
            self._engine.add(EngineRequest("verify", prompt, params))
            tokens: list[int] = []
            while self._engine.has_work():
                for output in self._engine.step():
                    tokens += output.token_ids
        return Answer(list(prompt.token_ids), tokens, torch.cat(rows))

    def _prepare(self, conversation: Conversation) -> Prompt:
        if self._preparer.can_chat:
            return self._preparer.chat(conversation, allow_local=True)
        return self._preparer.text(_only_text(conversation))


class Theirs:
    """Transformers in the same type, or float32 if the device computes that type slowly.

    Raises UnsupportedModelError if Transformers cannot load it, or it takes images but no conversations.
    """

    def __init__(self, folder: Path, *, takes_images: bool, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import (
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
            AutoProcessor,
            AutoTokenizer,
            GgufConfig,
        )

        model_class = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
        processor_class: Any = AutoProcessor if takes_images else AutoTokenizer
        place: dict[str, Any] = {"pretrained_model_name_or_path": folder}
        how: dict[str, Any] = {}
        if folder.is_file():
            place = {"pretrained_model_name_or_path": folder.parent, "gguf_file": folder.name}
            how = {"quantization_config": GgufConfig(dequantize=True)}
        try:
            dtype = type_for_torch(device, dtype)
            self._model = model_class.from_pretrained(**place, **how, dtype=dtype).eval().to(device)
            self._processor = processor_class.from_pretrained(**place)
        except (ValueError, KeyError, OSError, ImportError) as error:
            raise UnsupportedModelError(f"transformers cannot load this checkpoint to compare with: {error}") from error
        self._device = device
        self._template = getattr(self._processor, "chat_template", None)
        if takes_images and self._template is None:
            raise UnsupportedModelError("without a chat template there is no common way to ask about an image")

    @torch.inference_mode()
    def answer(self, conversation: Conversation, num_tokens: int) -> Answer:
        inputs = self._inputs(conversation).to(self._device)
        for name, value in inputs.items():
            if value.is_floating_point():
                inputs[name] = value.to(self._model.dtype)
        output = self._model.generate(
            **inputs, do_sample=False, num_beams=1, repetition_penalty=1.0, min_new_tokens=None, eos_token_id=None,
            max_new_tokens=num_tokens, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        ids = inputs["input_ids"][0].tolist()
        return Answer(ids, output.sequences[0, len(ids) :].tolist(), torch.cat(output.logits).float())

    def _inputs(self, conversation: Conversation) -> Any:
        if self._template is None:
            return self._processor(_only_text(conversation), return_tensors="pt")
        parts = [{"role": message["role"], "content": _in_parts(message["content"])} for message in conversation]
        plain = not hasattr(self._processor, "image_processor")
        return self._processor.apply_chat_template(
            conversation if plain else parts, add_generation_prompt=True, tokenize=True, return_dict=True,
            return_tensors="pt",
        )  # fmt: skip


def compare(ours: Answer, theirs: Answer, tolerance: float) -> Comparison:
    """Compare up to the first differing token: after it, the texts differ."""
    pairs = zip(ours.prompt_ids, theirs.prompt_ids, strict=False)
    prompt_place = next((place for place, (our, their) in enumerate(pairs) if our != their), None)
    if prompt_place is None and len(ours.prompt_ids) != len(theirs.prompt_ids):
        prompt_place = min(len(ours.prompt_ids), len(theirs.prompt_ids))
    both = Comparison(0.0, ours.token_ids, theirs.token_ids, prompt_place, None, tolerance)
    size = min(ours.logits.shape[1], theirs.logits.shape[1])
    rows = slice(0, min(both.place + 1, len(ours.token_ids)))
    expected, found = theirs.logits[rows, :size].cpu(), ours.logits[rows, :size].cpu()
    spread = expected.std(1, keepdim=True)
    error = float(((found - expected).abs() / spread).max())
    gap = None
    if both.place < len(ours.token_ids):
        row = theirs.logits[both.place].cpu()
        gap = float((row[theirs.token_ids[both.place]] - row[ours.token_ids[both.place]]).abs() / row.std())
    return msgspec.structs.replace(both, error=error, gap=gap)


def supports_images(folder: Path) -> bool:
    config = {} if folder.is_file() else read_json(folder / "config.json")
    return any(name in config for name in ("vision_config", "visual"))


@contextmanager
def record_logits(model: Any) -> Iterator[list[Tensor]]:
    """Record copies of all logits, float32 ``[rows, vocabulary]`` each."""
    rows: list[Tensor] = []
    compute: Callable[..., Tensor] = model.logits

    def logits(*arguments: Any) -> Tensor:
        result = compute(*arguments)
        rows.append(result.float().clone())
        return result

    model.logits = logits
    try:
        yield rows
    finally:
        del model.logits


def _in_parts(content: str | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _only_text(conversation: Conversation) -> str:
    def texts() -> Iterator[str]:
        for message in conversation:
            for part in _in_parts(message["content"]):
                if part["type"] == "text":
                    yield part["text"]

    return "\n".join(texts())

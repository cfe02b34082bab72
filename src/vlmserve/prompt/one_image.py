"""Prompts of models without conversations: one image and one text, which may be empty for some models."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vlmserve.errors import InvalidRequestError, ModelLoadError
from vlmserve.families.registry import vision_family
from vlmserve.prompt.template import Message
from vlmserve.types import CrossInput, ImageInput, ImageSpan, Prompt

Encode = Callable[[str, bool], list[int]]
"""Tokenizes a text; the flag adds the tokenizer's own special tokens."""


class OneImagePrompts(Protocol):
    @property
    def describes(self) -> bool:
        """True if an image needs no text."""
        ...

    def prompt(self, image: ImageInput, text: str, encode: Encode) -> Prompt: ...


@dataclass(frozen=True)
class CaptionPrompts:
    """The decoder cross-attends to the image and continues the text. begin: its first token."""

    begin: int
    describes: bool = True

    def prompt(self, image: ImageInput, text: str, encode: Encode) -> Prompt:
        return Prompt([self.begin, *encode(text, False)], cross=CrossInput(image))


@dataclass(frozen=True)
class QuestionPrompts:
    """An encoder reads text and image, and the decoder cross-attends to its states. begin: the decoder's first
    token.
    """

    begin: int
    describes: bool = False

    def prompt(self, image: ImageInput, text: str, encode: Encode) -> Prompt:
        return Prompt([self.begin], cross=CrossInput(image, encode(text, True)))


@dataclass(frozen=True)
class MoondreamPrompts:
    """The token `begin`, the image, then the question between fixed words."""

    begin: int
    describes: bool = True

    def prompt(self, image: ImageInput, text: str, encode: Encode) -> Prompt:
        pieces = ["\n\nQuestion:", f" {text}", "\n\nAnswer:"] if text else ["\n\nCaption:"]
        asked = [token_id for piece in pieces for token_id in encode(piece, False)]
        # without an image token, the span marks the positions
        return Prompt([self.begin] * (1 + image.num_tokens) + asked, (ImageSpan(image, 1),))


def one_image_prompts(config: Mapping[str, Any]) -> OneImagePrompts | None:
    """None for a model with conversations. Raises ModelLoadError for an invalid token id."""
    family = vision_family(config)
    if family is None or family.prompts is None:
        return None
    prompts: OneImagePrompts = pkgutil.resolve_name(family.prompts)(config)
    return prompts


def moondream(config: Mapping[str, Any]) -> MoondreamPrompts:
    return MoondreamPrompts(_token_id(_part(_part(config, "config"), "tokenizer"), "bos_id", 50256))


def blip_captions(config: Mapping[str, Any]) -> CaptionPrompts:
    return CaptionPrompts(_blip_begin(config))


def blip_questions(config: Mapping[str, Any]) -> QuestionPrompts:
    return QuestionPrompts(_blip_begin(config))


def _blip_begin(config: Mapping[str, Any]) -> int:
    return _token_id(_part(config, "text_config"), "bos_token_id", 30522)


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}


def _token_id(config: Mapping[str, Any], name: str, default: int) -> int:
    token_id = config.get(name, default)
    if not isinstance(token_id, int):
        raise ModelLoadError(f"config.json: {name} is {token_id!r}, not a token id")
    return token_id


def only_text(messages: Sequence[Message]) -> str:
    """Return the text of the only user message. Raises InvalidRequestError for anything else."""
    if [message.role for message in messages] != ["user"]:
        raise InvalidRequestError(
            "this model does not support conversations: send one user message, with an image and a text",
            param="messages",
        )
    return "\n".join(part for part in messages[0].parts if isinstance(part, str)).strip()

"""Prompts of models that know no conversation: a request is one picture and one text, which may be empty for some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vlmserve.errors import InvalidRequestError, ModelLoadError
from vlmserve.prompt.template import ImagePart, Message
from vlmserve.types import CrossInput, ImageInput, Prompt

Encode = Callable[[str, bool], list[int]]
"""From a text, and whether it stands between the tokenizer's own beginning and end tokens, to token ids."""


class OnePicturePrompts(Protocol):
    """How one family writes its prompts."""

    @property
    def describes(self) -> bool:
        """Whether it takes a picture without a text."""
        ...

    def prompt(self, image: ImageInput, text: str, encode: Encode) -> Prompt:
        """The prompt of a picture and a text."""
        ...


@dataclass(frozen=True)
class CaptionPrompts:
    """The decoder looks at the picture and goes on with the text, or begins by itself. begin: its first token."""

    begin: int
    describes: bool = True

    def prompt(self, image: ImageInput, text: str, encode: Encode) -> Prompt:
        return Prompt([self.begin, *encode(text, False)], cross=CrossInput(image))


@dataclass(frozen=True)
class QuestionPrompts:
    """An encoder reads the text along with the picture, and the decoder looks at what came of it. begin: as above."""

    begin: int
    describes: bool = False

    def prompt(self, image: ImageInput, text: str, encode: Encode) -> Prompt:
        return Prompt([self.begin], cross=CrossInput(image, encode(text, True)))


def one_picture_prompts(config: Mapping[str, Any]) -> OnePicturePrompts | None:
    """How the model of a config.json is prompted, None for one that holds conversations.

    Raises ModelLoadError for a config whose first token is none.
    """
    if config.get("model_type") != "blip":
        return None
    text_config = config.get("text_config")
    begin = text_config.get("bos_token_id", 30522) if isinstance(text_config, Mapping) else 30522
    if not isinstance(begin, int):
        raise ModelLoadError(f"config.json: bos_token_id is {begin!r}, not a token id")
    answers = "BlipForQuestionAnswering" in (config.get("architectures") or ())
    return QuestionPrompts(begin) if answers else CaptionPrompts(begin)


def only_text(messages: Sequence[Message]) -> str:
    """The text that comes with the picture. Raises InvalidRequestError for what is more than one turn of the user."""
    if [message.role for message in messages] != ["user"]:
        raise InvalidRequestError(
            "this model holds no conversations: send one message of the user, with a picture and a text",
            param="messages",
        )
    return "\n".join(part for part in messages[0].parts if not isinstance(part, ImagePart)).strip()

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from vlmserve.errors import ModelLoadError
from vlmserve.settings.config import MediaConfig


class ImageTokens(Protocol):
    """The part of a tokenizer that image processors use."""

    @property
    def special_tokens(self) -> Mapping[str, str]: ...
    @property
    def image_token(self) -> str | None: ...
    @property
    def image_token_id(self) -> int | None: ...
    def token_id(self, token: str) -> int | None: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class ImageFiles:
    config: dict[str, Any]
    settings: dict[str, Any]
    """preprocessor_config.json, or the section of the image processor."""
    processor_config: dict[str, Any]
    tokenizer: ImageTokens
    media: MediaConfig

    @property
    def exact_pixels(self) -> bool:
        return self.media.exact_pixels

    def token_id(self, name: str, usual: str) -> int:
        """usual: the token's text if the tokenizer does not name it. Raises ModelLoadError for an unknown token."""
        token = self.tokenizer.special_tokens.get(name, usual)
        token_id = self.tokenizer.token_id(token)
        if token_id is None:
            raise ModelLoadError(f"the tokenizer lacks the token {token}, which prompts with images need")
        return token_id

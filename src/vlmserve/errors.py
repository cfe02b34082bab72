"""Errors that vlmserve raises on purpose. Only the server knows HTTP statuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

MAX_SHOWN_ERRORS = 20
"""Maximum errors that a combined message shows."""


class VLMServeError(Exception):
    """Base of all vlmserve errors."""


class InvalidRequestError(VLMServeError):
    """A request that can never succeed as sent.

    param: the wrong field. code: a stable word for programs. source: path or URL at fault.
    """

    code = "invalid_request"
    source: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def locate(self, place: str | None = None) -> None:
        before = [] if place is None else [place]
        if self.source is not None:
            known = (self.param or "", self.source)
            before += [word for word in known if word and word not in str(self)]
        if before:
            self.args = (f"{', '.join(before)}: {self}",)


class InvalidRequestsError(InvalidRequestError):
    def __init__(self, errors: Sequence[InvalidRequestError]) -> None:
        all_errors: list[InvalidRequestError] = []
        for error in errors:
            all_errors += error.errors if isinstance(error, InvalidRequestsError) else [error]
        self.errors: tuple[InvalidRequestError, ...] = tuple(all_errors)
        super().__init__(self._message(), param=self.errors[0].param)

    def locate(self, place: str | None = None) -> None:
        for error in self.errors:
            error.locate(place)
        self.args = (self._message(),)

    def _message(self) -> str:
        shown = [f"\n- {error}" for error in self.errors[:MAX_SHOWN_ERRORS]]
        more = len(self.errors) - len(shown)
        shown += [f"\n- and {more} more"] if more else []
        return f"{len(self.errors)} inputs are wrong:{''.join(shown)}"


class UnknownModelError(InvalidRequestError):
    code = "model_not_found"


class NotFoundError(InvalidRequestError):
    """Something that does not exist or has another owner."""

    code = "not_found"


class PromptTooLongError(InvalidRequestError):
    """Exceeds the model's context or the KV cache."""

    code = "context_length_exceeded"

    @classmethod
    def of(cls, num_tokens: int, max_prompt_len: int, *, param: str, exact: bool = True) -> Self:
        """Clients recognize this message and shorten the conversation. exact: false for a lower bound."""
        count = num_tokens if exact else f"more than {num_tokens}"
        return cls(
            f"This model's maximum context length is {max_prompt_len + 1} tokens. However, your request has {count} "
            "input tokens, images included. Shorten it",
            param=param,
        )


class InvalidImageError(InvalidRequestError):
    code = "invalid_image"


class ImageTooLargeError(InvalidRequestError):
    code = "image_too_large"


class InvalidVideoError(InvalidRequestError):
    code = "invalid_video"


class VideoTooLargeError(InvalidRequestError):
    code = "video_too_large"


class InvalidDocumentError(InvalidRequestError):
    code = "invalid_document"


class DocumentTooLargeError(InvalidRequestError):
    code = "document_too_large"


class TooManyImagesError(InvalidRequestError):
    code = "too_many_images"


class ImageFetchError(InvalidRequestError):
    code = "image_fetch_failed"


class AdapterError(InvalidRequestError):
    code = "invalid_adapter"

    def __init__(self, message: str, *, param: str | None = "lora_path") -> None:
        super().__init__(message, param=param)


class AnswerError(VLMServeError):
    """An answer without the expected object. output: the `RequestOutput`."""

    def __init__(self, message: str, output: Any) -> None:
        super().__init__(message)
        self.output = output


class OverloadedError(VLMServeError):
    """The queue is full."""


class EngineDeadError(VLMServeError):
    """The engine process has died."""


class ForkError(VLMServeError):
    """A forked process used its parent's model."""


class UnavailableError(VLMServeError):
    """Loading, restarting or closing. retry_after: seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StorageError(UnavailableError):
    """The history is inaccessible for now."""


class StorageFullError(VLMServeError):
    """The storage limit is reached."""


class ModelLoadError(VLMServeError):
    pass


class CheckpointNotFoundError(ModelLoadError):
    """Neither local, downloadable nor cached."""


class MissingWeightsError(ModelLoadError):
    """A weight file or tensor is missing."""


class UnsupportedModelError(ModelLoadError):
    """An unsupported architecture, option or format."""


class CancelledWorkError(VLMServeError):
    """Stops unneeded work; no caller sees it."""


class ConfigurationError(VLMServeError):
    """Settings that contradict each other or the machine."""


class CapacityError(ConfigurationError):
    """Settings that exceed the model or memory."""

"""Every error that vlmserve raises on purpose.

A message says what was wrong and what to do about it. Only the server turns these into HTTP statuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

MAX_SHOWN_ERRORS = 20
"""How many of several errors their common message shows."""


class VLMServeError(Exception):
    """Base of all errors that vlmserve raises on purpose."""


class InvalidRequestError(VLMServeError):
    """A request that can never succeed as it was sent.

    `param` names the offending field in the API's own spelling (``messages``, ``temperature``…), if there is one;
    `code` is a stable, machine-readable word. `source` is the path or URL that the error is about, if there is one.
    """

    code = "invalid_request"
    source: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def locate(self, place: str | None = None) -> None:
        """Have the message begin with the place in a list, and with the image that it is about and its file or URL."""
        before = [] if place is None else [place]
        if self.source is not None:
            known = (self.param or "", self.source)
            before += [word for word in known if word and word not in str(self)]
        if before:
            self.args = (f"{', '.join(before)}: {self}",)


class InvalidRequestsError(InvalidRequestError):
    """Several requests, or parts of one, that are wrong. `errors` has what is wrong with each."""

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
    """The request names a model that is not served here."""

    code = "model_not_found"


class NotFoundError(InvalidRequestError):
    """The request names a response, conversation, item or file that is not there, or not the caller's."""

    code = "not_found"


class PromptTooLongError(InvalidRequestError):
    """The prompt does not fit into the model's context or into the KV cache."""

    code = "context_length_exceeded"

    @classmethod
    def of(cls, num_tokens: int, max_prompt_len: int, *, param: str, exact: bool = True) -> Self:
        """The error in the words that clients recognize, in order to shorten the conversation.

        num_tokens: tokens of the prompt; with `exact` false, the prompt has more.
        """
        count = num_tokens if exact else f"more than {num_tokens}"
        return cls(
            f"This model's maximum context length is {max_prompt_len + 1} tokens. However, your request has {count} "
            "input tokens, images included. Shorten it",
            param=param,
        )


class InvalidImageError(InvalidRequestError):
    """An image that cannot be read: broken, empty, truncated or not an image at all."""

    code = "invalid_image"


class ImageTooLargeError(InvalidRequestError):
    """An image over the limit of bytes or pixels."""

    code = "image_too_large"


class InvalidVideoError(InvalidRequestError):
    """A video that cannot be read, has no frames, or frames that do not fit together."""

    code = "invalid_video"


class VideoTooLargeError(InvalidRequestError):
    """A video over the limit of bytes, frames or pixels."""

    code = "video_too_large"


class InvalidDocumentError(InvalidRequestError):
    """A document that cannot be read or rendered, is encrypted, or lacks the pages that are asked for."""

    code = "invalid_document"


class DocumentTooLargeError(InvalidRequestError):
    """A document over the limit of bytes, pages, memory or time."""

    code = "document_too_large"


class TooManyImagesError(InvalidRequestError):
    """More images or videos in one request than the limits allow, or any for a model that takes none."""

    code = "too_many_images"


class ImageFetchError(InvalidRequestError):
    """An image's URL could not be fetched within the limits, or points where fetching is not allowed."""

    code = "image_fetch_failed"


class AdapterError(InvalidRequestError):
    """An adapter that cannot be read, does not fit the model, or asks for what is not supported."""

    code = "invalid_adapter"

    def __init__(self, message: str, *, param: str | None = "lora_path") -> None:
        super().__init__(message, param=param)


class AnswerError(VLMServeError):
    """An answer that is not the object that it was to be: it was cut off, or failed, or the model refuses it.

    output: the `RequestOutput`, with the answer as text.
    """

    def __init__(self, message: str, output: Any) -> None:
        super().__init__(message)
        self.output = output


class OverloadedError(VLMServeError):
    """The waiting queue is full; the same request may succeed later."""


class EngineDeadError(VLMServeError):
    """The engine process ended, so the request cannot be answered."""


class ForkError(VLMServeError):
    """A forked process used an `LLM` or `AsyncLLM` of its parent."""


class UnavailableError(VLMServeError):
    """The server is loading, restarting its engine or closing; the same request may succeed later or elsewhere.

    retry_after: seconds after which it may.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StorageError(UnavailableError):
    """The history cannot be read or written; the same request may succeed later."""


class StorageFullError(VLMServeError):
    """The storage limit is reached."""


class ModelLoadError(VLMServeError):
    """A checkpoint that cannot be loaded."""


class CheckpointNotFoundError(ModelLoadError):
    """Neither a local folder nor a repository that can be downloaded or found in the cache."""


class MissingWeightsError(ModelLoadError):
    """A checkpoint without weight files, or without a tensor that its architecture needs."""


class UnsupportedModelError(ModelLoadError):
    """An architecture, option or weight format that vlmserve does not implement."""


class CancelledWorkError(VLMServeError):
    """Work in a thread was stopped because nobody waits for its result. No caller sees it."""


class ConfigurationError(VLMServeError):
    """Settings that contradict each other or the machine."""


class CapacityError(ConfigurationError):
    """Settings that ask for more than the model or the memory has. The values themselves are allowed."""

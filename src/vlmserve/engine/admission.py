"""What every engine refuses before a request may wait for its turn."""

from __future__ import annotations

from collections.abc import Container

from vlmserve.errors import InvalidRequestError, PromptTooLongError, TooManyImagesError
from vlmserve.types import EngineRequest, ModelInfo


def check_request(request: EngineRequest, info: ModelInfo, unfinished: Container[str]) -> None:
    """Check that a request can run on the model of `info`. unfinished: the ids in use.

    Raises PromptTooLongError, TooManyImagesError, or InvalidRequestError for an id in use, an empty prompt or a token
    id outside of the vocabulary.
    """
    if request.request_id in unfinished:
        raise InvalidRequestError(f"The request id {request.request_id!r} is in use")
    prompt = request.prompt
    if not prompt.token_ids:
        raise InvalidRequestError("The prompt is empty", param="messages")
    if len(prompt.token_ids) > info.max_prompt_len:
        raise PromptTooLongError(
            f"The prompt has {len(prompt.token_ids)} tokens, but at most {info.max_prompt_len} fit "
            f"(the model's context is {info.max_model_len}); shorten it or send fewer or smaller pictures",
            param="messages",
        )
    if prompt.images and not info.sees_images:
        raise TooManyImagesError(f"The model {info.name} reads text only; send no pictures", param="messages")
    if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < info.vocab_size:
        raise InvalidRequestError(f"A token id is not between 0 and {info.vocab_size - 1}", param="messages")
    for token_id in request.params.stop_token_ids:
        if not 0 <= token_id < info.vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids has {token_id}, which is not between 0 and {info.vocab_size - 1}",
                param="stop_token_ids",
            )

"""Placeholders to the room that pictures take in a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from vlmserve.errors import InvalidRequestError
from vlmserve.types import ImageInput, ImageSpan, Prompt


def check_placeholders(token_ids: Sequence[int], image_token_id: int | None, num_images: int) -> None:
    """Raises InvalidRequestError unless `token_ids` has as many placeholders as there are pictures."""
    found = sum(token_id == image_token_id for token_id in token_ids)
    if found != num_images:
        raise InvalidRequestError(
            f"the prompt has {found} placeholder{'' if found == 1 else 's'} for pictures, "
            f"but {num_images} picture{'' if num_images == 1 else 's'} came with it"
        )


def expand_placeholders(token_ids: Sequence[int], image_token_id: int | None, images: Sequence[ImageInput]) -> Prompt:
    """A prompt in which the n-th placeholder of `token_ids` is repeated as often as the n-th picture has tokens, with
    the picture's text between them.

    Raises InvalidRequestError unless there are as many placeholders as pictures.
    """
    check_placeholders(token_ids, image_token_id, len(images))
    if not images:
        return Prompt(list(token_ids))
    expanded: list[int] = []
    spans: list[ImageSpan] = []
    for token_id in token_ids:
        if token_id == image_token_id:
            image = images[len(spans)]
            spans.append(ImageSpan(image, start=len(expanded)))
            tokens = [token_id] * image.num_tokens
            for place, text_id in image.text:
                tokens[place] = text_id
            expanded += tokens
        else:
            expanded.append(token_id)
    return Prompt(expanded, tuple(spans))

"""Expand placeholders to the tokens of images and videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from vlmserve.errors import InvalidRequestError
from vlmserve.types import ImageInput, ImageSpan, MediaKind, Prompt


def check_placeholders(
    token_ids: Sequence[int], image_token_id: int | None, num_images: int, kind: MediaKind = "image"
) -> None:
    """Raise InvalidRequestError unless the numbers of placeholders and media are equal."""
    found = 0 if image_token_id is None else token_ids.count(image_token_id)
    if found != num_images:
        raise InvalidRequestError(
            f"the prompt has {found} placeholder{'' if found == 1 else 's'} for {kind}s, "
            f"but {num_images} {kind}{'' if num_images == 1 else 's'} came with it"
        )


def expand_placeholders(
    token_ids: Sequence[int],
    image_token_id: int | None,
    images: Sequence[ImageInput],
    video_token_id: int | None = None,
    videos: Sequence[ImageInput] = (),
    *,
    frames_are_images: bool = False,
    label: Callable[[int], Sequence[int]] | None = None,
) -> Prompt:
    """Make a prompt: repeat each placeholder for the tokens of its image or video, and insert text between them.

    frames_are_images: videos repeat the placeholder of images. label: tokens before a labelled image, by its index
    among them. Raises InvalidRequestError if placeholders and media differ in number.
    """
    check_placeholders(token_ids, image_token_id, len(images))
    check_placeholders(token_ids, video_token_id, len(videos), "video")
    if not images and not videos:
        return Prompt(list(token_ids))
    waiting = {image_token_id: iter(images), video_token_id: iter(videos)}
    expanded: list[int] = []
    spans: list[ImageSpan] = []
    done = 0
    for place in [place for place, token_id in enumerate(token_ids) if token_id in waiting]:
        expanded += token_ids[done:place]
        token_id, done = token_ids[place], place + 1
        image = next(waiting[token_id])
        if label is not None and token_id == image_token_id and image.has_label:
            expanded += label(sum(span.image.has_label for span in spans))
        repeated = image_token_id if frames_are_images and image_token_id is not None else token_id
        tokens = [repeated] * image.num_tokens
        for offset, text_id in image.text:
            tokens[offset] = text_id
        while done < len(token_ids) and token_ids[done] == image.end_id:
            image = image.followed_by(token_ids[done])
            tokens.append(token_ids[done])
            done += 1
        spans.append(ImageSpan(image, start=len(expanded)))
        expanded += tokens
    expanded += token_ids[done:]
    return Prompt(expanded, tuple(spans))


def last_tokens(token_ids: list[int], wanted: int | None, most: int) -> list[int]:
    """wanted: how many tokens; None: all; -1: `most`."""
    return token_ids if wanted is None else token_ids[-(most if wanted == -1 else wanted) :]


def truncate(prompt: Prompt, wanted: int | None, most: int) -> Prompt:
    """Keep the last tokens. wanted: see `last_tokens`. Raises InvalidRequestError if it would cut an image."""
    if wanted is None:
        return prompt
    cut = len(prompt.token_ids) - len(last_tokens(prompt.token_ids, wanted, most))
    if cut == 0:
        return prompt
    if any(span.start < cut for span in prompt.images):
        raise InvalidRequestError(
            f"truncate_prompt_tokens {wanted} leaves out an image of the prompt; raise it, or send fewer images",
            param="truncate_prompt_tokens",
        )
    images = tuple(msgspec.structs.replace(span, start=span.start - cut) for span in prompt.images)
    return msgspec.structs.replace(prompt, token_ids=prompt.token_ids[cut:], images=images)

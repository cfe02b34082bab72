"""Prompts to calibrate with: from a file, a folder of images, or what comes along."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from vlmserve.errors import ConfigurationError, InvalidRequestError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.loadtest.dataset import Entry, read_entries
from vlmserve.perplexity import python_manual
from vlmserve.pixie.drawing import draw_scene
from vlmserve.pixie.evaluation import messages_of
from vlmserve.pixie.questions import sample_example
from vlmserve.types import Prompt

LONGEST = 512
"""Tokens of a piece of text."""
TEXT_SHARE = 0.25
"""Of the tokens for a model that takes images."""
QUESTION = "Describe this image."
IMAGE_FILES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"}


def calibration_prompts(source: str | None, preparer: RequestPreparer, num_tokens: int) -> list[Prompt]:
    """Prompts of about so many tokens altogether, fewer if the source has fewer.

    source: a JSONL file of prompts with images, see `read_entries`; a folder of images; None: conversations about drawn
    images, if the model takes images, and the end of the manual that every Python brings along, of which perplexity is
    measured on the beginning. Raises ConfigurationError for a source that cannot be read, and for a prompt that the
    model cannot take.
    """
    if source is None:
        if preparer.takes_one_image:
            return take(drawn_prompts(preparer, 0), num_tokens)
        for_images = int(num_tokens * (1 - TEXT_SHARE)) if preparer.supports_images and preparer.can_chat else 0
        drawn = take(drawn_prompts(preparer, 0), for_images)
        return drawn + take(_text(preparer, num_tokens), num_tokens - _count(drawn))
    path = Path(source).expanduser()
    prompts = _of_folder(path, preparer) if path.is_dir() else _of_file(path, preparer)
    return take(prompts, num_tokens)


def take(prompts: Iterable[Prompt], num_tokens: int) -> list[Prompt]:
    """The first prompts, until they have so many tokens together."""
    taken: list[Prompt] = []
    left = num_tokens
    if left > 0:
        for prompt in prompts:
            taken.append(prompt)
            left -= len(prompt.token_ids)
            if left <= 0:
                break
    return taken


def _count(prompts: Iterable[Prompt]) -> int:
    return sum(len(prompt.token_ids) for prompt in prompts)


def _of_file(path: Path, preparer: RequestPreparer) -> Iterator[Prompt]:
    for entry in read_entries(path, "--calibration"):
        try:
            yield preparer.chat(messages_of_entry(entry)) if preparer.can_chat else preparer.text(entry.prompt or "")
        except InvalidRequestError as error:
            raise ConfigurationError(f"--calibration {path}: line {entry.line}: {error}") from None


def _of_folder(path: Path, preparer: RequestPreparer) -> Iterator[Prompt]:
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_FILES)
    if not files:
        raise ConfigurationError(f"--calibration {path}: there are no images in the folder")
    if not preparer.supports_images:
        raise ConfigurationError(f"--calibration {path}: the model takes no images; give a file with prompts")
    for file in files:
        parts = [{"type": "image", "image": str(file)}, {"type": "text", "text": QUESTION}]
        try:
            yield preparer.chat([{"role": "user", "content": parts}], allow_local=True)
        except InvalidRequestError as error:
            raise ConfigurationError(f"--calibration {file}: {error}") from None


def messages_of_entry(entry: Entry) -> list[dict[str, Any]]:
    """The conversation that a line of a file is."""
    if entry.messages is not None:
        return entry.messages
    text = entry.prompt or ""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in entry.urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}] if images else text}]


def drawn_prompts(preparer: RequestPreparer, first_seed: int) -> Iterator[Prompt]:
    """Conversations about drawn images with the right answers, without end. For a model that takes one image and one
    text with each request: questions about one image, each with its answer."""
    for seed in count(first_seed):
        example = sample_example(seed)
        if not preparer.takes_one_image:
            last = len(example.turns) - 1
            answered = [*messages_of(example, last), {"role": "assistant", "content": example.turns[last][1]}]
            yield preparer.chat(answered, allow_local=True, add_generation_prompt=False)
        elif len(example.scenes) == 1:
            question, answer = example.turns[0]
            prompt = preparer.text(question, [draw_scene(example.scenes[0])], allow_local=True)
            said = preparer.encode(f" {answer}", add_special_tokens=False)
            yield msgspec.structs.replace(prompt, token_ids=[*prompt.token_ids, *said])


def _text(preparer: RequestPreparer, num_tokens: int) -> Iterator[Prompt]:
    """The last tokens of the manual."""
    ids = preparer.encode(python_manual())[-num_tokens:]
    for first in range(0, len(ids), LONGEST):
        yield preparer.tokens(ids[first : first + LONGEST])

"""Samples from a file, from a folder of images, or built in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from vlmserve.calibration.samples import Sample, of_conversation, of_text
from vlmserve.errors import ConfigurationError, InvalidRequestError
from vlmserve.folders import expanded
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.loadtest.dataset import Entry, read_entries
from vlmserve.pixie.evaluation import messages_of
from vlmserve.pixie.questions import Example, sample_example, single
from vlmserve.tools.perplexity import python_manual
from vlmserve.types import Prompt

LONGEST = 512
"""Tokens of a text sample."""
TEXT_SHARE = 0.25
"""Share of tokens from text, for a model that takes images."""
TEXT_WEIGHT = 0.1
"""Share of text in the total weight."""
QUESTIONS_OF_IMAGE = 8
"""Maximum, for images that add no tokens to a prompt."""
QUESTION = "Describe this image."
IMAGE_FILES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"}


def calibration_prompts(
    source: str | None, preparer: RequestPreparer, num_tokens: int, image_weight: float
) -> dict[Prompt, float]:
    """Return prompts, each with the weight of its tokens: about `num_tokens` tokens in total, or all of a smaller
    source.

    source: a JSONL file (`read_entries`), a folder of images, or None for built-in data. This is the end of Python's
    manual (perplexity uses its beginning). Models that take images also get conversations about drawn images. The
    manual gets `TEXT_WEIGHT` of the weight. It would dominate otherwise: `image_weight` scales image tokens down.

    Raises ConfigurationError for an unreadable source, and for a prompt that the model cannot take.
    """
    if source is not None:
        path = expanded(source)
        folder = path.is_dir()
        samples = _of_folder(path, preparer) if folder else file_samples(path, preparer, "--calibration")
        return _weighted(take(samples, num_tokens), 1.0)
    if preparer.takes_one_image:
        return _weighted(take(drawn_samples(preparer, 0), num_tokens), 1.0)
    for_images = int(num_tokens * (1 - TEXT_SHARE)) if preparer.media.supports_images and preparer.can_chat else 0
    drawn = _weighted(take(drawn_samples(preparer, 0), for_images), 1.0)
    left = num_tokens - sum(len(prompt.token_ids) for prompt in drawn)
    text = take(_text(preparer, num_tokens), left)
    counted = sum(len(prompt.token_ids) - (1 - image_weight) * prompt.num_image_tokens for prompt in drawn)
    if not text or not counted:
        return drawn | _weighted(text, 1.0)
    wanted = counted * TEXT_WEIGHT / (1 - TEXT_WEIGHT)
    return drawn | _weighted(text, wanted / sum(len(sample.prompt.token_ids) for sample in text))


def _weighted(samples: Iterable[Sample], weight: float) -> dict[Prompt, float]:
    return {sample.prompt: weight for sample in samples}


def take(samples: Iterable[Sample], num_tokens: int) -> list[Sample]:
    """At least `num_tokens` tokens, including encoded questions."""
    taken: list[Sample] = []
    left = num_tokens
    if left > 0:
        for sample in samples:
            taken.append(sample)
            prompt = sample.prompt
            left -= len(prompt.token_ids) + (0 if prompt.cross is None else len(prompt.cross.token_ids))
            if left <= 0:
                break
    return taken


def file_samples(path: Path, preparer: RequestPreparer, flag: str) -> Iterator[Sample]:
    """flag: the flag that named the file (`read_entries`). Raises ConfigurationError for an unreadable file, and for a
    line that the model cannot take."""
    for entry in read_entries(path, flag):
        try:
            if preparer.can_chat:
                messages = messages_of_entry(entry)
                if entry.answer is not None and messages and messages[-1].get("role") != "assistant":
                    messages = [*messages, {"role": "assistant", "content": entry.answer}]
                yield of_conversation(preparer, messages)
            else:
                yield of_text(preparer.text(entry.prompt or ""))
        except InvalidRequestError as error:
            raise ConfigurationError(f"{flag} {path}: line {entry.line}: {error}") from None


def _of_folder(path: Path, preparer: RequestPreparer) -> Iterator[Sample]:
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_FILES)
    if not files:
        raise ConfigurationError(f"--calibration {path}: there are no images in the folder")
    if not preparer.media.supports_images:
        raise ConfigurationError(f"--calibration {path}: the model takes no images; give a file with prompts")
    for file in files:
        parts = [{"type": "image", "image": str(file)}, {"type": "text", "text": QUESTION}]
        try:
            yield of_conversation(preparer, [{"role": "user", "content": parts}], allow_local=True)
        except InvalidRequestError as error:
            raise ConfigurationError(f"--calibration {file}: {error}") from None


def messages_of_entry(entry: Entry) -> list[dict[str, Any]]:
    if entry.messages is not None:
        return entry.messages
    text = entry.prompt or ""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in entry.urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}] if images else text}]


def drawn_samples(preparer: RequestPreparer, first_seed: int) -> Iterator[Sample]:
    """Yield conversations about drawn images, without end.

    A model with one image and one text per request gets questions. `QUESTIONS_OF_IMAGE` questions share an image that
    cross-attention reads: encoding would dominate.
    """
    for seed in count(first_seed):
        example = sample_example(seed)
        if not preparer.takes_one_image:
            yield _drawn(preparer, example, len(example.turns) - 1)
        elif len(example.scenes) == 1:
            random = Random(seed)
            others = (single(example.scenes[0], random) for _ in range(1, QUESTIONS_OF_IMAGE))
            for one in {other.turns[0]: other for other in (example, *others)}.values():
                sample = _drawn(preparer, one, 0)
                yield sample
                if sample.prompt.cross is None:
                    break


def _drawn(preparer: RequestPreparer, example: Example, last: int) -> Sample:
    asked = messages_of(example, last)
    if preparer.takes_one_image:  # and takes no system message
        asked = [message for message in asked if message["role"] == "user"]
    answer = {"role": "assistant", "content": example.turns[last][1]}
    return of_conversation(preparer, [*asked, answer], allow_local=True)


def _text(preparer: RequestPreparer, num_tokens: int) -> Iterator[Sample]:
    ids = preparer.encode(python_manual())[-num_tokens:]
    for first in range(0, len(ids), LONGEST):
        yield of_text(preparer.tokens(ids[first : first + LONGEST]))

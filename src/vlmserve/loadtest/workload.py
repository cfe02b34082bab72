"""Reproducible conversations, made before the test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from vlmserve.errors import ConfigurationError
from vlmserve.loadtest.dataset import read_dataset
from vlmserve.loadtest.images import data_url, parse_image_size, random_image
from vlmserve.loadtest.settings import WorkloadConfig
from vlmserve.loadtest.text import Vocabulary

DEFAULT_PROMPTS = 100
_LENGTHS, _TEXTS, _IMAGES, _PREFIXES = range(2, 6)
"""Independent random streams; arrivals use stream 1."""

Fragments = tuple[bytes, ...]
"""JSON in parts. Repeated images share one object in memory."""


class Turn(msgspec.Struct, frozen=True):
    """A question: comma-separated JSON messages, or a completion's prompt."""

    content: Fragments
    max_tokens: int


class Session(msgspec.Struct, frozen=True):
    """A conversation, usually of one turn."""

    turns: list[Turn]
    num_images: int = 0


def make_workload(
    config: WorkloadConfig,
    vocabulary: Vocabulary,
    *,
    is_chat: bool,
    count: int | None = None,
    salt: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Session]:
    """Make conversations in the order of sending.

    count: overrides the settings. salt: makes another set, without common texts or images. Raises ConfigurationError
    for images or turns in completions, and for broken datasets.
    """
    if not is_chat and (config.images or config.turns > 1):
        raise ConfigurationError("completions have neither images nor turns; use --endpoint /v1/chat/completions")
    if config.dataset_path is not None:
        return _from_dataset(config, is_chat=is_chat, count=count)
    count = count or config.num_prompts or DEFAULT_PROMPTS
    maker = _Maker(config, vocabulary, salt, is_chat=is_chat)
    sessions = []
    for number in range(count):
        sessions.append(maker.session(number))
        progress(number + 1, count)
    return sessions


def digest(sessions: Iterable[Session]) -> str:
    hasher = blake3()
    for turn in (turn for session in sessions for turn in session.turns):
        for part in (*turn.content, b"%d" % turn.max_tokens):
            hasher.update(part)
    return hasher.hexdigest(16)


def user_message(text: str, images: Iterable[bytes] = ()) -> Fragments:
    """A question as JSON. images: JSON parts."""
    parts = [part for image in images for part in (image, b",")]
    if not parts:
        return (msgspec.json.encode({"role": "user", "content": text}),)
    return (b'{"role":"user","content":[', *parts, msgspec.json.encode({"type": "text", "text": text}), b"]}")


def image_part(url: str) -> bytes:
    return msgspec.json.encode({"type": "image_url", "image_url": {"url": url}})


class _Maker:
    def __init__(self, config: WorkloadConfig, vocabulary: Vocabulary, salt: int, *, is_chat: bool) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._is_chat = is_chat
        self._sizes = [parse_image_size(text) for text in config.image_size]
        streams = [np.random.default_rng((config.seed, stream, salt)) for stream in range(_LENGTHS, _PREFIXES + 1)]
        self._lengths, self._texts, self._images, prefixes = streams
        self._prefixes = [
            vocabulary.text(prefixes, config.random_prefix_len)[0] + " " if config.random_prefix_len else ""
            for _ in range(config.num_prefixes)
        ]
        self._shown: list[bytes] = []

    def session(self, number: int) -> Session:
        config = self._config
        images = [self._image() for _ in range(config.images)]
        turns = []
        for place in range(config.turns):
            text, _ = self._vocabulary.text(self._texts, self._length(config.random_input_len))
            if place == 0:
                text = self._prefixes[number % len(self._prefixes)] + text
            content = user_message(text, [] if place else images) if self._is_chat else (msgspec.json.encode(text),)
            turns.append(Turn(content, self._length(config.random_output_len)))
        return Session(turns, len(images))

    def _length(self, mean: int) -> int:
        spread = self._config.random_range_ratio
        low, high = int(np.floor(mean * (1 - spread))), int(np.ceil(mean * (1 + spread)))
        return max(1, int(self._lengths.integers(low, high, endpoint=True)))

    def _image(self) -> bytes:
        if self._shown and self._images.random() < self._config.image_reuse:
            return self._shown[int(self._images.integers(len(self._shown)))]
        size = self._sizes[int(self._images.integers(len(self._sizes)))]
        kind = self._config.image_format
        self._shown.append(image_part(data_url(random_image(self._images, size, kind), kind)))
        return self._shown[-1]


def _from_dataset(config: WorkloadConfig, *, is_chat: bool, count: int | None) -> list[Session]:
    """A file's lines in order, repeated up to `count`."""
    entries = read_dataset(config)
    sessions = [_dataset_session(entry, config, is_chat=is_chat) for entry in entries]
    wanted = count or config.num_prompts or len(sessions)
    return [sessions[place % len(sessions)] for place in range(wanted)]


def _dataset_session(entry: Any, config: WorkloadConfig, *, is_chat: bool) -> Session:
    images = [image_part(url) for url in entry.urls]
    if not is_chat:
        if entry.prompt is None or images:
            raise ConfigurationError(f"--dataset-path: line {entry.line} is not a completion; it needs only a prompt")
        content: Fragments = (msgspec.json.encode(entry.prompt),)
    elif entry.messages is not None:
        content = (msgspec.json.encode(entry.messages)[1:-1],)
    else:
        content = user_message(entry.prompt or "", images)
    return Session([Turn(content, entry.max_tokens or config.random_output_len)], len(images))

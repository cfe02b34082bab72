"""Checks a checkpoint's tokenizer before the tokenizers library reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from vlmserve.errors import ModelLoadError
from vlmserve.prompt.patterns import PatternError, check_pattern

MAX_FILE_BYTES = 256 * 2**20
"""Maximum bytes of a file. Published files have up to 50 MiB."""
MAX_ADDED_TOKENS = 2**17
"""Each added token adds about 65 microseconds to the start."""
MAX_PATTERNS = 64
"""Maximum regular expressions of a tokenizer."""
MAX_GROWTH = 1000
"""Maximum growth of a text's length by replacements."""
MAX_WORD = 1000
"""Maximum characters of a WordPiece word. Splitting a word takes cubic time."""

_FILES = ("*token*", "vocab*", "merges*", "spiece*", "*.tiktoken", "*.model")
_SHOWN = 32
"""Characters of a pattern in an error."""


class _Model(msgspec.Struct):
    max_input_chars_per_word: Any = None


class _File(msgspec.Struct):
    """``tokenizer.json`` without its vocabulary."""

    added_tokens: list[msgspec.Raw] = []
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    model: _Model | None = None


def check_sizes(folder: Path) -> None:
    """Raise ModelLoadError for a too large tokenizer file."""
    for pattern in _FILES:
        for path in folder.glob(pattern):
            if path.suffix != ".safetensors" and path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
                size, most = path.stat().st_size // 2**20, MAX_FILE_BYTES // 2**20
                raise ModelLoadError(f"{path.name} has {size:,} MiB; a tokenizer's file has at most {most:,} MiB")


def check_count(count: int, name: str) -> None:
    """Raise ModelLoadError if the file adds too many tokens."""
    if count > MAX_ADDED_TOKENS:
        raise ModelLoadError(f"{name} adds {count:,} tokens; at most {MAX_ADDED_TOKENS:,} are supported")


def check_tokenizer(data: bytes) -> None:
    """Raise ModelLoadError if ``tokenizer.json`` exceeds a limit or is not a JSON object."""
    name = "tokenizer.json"
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{name} cannot be read: {error}") from error
    check_count(len(file.added_tokens), name)
    word = file.model and file.model.max_input_chars_per_word
    if isinstance(word, int) and word > MAX_WORD:
        raise ModelLoadError(f"{name}: max_input_chars_per_word is {word:,}; at most {MAX_WORD:,} is supported")
    patterns = 0
    for steps in (file.normalizer, file.pre_tokenizer, file.decoder):
        growth = 1.0
        for step in _objects(steps):
            growth *= _growth(step, name)
            if isinstance(pattern := step.get("Regex"), str):
                patterns += 1
                _check_pattern(pattern, name)
        if growth > MAX_GROWTH:
            raise ModelLoadError(f"{name}: its replacements make a text more than {MAX_GROWTH:,} times longer")
    if patterns > MAX_PATTERNS:
        raise ModelLoadError(f"{name} has {patterns:,} patterns; at most {MAX_PATTERNS} are supported")


def _objects(node: Any) -> Iterator[dict[str, Any]]:
    nodes = [node]
    while nodes:
        one = nodes.pop()
        if isinstance(one, dict):
            yield one
            nodes += one.values()
        elif isinstance(one, list):
            nodes += one


def _growth(step: dict[str, Any], name: str) -> float:
    """Maximum growth of a text's length by a replacement."""
    content, pattern = step.get("content"), step.get("pattern")
    if step.get("type") != "Replace" or not isinstance(content, str) or not isinstance(pattern, dict):
        return 1.0
    replaced, regex = pattern.get("String"), pattern.get("Regex")
    if isinstance(replaced, str) and replaced:
        return max(1.0, len(content) / len(replaced))
    if isinstance(regex, str) and _check_pattern(regex, name):
        return max(1.0, len(content))
    return 1.0 + len(content)  # between any two characters


def _check_pattern(pattern: str, name: str) -> bool:
    try:
        return check_pattern(pattern)
    except PatternError as error:
        shown = pattern if len(pattern) <= _SHOWN else pattern[:_SHOWN] + "…"
        raise ModelLoadError(f"{name}: the pattern {shown!r} {error}; replace the file") from None

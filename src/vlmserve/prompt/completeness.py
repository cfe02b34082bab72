"""Checks that a tokenizer is complete. Without some parts it would load, but the model would answer nonsense."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

from vlmserve.errors import ModelLoadError
from vlmserve.prompt.files import PromptFiles

_NUM_SAMPLES = 400
"""Maximum tokens of the vocabulary to check."""
_FEWEST_SAMPLES = 20
"""Minimum long tokens to check; smaller vocabularies, for example in tests, prove nothing."""
_WHOLE_SHARE = 0.5
"""Minimum share of sampled long tokens that a complete BPE model produces. Most models produce nearly all."""
_SPACES = {"Ġ": "ByteLevel", "▁": "▁"}
"""Space characters of vocabularies, and what steps before and after the model name for each."""
_SPACED_SHARE = 0.05
"""Minimum share of tokens with a space character in a vocabulary that uses it."""


def check_complete(backend: tokenizers.Tokenizer, files: PromptFiles, place: str) -> None:
    """Raise ModelLoadError for a tokenizer that lacks a part. place: of its files."""
    _check_ends(backend, files, place)
    samples = _samples(backend)
    _check_merges(backend.model, samples, place)
    _check_spaces(backend, samples, place)


def check_added(backend: tokenizers.Tokenizer, declared: Iterable[tuple[int, str]]) -> None:
    """Raise ModelLoadError if a token that was just added has another id than tokenizer_config.json declares."""
    ids = {content: id_ for id_, content in declared}
    for content, id_ in ids.items():
        found, other = backend.token_to_id(content), backend.id_to_token(id_)
        if found == id_:
            continue
        if other is not None and other not in ids:
            raise ModelLoadError(
                f"token {id_} is {other!r:.30} in tokenizer.json and {content!r:.30} in tokenizer_config.json; "
                "write one of them into both"
            )
        raise ModelLoadError(
            f"tokenizer.json lacks tokens: {content!r:.40} should be token {id_}, but would be {found}"
        )


def _check_ends(backend: tokenizers.Tokenizer, files: PromptFiles, place: str) -> None:
    declared = {int(id_) for id_ in files.tokenizer_config.get("added_tokens_decoder") or {}}
    ids = files.end_token_ids
    if ids and not any(id_ in declared or backend.id_to_token(id_) is not None for id_ in ids):
        missing = ", ".join(map(str, sorted(ids)))
        raise ModelLoadError(
            f"{place}: the tokenizer lacks the end token ({missing}); copy all files of the checkpoint"
        )


def _samples(backend: tokenizers.Tokenizer) -> list[str]:
    """Tokens from the whole vocabulary, without added ones."""
    size = backend.get_vocab_size(with_added_tokens=False)
    added = backend.get_added_tokens_decoder().keys()
    ids = (id_ for id_ in range(0, size, max(1, size // _NUM_SAMPLES)) if id_ not in added)
    return [token for id_ in ids if (token := backend.id_to_token(id_)) is not None]


def _check_merges(model: Any, samples: Sequence[str], place: str) -> None:
    if not isinstance(model, tokenizers.models.BPE) or model.end_of_word_suffix or model.continuing_subword_prefix:
        return  # the vocabulary marks pieces of words with affixes
    long = [token for token in samples if len(token) > 1 and not token.startswith("<")]
    if len(long) < _FEWEST_SAMPLES:
        return
    if sum(len(model.tokenize(token)) == 1 for token in long) < _WHOLE_SHARE * len(long):
        raise ModelLoadError(f"{place}: the tokenizer lacks merges, so it cannot write most tokens of its vocabulary")


def _check_spaces(backend: tokenizers.Tokenizer, samples: Sequence[str], place: str) -> None:
    steps = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
    described = [
        None if step is None else json.dumps(json.loads(step.__getstate__()), ensure_ascii=False) for step in steps
    ]
    before, after = [one or "" for one in described[:2]], described[2] or ""
    for space, name in _SPACES.items():
        spaced = sum(space in token for token in samples)
        if spaced < _FEWEST_SAMPLES or spaced < _SPACED_SHARE * len(samples):
            continue
        for part, texts in (("normalizer or pre_tokenizer", before), ("decoder", [after])):
            if not any(name in text or space in text or "Metaspace" in text for text in texts):
                raise ModelLoadError(f"{place}: the tokenizer lacks the {part} that writes a space as {space!r}")

"""Byte-level BPE by ranks, written out slowly: of all neighbours those merge first that make the token of lowest rank.

Source: https://github.com/openai/tiktoken (``_educational.py`` describes the same).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import regex


def train(texts: Iterable[str], pattern: str, count: int) -> dict[bytes, int]:
    """All bytes, then tokens of the most frequent neighbours, so many of them."""
    words = [[bytes([byte]) for byte in word.encode()] for text in texts for word in regex.findall(pattern, text)]
    ranks = {bytes([byte]): byte for byte in range(256)}
    for _ in range(count):
        pairs: dict[bytes, int] = {}
        for word in words:
            for left, right in itertools.pairwise(word):
                pairs[left + right] = pairs.get(left + right, 0) + 1
        best = max(sorted(pair for pair in pairs if pair not in ranks), key=lambda pair: pairs[pair])
        ranks[best] = len(ranks)
        words = [merged(word, ranks) for word in words]
    return ranks


def merged(pieces: list[bytes], ranks: Mapping[bytes, int]) -> list[bytes]:
    """Until no two neighbours make a token."""
    while True:
        joined = [left + right for left, right in itertools.pairwise(pieces)]
        candidates = [(ranks[token], i) for i, token in enumerate(joined) if token in ranks]
        if not candidates:
            return pieces
        _, i = min(candidates)
        pieces = [*pieces[:i], pieces[i] + pieces[i + 1], *pieces[i + 2 :]]


def encode(text: str, pattern: str, ranks: Mapping[bytes, int]) -> list[int]:
    ids = []
    for word in regex.findall(pattern, text):
        data = word.encode()
        pieces = [data] if data in ranks else merged([bytes([byte]) for byte in data], ranks)
        ids += [ranks[piece] for piece in pieces]
    return ids

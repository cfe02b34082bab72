"""The small Llama's recipe: what it reads, and that it learns."""

from __future__ import annotations

import torch

from training.small_llama import MANUAL, MANUAL_TIMES, make_model, read_texts, sequences, train, train_tokenizer
from vlmserve.perplexity import python_manual


def test_the_ends_of_the_manual_are_not_learned() -> None:
    manual, texts = python_manual(), read_texts()
    learned = texts[-MANUAL_TIMES]
    assert len(learned) == int(MANUAL[1] * len(manual)) - int(MANUAL[0] * len(manual))
    # The module that holds the manual is a source, too.
    assert not any(manual[:2000] in text or manual[-2000:] in text for text in texts)


def test_it_learns_what_it_reads() -> None:
    texts = ["one two three four five six seven eight nine ten. " * 40]
    tokenizer = train_tokenizer(texts, 300)
    pieces = sequences(tokenizer, texts, 16)
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]
    model = make_model(300, hidden_size=128, layers=1)
    with torch.no_grad():
        before = model(pieces, labels=pieces).loss.item()
    assert train(model, pieces, steps=6, batch=4, rate=3e-3) < before

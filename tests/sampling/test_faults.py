"""Errors of broken regular expressions: one sentence that names the field."""

from __future__ import annotations

import json
import re
import tracemalloc

import pytest

from tests.prompt.tokenizers_for_tests import byte_level, write_checkpoint
from vlmserve.errors import InvalidRequestError
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.sampling.faults import fault_of, path_of
from vlmserve.sampling.grammar import GrammarCompiler
from vlmserve.types import Grammar


def name(**fields: object) -> Grammar:
    """A strict schema with one string."""
    schema = {"type": "object", "properties": {"name": {"type": "string", **fields}}, "required": ["name"]}
    return Grammar.json(schema)


LOOK_AROUND = "look-around is not supported; write it without (?=, (?!, (?<= and (?<!"
FAULTS = [
    (name(pattern="^(?!foo).*$"), f"properties.name.pattern '^(?!foo).*$': {LOOK_AROUND}"),
    (name(pattern="(?<=a)b"), f"properties.name.pattern '(?<=a)b': {LOOK_AROUND}"),
    (Grammar.json({"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(?=a)"}]}), "anyOf.1.pattern '(?=a)'"),
    (Grammar.json({"type": "object", "patternProperties": {"(?!a).": {}}}), "patternProperties '(?!a).'"),
    (name(pattern="^(a)\\1$"), r"backreferences are not supported; repeat the group in place of \1"),
    (name(pattern="("), "properties.name.pattern '(': unclosed group; correct the expression"),
    (Grammar.regex("^(?!foo).*$"), f"grammar: '^(?!foo).*$': {LOOK_AROUND}"),
    (Grammar.regex("[" * 99), f"grammar: '{'[' * 40}…': unclosed character class; correct the expression"),
]


COMPLEX = [
    *(
        Grammar.json({"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(count)}})
        for count in (1000, 5000)
    ),
    Grammar.regex("((a{1000}){1000}){1000}"),
]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    tokenizer = Tokenizer.from_folder(write_checkpoint(tmp_path_factory.mktemp("faults"), byte_level()))
    return GrammarCompiler(lambda: tokenizer, max_bytes=1_000_000, cache_size=1)


@pytest.mark.parametrize(("grammar", "message"), FAULTS, ids=lambda value: getattr(value, "text", value)[:20])
def test_broken_pattern_is_named_in_one_line(grammars: GrammarCompiler, grammar: Grammar, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)) as refusal:
        grammars.matcher(grammar)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) <= 200


@pytest.mark.parametrize("grammar", COMPLEX, ids=["properties", "more properties", "repetitions"])
def test_limits_are_named_in_words_of_clients(grammars: GrammarCompiler, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequestError, match="grammar: it is too complex to compile; use fewer optional"):
        grammars.matcher(grammar)


def test_unfit_tokens_are_told_without_internals(grammars: GrammarCompiler) -> None:
    matcher = grammars.matcher(Grammar.regex("ab"))
    matcher.advance(grammars.tokenizer().encode("z")[0])
    assert matcher.error is not None
    assert "doesn't satisfy the grammar" in matcher.error
    assert "\n" not in matcher.error


def test_limits_of_precomputation_are_named_likewise() -> None:
    """Whether llguidance precomputes depends on the tokenizer."""
    message = "lexer precomputation failed; either increase limits.initial_lexer_fuel"
    assert fault_of(Grammar.regex("a"), message).startswith("it is too complex to compile")


def test_pattern_is_found_beside_long_names() -> None:
    """The paths of all parts together have 600 MB."""
    wide = {"x" * 60_000: dict.fromkeys(map(str, range(10_000)), 1)}
    text = json.dumps({"properties": {"name": {"pattern": "("}}, **wide})
    tracemalloc.start()
    try:
        assert path_of(text, "(") == "properties.name.pattern"
        assert tracemalloc.get_traced_memory()[1] < 20 * 1024**2
    finally:
        tracemalloc.stop()

"""Grammars over every kind of tokenizer: whatever is chosen among the tokens that are allowed fits."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.checkpoints import make_llama
from tests.gguf_files import write_gguf
from tests.prompt.tokenizers_for_tests import byte_level, sentencepiece, word_level, write_checkpoint
from vlmserve.errors import InvalidRequestError
from vlmserve.models.hub import resolve_model
from vlmserve.prompt.detokenize import Detokenizer
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.sampling.grammar import GrammarCompiler
from vlmserve.types import Grammar

END = frozenset({2})
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "boolean"}}, "required": ["y"]},
    {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 2, "maxItems": 4},
    {"type": "string", "minLength": 3, "maxLength": 8},
    {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]+$"},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"anyOf": [{"type": "null"}, {"const": {"k": [1, 2]}}]},
    {"type": "string", "format": "date"},
    {
        "$defs": {"node": {
            "type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["next"], "additionalProperties": False,
        }},
        "$ref": "#/$defs/node",
    },
]  # fmt: skip


@pytest.fixture(
    scope="module", params=["byte level", "sentencepiece", "sentencepiece, legacy", "sentencepiece, never", "gguf"]
)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    if request.param == "gguf":
        return Tokenizer.from_folder(write_gguf(make_llama(folder / "llama"), folder / "model.gguf"))
    kinds = {
        "byte level": byte_level,
        "sentencepiece": sentencepiece,
        "sentencepiece, legacy": lambda: sentencepiece(legacy=True),
        "sentencepiece, never": lambda: sentencepiece("never"),
    }
    return Tokenizer.from_folder(write_checkpoint(folder / "model", kinds[request.param]()))


def compiler(tokenizer: Tokenizer, **options: Any) -> GrammarCompiler:
    # Models have more rows than their tokenizers have tokens.
    options = {"max_bytes": 10_000, "cache_size": 4, "vocab_size": tokenizer.vocab_size + 7, **options}
    return GrammarCompiler(lambda: tokenizer, **options)


@pytest.fixture(scope="module")
def grammars(tokenizer) -> GrammarCompiler:
    return compiler(tokenizer)


def walk(grammars: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, seed: int, limit: int = 400) -> str | None:
    """A random text of the grammar; None if it has not ended after so many tokens."""
    matcher, chance = grammars.matcher(grammar), random.Random(seed)
    detokenizer = Detokenizer(tokenizer)
    text = ""
    for _ in range(limit):
        allowed = matcher.allowed(END, may_end=True)
        possible = np.flatnonzero(allowed).tolist()
        assert len(allowed) == tokenizer.vocab_size + 7
        assert max(possible) < tokenizer.vocab_size
        if 2 in possible and (len(possible) == 1 or chance.random() < 0.3):
            return text + detokenizer.finish()
        token = chance.choice([id_ for id_ in possible if id_ != 2])
        assert token not in tokenizer.special_ids
        text += detokenizer.push([token])
        matcher.advance(token)
        assert matcher.error is None
        if matcher.finished:
            return text + detokenizer.finish()
    return None


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(next(iter(schema))))
def test_json_fits_its_schema(grammars, tokenizer, schema):
    texts = [walk(grammars, tokenizer, Grammar.json(schema), seed) for seed in range(8)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 4
    for text in ended:
        jsonschema.validate(json.loads(text), schema)


def test_any_object_is_json(grammars, tokenizer):
    ended = [text for seed in range(12) if (text := walk(grammars, tokenizer, Grammar.json_object(), seed)) is not None]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)


@pytest.mark.parametrize(
    "pattern", [r"[a-z]{2,5}\d", r" ?x( y)*", r"  two", r"(a|bc)*é?", r"\w+@\w+\.(com|org)", "日本|😀"]
)
def test_texts_fit_the_whole_of_a_regular_expression(grammars, tokenizer, pattern):
    ended = [t for seed in range(10) if (t := walk(grammars, tokenizer, Grammar.regex(pattern), seed)) is not None]
    assert ended
    assert all(re.fullmatch(pattern, text) for text in ended)


def test_every_choice_comes_and_nothing_else(grammars, tokenizer):
    choices = ["yes", " no", 'a "quoted" \\ one', "two\nlines/", "naïve 😀"]
    assert {walk(grammars, tokenizer, Grammar.choice(choices), seed) for seed in range(60)} == set(choices)


def test_grammars_in_lark_and_in_gbnf(grammars, tokenizer):
    lark = Grammar.lark('start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/')
    gbnf = Grammar.lark('root ::= "(" root ")" | [0-9] [0-9]?')
    for grammar in (lark, gbnf):
        ended = [t for seed in range(10) if (t := walk(grammars, tokenizer, grammar, seed)) is not None]
        assert ended
        assert all(re.fullmatch(r"(\(*)\d{1,3}(\)*)", t) and t.count("(") == t.count(")") for t in ended)


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=8)
leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.builds(lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
              st.integers(-999, 999), st.integers(0, 50)),
    st.builds(lambda values: {"enum": values},
              st.lists(names | st.integers(-9, 9), min_size=1, max_size=4, unique=True)),
    st.just({"type": "string", "maxLength": 5}),
)  # fmt: skip
schemas = st.recursive(
    leaves,
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2}, inner)
        | st.builds(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
            st.dictionaries(names, inner, max_size=3),
        )
    ),
    max_leaves=5,
)


SPECIAL = {"type": "object", "properties": {"<image>": {}}, "required": ["<image>"], "additionalProperties": False}
"""A name that looks like a special token."""


@given(schema=schemas, seed=st.integers(0, 99))
@example(schema=SPECIAL, seed=0)
@settings(deadline=None, max_examples=60)
def test_made_up_schemas(byte_tokenizer, byte_grammars, schema, seed):
    text = walk(byte_grammars, byte_tokenizer, Grammar.json(schema), seed)
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_folder(write_checkpoint(tmp_path_factory.mktemp("bytes"), byte_level()))


@pytest.fixture(scope="module")
def byte_grammars(byte_tokenizer) -> GrammarCompiler:
    return compiler(byte_tokenizer)


BROKEN = [
    (Grammar.json({"type": "foo"}), "foo"),
    (Grammar.json("{"), "not JSON"),
    (Grammar.json("[1]"), "object or a boolean"),
    (Grammar.json("false"), "no value fits"),
    (Grammar.json({"$ref": "#/$defs/missing"}), "missing"),
    (Grammar.json({"$ref": "https://example.com/schema.json"}), "example.com"),
    (Grammar.json({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (Grammar.json('{"items":' * 900 + "{}" + "}" * 900), "nested too deeply"),
    (Grammar.regex("("), "unclosed group"),
    (Grammar.regex("(?=a)b"), "look-around"),
    (Grammar.regex("(" * 2000 + ")" * 2000), "nested parentheses"),
    (Grammar.regex("a" * 10_001), "10,000 bytes"),
    (Grammar.choice([]), "at least one"),
    (Grammar("choice", "no list"), "Expecting value"),
    (Grammar.lark("start: missing"), "missing"),
    (Grammar.lark("root ::= " + "(" * 4000), "nested too deeply"),
]


@pytest.mark.parametrize(("grammar", "message"), BROKEN, ids=lambda value: getattr(value, "text", value)[:20])
def test_broken_grammar_is_rejected_with_its_fault(byte_grammars, grammar, message):
    with pytest.raises(InvalidRequestError, match=re.escape(message)) as refusal:
        byte_grammars.matcher(grammar)
    assert refusal.value.param == "grammar"
    assert len(str(refusal.value)) < 1000


def test_excessive_schema_requests_may_be_ignored(byte_grammars, byte_tokenizer):
    schema = {"type": "array", "uniqueItems": True, "items": {"oneOf": [{"type": "integer"}, {"const": 1}]}}
    text = walk(byte_grammars, byte_tokenizer, Grammar.json(schema, strict=False), 0)
    assert all(isinstance(item, int) for item in json.loads(text))


def fits(grammars: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], text: str) -> bool:
    """Whether a text, without spaces, is an answer that a schema wants."""
    matcher = grammars.matcher(Grammar.json(schema))
    for character in text:
        token = tokenizer.token_id(character)
        if not matcher.allowed(END, may_end=True)[token]:
            return False
        matcher.advance(token)
    return matcher.complete


A, B = ({"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in "ab")


@pytest.mark.parametrize(
    ("schema", "fitting", "unfitting"),
    [
        (A, '{"a":1}', '{"a":1,"b":2}'),
        ({"type": "object", "properties": {}}, "{}", '{"a":1}'),
        ({"type": "array", "items": A}, '[{"a":1}]', '[{"a":1,"b":2}]'),
        ({"anyOf": [A, B]}, '{"b":2}', '{"a":1,"b":2}'),
        ({"$defs": {"a": A}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}}, '{"x":{"a":1}}',
         '{"x":{"a":1,"b":2}}'),
        ({"type": "object", "properties": {"if": A}}, '{"if":{"a":1}}', '{"if":{"a":1,"b":2}}'),
        ({"allOf": [A]}, '{"a":1}', '{"a":1,"b":2}'),
        ({**A, "additionalProperties": {"type": "integer"}}, '{"a":1,"b":2}', '{"a":1,"b":true}'),
        ({"type": "object"}, '{"a":1,"b":[]}', "[]"),
        ({"allOf": [A, B]}, '{"a":1,"b":2}', '{"a":1}'),
        ({**A, "anyOf": [B, {"required": ["c"]}]}, '{"a":1,"b":2}', '{"b":2}'),
    ],
    ids=str,
)  # fmt: skip
def test_objects_have_the_properties_that_their_schema_names(byte_grammars, byte_tokenizer, schema, fitting, unfitting):
    assert fits(byte_grammars, byte_tokenizer, schema, fitting)
    assert not fits(byte_grammars, byte_tokenizer, schema, unfitting)


def test_growing_grammar_fails_late_with_a_message(byte_grammars, byte_tokenizer):
    matcher = byte_grammars.matcher(Grammar.regex(r"[xy](((a{100}){100}){100}){100}"))
    for character in "xaaaa":
        if not matcher.allowed(END, may_end=True).any():
            break
        matcher.advance(byte_tokenizer.token_id(character))
    assert "too many" in matcher.error
    assert not matcher.finished


def test_context_dependent_tokenizer_is_rejected(tmp_path):
    tokenizer = Tokenizer.from_folder(write_checkpoint(tmp_path, word_level()))
    with pytest.raises(InvalidRequestError, match="does not support structured output"):
        compiler(tokenizer).matcher(Grammar.json_object())


def recorded(grammars):
    """Return a list of the grammars that compile from here on."""
    compiled, compile_one = [], grammars.compile_one
    grammars.compile_one = lambda grammar: compiled.append(grammar.text) or compile_one(grammar)
    return compiled


def test_compiled_grammars_are_kept_up_to_a_limit(byte_tokenizer):
    grammars = compiler(byte_tokenizer, cache_size=2)
    compiled = recorded(grammars)
    for pattern in ("a", "b", "a", "c", "a", "b"):
        grammars.matcher(Grammar.regex(pattern))
    assert compiled == ["a", "b", "c", "b"]


def test_compiled_grammars_are_kept_up_to_their_memory(byte_tokenizer, monkeypatch):
    resident = iter(range(0, 10_000, 1000))  # before and after each grammar compiles
    monkeypatch.setattr("vlmserve.sampling.grammar.resident_memory", lambda: next(resident))
    grammars = compiler(byte_tokenizer, cache_size=4, cache_bytes=2500)
    compiled = recorded(grammars)
    for pattern in "abccba":
        grammars.matcher(Grammar.regex(pattern))
    assert compiled == ["a", "b", "c", "a"]


def test_matchers_of_one_grammar_are_independent(byte_grammars, byte_tokenizer):
    first, second = (byte_grammars.matcher(Grammar.choice(["ab", "cd"])) for _ in range(2))
    first.advance(byte_tokenizer.token_id("a"))
    assert second.allowed(END, may_end=True)[byte_tokenizer.token_id("c")]
    assert not first.allowed(END, may_end=True)[byte_tokenizer.token_id("c")]


def test_answer_ends_only_where_complete(byte_grammars, byte_tokenizer):
    a, b = byte_tokenizer.token_id("a"), byte_tokenizer.token_id("b")
    matcher = byte_grammars.matcher(Grammar.regex("ab*c?"))
    assert not matcher.allowed(END | {b}, may_end=True)[2]
    matcher.advance(a)
    assert matcher.allowed(END, may_end=True)[2]
    # Before min_tokens it goes on, unless nothing can follow.
    assert not matcher.allowed(END, may_end=False)[2]
    only = byte_grammars.matcher(Grammar.choice(["", "a"]))
    assert only.allowed(END, may_end=True)[[2, a]].all()
    empty = byte_grammars.matcher(Grammar.choice([""]))
    assert np.flatnonzero(empty.allowed(END, may_end=False)).tolist() == [2]
    assert not empty.allowed(frozenset(), may_end=True).any()
    assert empty.finished


def chain_of_references(length: int) -> Grammar:
    definitions: dict[str, Any] = {
        f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(length)
    }
    return Grammar.json({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "integer"}}})


def chain_of_rules(length: int, name: str) -> Grammar:
    rules = [f'{name}{n}: "a" {name}{n + 1}' for n in range(length)]
    return Grammar.lark("\n".join([f"start: {name}0", *rules, f'{name}{length}: "z"']))


@pytest.mark.parametrize("grammar", [chain_of_references(1650), chain_of_rules(4500, "r"), chain_of_rules(4500, "R")])
def test_long_reference_chains_do_not_end_the_process(tmp_path: Path, grammar: Grammar) -> None:
    tokenizer = Tokenizer.from_folder(write_checkpoint(tmp_path, byte_level()))
    compiler = GrammarCompiler(lambda: tokenizer, max_bytes=128 * 1024, cache_size=2)
    matcher = compiler.matcher(grammar)
    for _ in range(5):
        allowed = np.flatnonzero(matcher.allowed(END, may_end=True))
        if not len(allowed):
            break
        matcher.advance(int(allowed[0]))


@pytest.mark.parametrize("first", [0, 1])
def test_forced_characters_are_whole(first: int) -> None:
    tokenizer = Tokenizer.from_folder(resolve_model("pixie"))
    matcher = GrammarCompiler(lambda: tokenizer, max_bytes=10_000, cache_size=4).matcher(
        Grammar("regex", "x" * first + "Größe der Fläche " * 20)
    )
    matcher.allowed(END, may_end=True)
    text = "x" * first + "Größe der Fläche " * 20
    forced = matcher.forced()
    assert len(forced) > 40
    assert forced[:-8] == tokenizer.encode_inside(text)[: len(forced) - 8]


def test_forced_tokens_fit_the_grammar(tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"name": {"enum": ["a long name"]}, "size": {"enum": ["a long size"]}},
              "required": ["name", "size"], "additionalProperties": False}  # fmt: skip
    compiler = GrammarCompiler(lambda: tokenizer, max_bytes=10_000, cache_size=4)
    matcher = compiler.matcher(Grammar.json(schema))
    taken: list[int] = []
    num_forced = 0
    while True:
        allowed = matcher.allowed(END, may_end=True)
        if matcher.complete:
            break
        forced = matcher.forced()
        num_forced += len(forced)
        following = forced or [int(np.flatnonzero(allowed)[0])]
        for place, token in enumerate(following):
            if place:
                allowed = matcher.allowed(END, may_end=True)
            assert allowed[token]
            matcher.advance(token)
        taken += following
    detokenizer = Detokenizer(tokenizer)
    assert json.loads(detokenizer.push(taken) + detokenizer.finish()) == {"name": "a long name", "size": "a long size"}
    assert num_forced > 20


def test_grammars_may_contain_tokens_that_models_lack(tmp_path: Path) -> None:
    backend = byte_level()
    size = backend.get_vocab_size()
    backend.add_tokens(["<first>", "<second>"])
    tokenizer = Tokenizer.from_folder(write_checkpoint(tmp_path, backend))
    assert tokenizer.encode_inside("<second>") == [size + 1]
    compiler = GrammarCompiler(lambda: tokenizer, max_bytes=10_000, cache_size=4, vocab_size=size)
    for schema, first in (({"const": "<second>"}, ""), ({"enum": ["a<second>", "b<second>"]}, '"a')):
        matcher = compiler.matcher(Grammar.json(schema))
        for token in tokenizer.encode_inside(first):
            matcher.advance(token)
        matcher.allowed(END, may_end=True)
        forced = matcher.forced()
        assert max(forced) < size
        assert Detokenizer(tokenizer).push(forced).strip('"') == "<second>"

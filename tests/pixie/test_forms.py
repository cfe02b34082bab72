"""Forms and calls: true values, schemas that allow them, names that training never sees."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import numpy as np
import pytest

from vlmserve.frontend.tool_forms import choose_form
from vlmserve.frontend.tools import Function, ToolUse
from vlmserve.models.hub import resolve_model
from vlmserve.pixie.calls import CALL_HEAD, DONE, FAILED, ask_all_with_tools, ask_with_tools
from vlmserve.pixie.fields import OF_ITEM, OF_SCENE, sample_field, subject_of
from vlmserve.pixie.forms import Form, ask_form, ask_suggested, is_right
from vlmserve.pixie.scenes import sample_scene
from vlmserve.pixie.vocabulary import PLURALS
from vlmserve.prompt.template import ChatTemplate
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.sampling.grammar import GrammarCompiler
from vlmserve.types import Grammar

SEEDS = range(150)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve_model("pixie"))


@pytest.fixture(scope="module")
def grammars(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, max_bytes=100_000, cache_size=4)


def follow(grammars: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> None:
    """Check that a grammar allows a text in the tokens that training teaches."""
    matcher = grammars.matcher(grammar)
    for token in tokenizer.encode(text, add_special_tokens=False):
        allowed = matcher.allowed(frozenset(), may_end=True)
        assert allowed is None or token in np.flatnonzero(allowed), (text, tokenizer.token(token))
        matcher.advance(token)
    assert matcher.complete, text


@pytest.mark.parametrize("new", [False, True])
def test_schemas_allow_compact_right_answers(grammars, tokenizer, new):
    for seed in SEEDS:
        form = ask_form(sample_scene(seed), random.Random(seed), new=new)
        value = json.loads(form.answer)
        assert form.answer == json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        schema = {"type": "object"} if form.schema is None else json.loads(form.schema)
        jsonschema.validate(value, schema)
        follow(grammars, tokenizer, Grammar.json(schema) if form.schema else Grammar.json_object(), form.answer)
        given = [form.answer[start:end] for start, end in form.given]
        assert all(text in ("{", "}", '"') or f'"{text}":' in form.answer for text in given)


def test_counts_and_flags_follow_from_the_scene():
    seen = set()
    for seed in SEEDS:
        rng = random.Random(seed)
        scene = sample_scene(seed, "grid")
        subject = subject_of(scene, None, rng)
        for topic in OF_SCENE:
            if topic.names[0] not in ("number of {plural}", "has {shape}"):
                continue
            field = sample_field(topic, subject, rng)
            assert field is not None
            count = sum(item.shape == subject.shape for item in scene.items)
            written = str(field.value).lower()
            if topic.sort == "count":
                assert written == str(count), (field, scene.items)
            else:
                assert written in (("true", "yes") if count else ("false", "no")), (field, scene.items)
            seen.add((topic.sort, field.value))
    assert {("flag", True), ("flag", False), ("count", 0), ("count", 3)} <= seen


def test_absent_things_are_null_none_or_empty():
    for seed in SEEDS:
        scene = sample_scene(seed, "word")
        form = ask_form(scene, random.Random(seed))
        for name, value in json.loads(form.answer).items():
            words = re.sub(r"(?<=[a-z])(?=[A-Z])|[-_]", " ", name).lower()
            if any(plural in words.split() for plural in PLURALS.values()) and not isinstance(value, list | dict):
                assert value in (0, "0", None, False, "no", "No", "false"), form


def test_new_names_are_never_taught():
    for topic in (*OF_ITEM, *OF_SCENE):
        assert topic.new_names
        assert not set(topic.new_names) & set(topic.names)


@pytest.mark.parametrize(
    ("expected", "answer", "optional", "right"),
    [
        ('{"a":1,"b":"red"}', '{"a": 1, "b": "red"}', False, True),
        ('{"a":1,"b":"red"}', '{"a":1}', False, False),
        ('{"a":1,"b":"red"}', '{"a":1}', True, True),
        ('{"a":1}', '{"a":true}', False, False),
        ('{"a":[{"b":1}]}', '{"a":[{"b":1},{"b":1}]}', False, False),
        ('{"a":null}', '{"a":"', False, False),
    ],
)
def test_answers_compare_by_value(expected, answer, optional, right):
    assert is_right(Form("", None, expected, optional=optional), answer) == right


@pytest.mark.parametrize("new", [False, True])
def test_grammar_allows_calls_as_they_are_taught(grammars, tokenizer, new):
    source = (resolve_model("pixie") / "chat_template.jinja").read_text()
    form = choose_form(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, "<image>"), tokenizer, "auto")
    assert (form.name, form.native) == ("hermes", True)
    calls = replies = 0
    for seed in SEEDS:
        scene = sample_scene(seed) if seed % 4 else None
        dialog = ask_with_tools(scene, random.Random(seed), new=new)
        functions = tuple(Function(tool.name, None, json.loads(tool.parameters)) for tool in dialog.tools)
        allowed = frozenset({dialog.required}) if dialog.required else None
        use = ToolUse(functions, must_call=dialog.required is not None, allowed=allowed)
        follow(grammars, tokenizer, form.grammar(use, None), dialog.turns[0][1])
        calls += dialog.calls
        replies += len(dialog.turns) > 1
        assert all(tool.signature in dialog.system for tool in dialog.tools)
    assert calls > len(SEEDS) // 2
    assert replies > len(SEEDS) // 4
    assert calls < len(SEEDS)


def test_replies_tell_what_functions_returned():
    for seed in SEEDS:
        dialog = ask_with_tools(sample_scene(seed), random.Random(seed))
        for question, answer in dialog.turns[1:2]:
            result = question.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
            assert answer in (DONE, FAILED, result)
            assert (answer == FAILED) == bool(re.search("(?i)error|failed", result))


def test_dialogs_about_an_image_share_their_functions():
    for seed in SEEDS:
        dialogs = ask_all_with_tools(sample_scene(seed), random.Random(seed))
        assert len({dialog.system for dialog in dialogs}) == 1
        names = [dialog.turns[0][1].removeprefix(CALL_HEAD).partition('"')[0] for dialog in dialogs if dialog.calls]
        assert sorted(names) == sorted(tool.name for tool in dialogs[0].tools)


def test_suggested_questions_have_answers_in_words():
    answers = {ask_suggested(sample_scene(seed), random.Random(seed))[1] for seed in SEEDS}
    assert any(re.fullmatch(r"\w+, \w+ and \w+", answer) for answer in answers)
    assert not any(answer.startswith("{") for answer in answers)

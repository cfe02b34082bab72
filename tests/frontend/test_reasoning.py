"""Thoughts and answers, told apart in whatever steps their tokens come."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.prompt.tokenizers_for_tests import byte_level
from vlmserve.errors import ConfigurationError
from vlmserve.frontend.reasoning import AnswerText, Reasoning, choose_reasoning
from vlmserve.prompt.detokenize import Detokenizer
from vlmserve.prompt.files import PromptFiles
from vlmserve.prompt.template import ChatTemplate
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.sampling.thoughts import Thinking
from vlmserve.types import SamplingParams

FILES = PromptFiles(tokenizer_config={}, special_tokens={}, image_token_id=None, chat_template=None)


def tokenizer_with(*markers: str) -> Tokenizer:
    backend = byte_level()
    backend.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    return Tokenizer(backend, FILES)


PLAIN = tokenizer_with()
TOKENIZER = tokenizer_with("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>")
START, END = (TOKENIZER.token_id(marker) for marker in ("<think>", "</think>"))
TEXTS = st.text(st.sampled_from("ab \n<think>日😀"), max_size=10)
CUTS = st.lists(st.integers(1, 5))


def template(source: str) -> ChatTemplate:
    return ChatTemplate("{{ messages[0].content }}" + source, {}, None)


def reasoning() -> Reasoning:
    chosen = choose_reasoning(None, TOKENIZER, "qwen3")
    assert chosen is not None
    return chosen


def plain(text: str) -> list[int]:
    """Letters of a text: what looks like a marker is none."""
    return PLAIN.encode(text, add_special_tokens=False)


def read(answer: AnswerText, tokens: list[int], cuts: list[int]) -> tuple[str, str]:
    """An answer whose tokens come in steps of these numbers, then one by one."""
    thought, text, done, sizes = "", "", 0, iter(cuts)
    while done < len(tokens):
        count = next(sizes, 1)
        said = answer.push(tokens[done : done + count])
        assert not (said.thought and text), "nothing is thought behind the answer's first character"
        thought, text, done = thought + said.thought, text + said.text, done + count
    said = answer.finish()
    return thought + said.thought, text + said.text


def answer_text(prompt: str = "", params: SamplingParams | None = None) -> AnswerText:
    params = params or SamplingParams()
    thinking = Thinking.of(reasoning().after(prompt), params)
    return AnswerText(Detokenizer(TOKENIZER, params.stop), Detokenizer(TOKENIZER), thinking)


@settings(deadline=None, max_examples=300)
@given(TEXTS, TEXTS, st.sampled_from(["", "\n", " ", "\n\n"]), st.booleans(), st.booleans(), CUTS)
def test_an_answer_is_told_apart_in_any_steps(thought, text, blank, begun, ends, cuts):
    tokens = plain(thought) if begun else [*plain(blank), START, *plain(thought)]
    tokens += [END, *plain(text)] if ends else []
    answer = answer_text("<think>\n" if begun else "")
    assert read(answer, tokens, cuts) == (thought.strip(), text.lstrip() if ends else "")
    assert answer.num_tokens == len(tokens)
    assert answer.num_reasoning_tokens == len(tokens) - (len(plain(text)) if ends else 0)


@settings(deadline=None, max_examples=150)
@given(TEXTS.filter(str.strip), CUTS)
def test_markers_are_tokens_and_only_at_the_beginning(text, cuts):
    """What has the letters of a marker, a marker behind the answer's beginning, and an end without one are text."""
    for tokens, shown in (
        (plain(text), text),
        ([*plain(text), START, *plain("a"), END], f"{text}<think>a</think>"),
        ([END, *plain(text)], f"</think>{text}"),
    ):
        answer = answer_text()
        assert read(answer, tokens, cuts) == ("", shown)
        assert (answer.num_reasoning_tokens, answer.num_tokens) == (0, len(tokens))


@settings(deadline=None, max_examples=100)
@given(CUTS)
def test_stop_strings_end_answers_and_not_thoughts(cuts):
    tokens = [START, *plain("first END"), END, *plain("then END and"), END]
    answer = answer_text(params=SamplingParams(stop=("END",)))
    assert read(answer, tokens, cuts) == ("first END", "then ")
    assert answer.stop_string == "END"
    assert answer.num_tokens == 1 + len(plain("first END")) + 1 + len(plain("then END"))


def test_a_prompt_may_begin_thoughts_or_end_them():
    form = reasoning()
    begun, not_begun = form.after("Hi <think>\n"), form.after("Hi")
    assert begun is not None
    assert not_begun is not None
    assert (begun.begun, not_begun.begun) == (True, False)
    assert form.after("Hi <think>\n\n</think>\n\n") is None
    always = choose_reasoning(None, TOKENIZER, "deepseek_r1")
    assert always is not None
    assert always.after("Hi") == begun
    assert always.after("Hi </think>") is None


@settings(deadline=None)
@given(TEXTS, CUTS)
def test_titles_are_no_part_of_thoughts(thought, cuts):
    form = choose_reasoning(template("<|channel>"), TOKENIZER, "auto")
    assert form is not None
    titled = (
        (f"thought\n{thought}", thought),
        ("thought", ""),
        ("thoughtful", "thoughtful"),
        ("b\nthought\n", "b\nthought"),
    )
    for written, expected in titled:
        thinking = Thinking.of(form.after(""), SamplingParams())
        answer = AnswerText(Detokenizer(TOKENIZER), Detokenizer(TOKENIZER), thinking, title=form.form.title)
        tokens = [form.start_id, *plain(written), form.end_id, *plain("b")]
        assert read(answer, tokens, cuts) == (expected.strip(), "b")


def test_form_follows_the_template_with_token_markers():
    def name(source: str, wanted="auto", tokenizer: Tokenizer = TOKENIZER) -> str | None:
        chosen = choose_reasoning(template(source), tokenizer, wanted)
        return None if chosen is None else chosen.form.name

    assert name("<think>") == name("{{ x.split('</think>') }}") == "qwen3"
    assert name("[THINK]") == "mistral"
    assert name("") is name("<think>", "none") is name("<think>", tokenizer=PLAIN) is None
    assert name("", "glm45") == "glm45"
    assert name("<think>", "mistral") == "mistral"
    with pytest.raises(ConfigurationError, match=r"--reasoning-parser deepseek_r1: <think>"):
        name("<think>", "deepseek_r1", PLAIN)

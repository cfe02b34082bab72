"""The tokenizer and the chat template of the folder that comes with the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

import vlmserve.pixie
from training.pixie.tokenizer import (
    ASSISTANT,
    BOS,
    CHAT_TEMPLATE,
    EOS,
    IMAGE,
    SPECIAL_TOKENS,
    SYSTEM,
    USER,
    VOCAB_SIZE,
    encode_example,
    train_tokenizer,
)
from vlmserve.pixie.evaluation import messages_of
from vlmserve.pixie.questions import TASKS, Example, sample_example
from vlmserve.pixie.scenes import sample_scene

FOLDER = Path(vlmserve.pixie.__file__).parent / "model"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_special_tokens_come_first(tokenizer: Tokenizer) -> None:
    assert [tokenizer.id_to_token(n) for n in range(len(SPECIAL_TOKENS))] == list(SPECIAL_TOKENS)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE


def test_written_characters_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("the word TREE").tokens[-4:] == list("TREE")
    assert tokenizer.encode("the number 4711").tokens[-4:] == list("4711")
    assert tokenizer.encode("TREE").ids == tokenizer.encode("the word TREE").ids[-4:]


def test_training_again_gives_the_same_tokenizer() -> None:
    one, other = train_tokenizer(300), train_tokenizer(300)
    assert one.to_str() == other.to_str()
    assert not [
        token
        for token in one.get_vocab()
        if sum(c.isupper() or c.isdigit() for c in token) and token.isalnum() and token.isascii() and len(token) > 1
    ]


@pytest.mark.parametrize("text", ["a red circle and an orange star", "Zürich, 東京 🙂?", "", "  two  spaces\n"])
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_only_the_answers_and_their_ends_are_marked(tokenizer: Tokenizer) -> None:
    scene = sample_scene(0, "one")
    turns = (("What is this?", "a red circle"), ("Where is it?", "top left"))
    ids, spoken = encode_example(tokenizer, Example("follow_up", (scene,), turns, system="Be brief."))
    assert ids[0] == BOS
    assert ids[1] == SYSTEM
    assert (ids.count(IMAGE), ids.count(USER), ids.count(ASSISTANT), ids.count(EOS)) == (1, 2, 2, 2)
    assert ids[ids.index(USER) + 1] == IMAGE
    said = [id_ for id_, is_said in zip(ids, spoken, strict=True) if is_said]
    assert tokenizer.decode(said, skip_special_tokens=False) == "a red circle</s>top left</s>"


@pytest.mark.parametrize("task", TASKS)
def test_examples_are_encoded_as_transformers_writes_them(task: str) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(FOLDER)
    assert reference.chat_template == CHAT_TEMPLATE
    for seed in range(8):
        example = sample_example(seed, task)
        messages = messages_of(example, len(example.turns) - 1)
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = [
                    {"type": "image"} if part["type"] == "image" else part for part in message["content"]
                ]
        messages.append({"role": "assistant", "content": example.turns[-1][1]})
        expected = reference.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert encode_example(reference, example)[0] == expected
        plain = encode_example(Tokenizer.from_file(str(FOLDER / "tokenizer.json")), example)[0]
        assert plain == expected


def test_long_lists_of_functions_are_left_out() -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(FOLDER)
    functions = [{"type": "function", "function": {"name": f"read_{number}", "parameters": {}}} for number in range(50)]
    for messages in ([{"role": "system", "content": "Be brief."}], [{"role": "user", "content": "Hello"}]):
        described, plain = (
            reference.apply_chat_template(messages, tools=tools, tokenize=False)
            for tools in (functions[:20], functions)
        )
        assert "Functions: read_0(); read_1()" in described
        assert "read_19()" in described
        assert plain == reference.apply_chat_template(messages, tokenize=False)

"""Which tokens of a sample count, beside what pixie is trained on and transformers' masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.blip import make_blip
from tests.checkpoints import make_llama
from tests.moondream import make_moondream
from training.pixie.tokenizer import IMAGE, encode_example
from vlmserve.calibration.prompts import drawn_samples, file_samples
from vlmserve.calibration.samples import Sample, of_conversation, of_text
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.models.hub import resolve_model
from vlmserve.pixie.questions import sample_example
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import MediaConfig

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "assistant", "content": "Hello, ask me."},
    {"role": "user", "content": "What is a cat?"},
    {"role": "assistant", "content": "An animal."},
    {"role": "user", "content": "And what is two plus two?"},
    {"role": "assistant", "content": "Four, or five."},
]
TURNS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}assistant\n"
    "{% generation %}THOUGHTS{{ message.content }}</s>{% endgeneration %}\n"
    "{% else %}{{ message.role }}\n{{ message.content }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
TEMPLATES = {
    "all turns alike": TURNS.replace("THOUGHTS", ""),
    "thoughts in the last turn only": TURNS.replace("THOUGHTS", "{% if loop.last %}[no thoughts]\n{% endif %}"),
    "turns without an end": (
        "{% for message in messages %}{{ message.role.upper() }}: {% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}\n{% endgeneration %}{% else %}{{ message.content }}\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
    ),
}


def preparer_of(folder: Path, chat_template: str | None = None) -> RequestPreparer:
    return RequestPreparer(folder, read_settings(MediaConfig, {}), chat_template=chat_template)


def text_of(preparer: RequestPreparer, sample: Sample) -> str:
    return preparer.decode([sample.prompt.token_ids[place] for place in sample.counted])


def test_pixie_samples_count_trained_answers() -> None:
    preparer = preparer_of(resolve_model("pixie"))
    tokenizer = Tokenizer.from_file(str(resolve_model("pixie") / "tokenizer.json"))
    examples = [sample_example(seed) for seed in range(40)]
    assert any(example.system for example in examples)
    assert {1, 2} <= {len(example.scenes) for example in examples}
    assert max(len(example.turns) for example in examples) > 1
    for example, sample in zip(examples, drawn_samples(preparer, 0), strict=False):
        left_out = {place for span in sample.prompt.images for place in range(span.start + 1, span.end)}
        places = [place for place in range(len(sample.prompt.token_ids)) if place not in left_out]
        ids, said = encode_example(tokenizer, example)
        assert [place in sample.counted for place in places] == said
        assert [IMAGE if place in _images(sample) else sample.prompt.token_ids[place] for place in places] == ids


def _images(sample: Sample) -> set[int]:
    return {place for span in sample.prompt.images for place in range(span.start, span.end)}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_transformers_masks_as_the_assistants_words_counts(tmp_path: Path, name: str) -> None:
    folder = make_llama(tmp_path, num_hidden_layers=1)
    sample = of_conversation(preparer_of(folder, TEMPLATES[name]), CONVERSATION)
    right = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CONVERSATION, chat_template=TEMPLATES[name], return_assistant_tokens_mask=True, return_dict=True
    )
    assert sample.prompt.token_ids == right["input_ids"]
    assert list(sample.counted) == [place for place, one in enumerate(right["assistant_masks"]) if one]
    assert len(sample.counted) > 20


def test_text_samples_skip_first_token_and_images() -> None:
    preparer = preparer_of(resolve_model("pixie"))
    assert of_text(preparer.tokens([5, 6, 7])).counted == (1, 2)
    prompt = next(drawn_samples(preparer, 0)).prompt
    assert prompt.images
    assert sorted({0, *of_text(prompt).counted} | _images(Sample(prompt, ()))) == list(range(len(prompt.token_ids)))
    assert len(of_text(prompt).counted) == len(prompt.token_ids) - 1 - prompt.num_image_tokens


def test_single_image_samples_count_the_answer(tmp_path: Path) -> None:
    preparer = preparer_of(make_moondream(tmp_path)[0])
    samples = drawn_samples(preparer, 0)
    examples = (example for example in map(sample_example, range(100)) if len(example.scenes) == 1)
    for _, sample, example in zip(range(3), samples, examples, strict=False):
        assert text_of(preparer, sample) == f" {example.turns[0][1]}"
        assert sample.counted[-1] == len(sample.prompt.token_ids) - 1


@pytest.mark.parametrize("kind", ["caption", "question"])
def test_tokenless_images_get_several_questions(tmp_path: Path, kind: str) -> None:
    preparer = preparer_of(make_blip(tmp_path, kind))
    groups: dict[bytes, list[Sample]] = {}
    for _, sample in zip(range(24), drawn_samples(preparer, 0), strict=False):
        assert sample.prompt.cross is not None
        assert sample.counted
        groups.setdefault(sample.prompt.cross.image.key, []).append(sample)
    whole = list(groups.values())[:-1]
    assert len(whole) > 2
    for samples in whole:
        assert 3 <= len(samples) <= 8
        assert len(
            {(tuple(one.prompt.token_ids), tuple(one.prompt.cross.token_ids)) for one in samples if one.prompt.cross}
        ) == len(samples)


def test_lines_of_a_file_count_by_their_answers(tmp_path: Path) -> None:
    lines = [
        {"prompt": "What is a cat?", "answer": "An animal."},
        {"messages": CONVERSATION[2:], "answer": "not asked for"},
        {"messages": CONVERSATION[2:5]},
        {"messages": CONVERSATION[1:4]},
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    preparer = preparer_of(make_llama(tmp_path / "model", num_hidden_layers=1))
    samples = list(file_samples(file, preparer, "--conversations"))
    assert [text_of(preparer, sample) for sample in samples] == [
        "An animal.</s>", "An animal.</s>Four, or five.</s>", "An animal.</s>", "An animal.</s>",
    ]  # fmt: skip
    assert preparer.decode(samples[2].prompt.token_ids).endswith("assistant\n")

"""The weights in the package: they look at real pixels, and transformers agrees token for token."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from transformers import AutoTokenizer, LlavaForConditionalGeneration

from tests.normalized import normalized
from vlmserve import LLM, SamplingParams
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.models.hub import resolve_model
from vlmserve.pixie.evaluation import messages_of
from vlmserve.pixie.questions import TASKS, sample_example
from vlmserve.pixie.scenes import HELD_OUT_SEEDS
from vlmserve.settings.config import MediaConfig
from vlmserve.types import Grammar

GREEDY = SamplingParams(temperature=0, max_tokens=48)
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple")


@pytest.fixture(scope="module")
def pixie() -> LLM:
    return LLM("pixie", dtype="float32", device="cpu", kv_cache_memory="64MiB")


def ask(*questions: tuple[Image.Image, str]) -> list[list[dict[str, object]]]:
    return [
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]
        for image, text in questions
    ]


def answers(pixie: LLM, conversations: list[list[dict[str, object]]]) -> list[str]:
    return [result.outputs[0].text for result in pixie.chat(conversations, GREEDY, use_tqdm=False)]


def circle(colour: str, size: tuple[int, int] = (300, 300)) -> Image.Image:
    image = Image.new("RGB", size, (120, 120, 125))
    width, height = size
    ImageDraw.Draw(image).ellipse((width * 0.2, height * 0.2, width * 0.8, height * 0.8), fill=colour)
    return image


def test_transformers_generates_the_same_tokens(pixie):
    folder = resolve_model("pixie")
    theirs = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    preparer = RequestPreparer(folder, MediaConfig())
    examples = [sample_example(HELD_OUT_SEEDS + seed, task) for task in TASKS for seed in range(2)]
    conversations = [messages_of(example, len(example.turns) - 1) for example in examples]
    for conversation, result in zip(conversations, pixie.chat(conversations, GREEDY, use_tqdm=False), strict=True):
        prompt = preparer.chat(conversation, allow_local=True)
        inputs = {"input_ids": torch.tensor([prompt.token_ids])}
        if prompt.images:
            pixels = np.concatenate([normalized(span.image) for span in prompt.images])
            inputs["pixel_values"] = torch.from_numpy(pixels)
        generated = theirs.generate(**inputs, max_new_tokens=48, do_sample=False)[0, len(prompt.token_ids) :].tolist()
        expected = generated[: generated.index(2)] if 2 in generated else generated
        assert result.outputs[0].token_ids == expected, conversation


@pytest.mark.parametrize("size", [(300, 300), (640, 480), (90, 120)])
def test_it_names_what_a_newcomer_draws(pixie, size):
    conversations = ask(*((circle(colour, size), "What is in the picture?") for colour in COLOURS))
    assert answers(pixie, conversations) == [f"{'an' if c == 'orange' else 'a'} {c} circle" for c in COLOURS]


def test_it_reads_a_number(pixie):
    image = Image.new("RGB", (240, 160), "white")
    ImageDraw.Draw(image).text((40, 30), "42", fill="black", font=ImageFont.load_default(90))
    assert answers(pixie, ask((image, "What number is written?"))) == ["42"]


def test_answers_depend_on_the_image(pixie):
    conversations = ask(*((circle(colour), "What colour is the circle?") for colour in COLOURS))
    assert answers(pixie, conversations) == list(COLOURS)
    assert answers(pixie, conversations[::-1]) == list(COLOURS[::-1])


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"color": {"type": "string"}}, {"color": "red"}),
        ({"shape": {"type": "string"}, "count": {"type": "integer"}}, {"shape": "circle", "count": 1}),
        ({"has_circle": {"type": "boolean"}, "has_dog": {"type": "boolean"}}, {"has_circle": True, "has_dog": False}),
        ({"colour": {"enum": ["blue", "red"]}, "text": {"type": ["string", "null"]}}, {"colour": "red", "text": None}),
    ],
)
def test_it_fills_in_forms(pixie, schema, expected):
    grammar = Grammar.json({"type": "object", "properties": schema, "required": list(schema)})
    params = SamplingParams(temperature=0, max_tokens=48, grammar=grammar)
    [result] = pixie.chat(ask((circle("red"), "What is in the image?")), params, use_tqdm=False)
    assert json.loads(result.outputs[0].text) == expected
    assert result.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("count", [1, 12, 36])
def test_functions_do_not_disturb_answers(pixie, count):
    names = ("days_ago", "query", "file_id", "count")
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    tools = [
        {"type": "function", "function": {"name": f"search_notes_{number}", "parameters": parameters}}
        for number in range(count)
    ]
    content = [{"type": "image"}, {"type": "text", "text": "What colour is the circle?"}]
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("pixie"))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tools=tools, add_generation_prompt=True, tokenize=False
    )
    asked = {"prompt": prompt, "multi_modal_data": {"image": circle("red")}}
    [result] = pixie.generate(asked, GREEDY, use_tqdm=False)
    assert result.outputs[0].text == "red"


def test_it_declines_what_it_was_never_taught(pixie):
    [answer] = answers(pixie, [[{"role": "user", "content": "What is the capital of France?"}]])
    assert answer.startswith("Sorry")

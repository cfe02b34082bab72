"""Questions that the web page, the README and the first pages suggest get sensible answers from pixie."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from vlmserve import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/start.md", "docs/python.md", "docs/api.md", "examples/README.md")
ALL = "a blue square, a red circle and a yellow triangle"
EXPECTED = {
    "What is in the image?": ALL,
    "Describe the image.": ALL,
    "What is in this photo?": ALL,
    "What is this document about?": ALL,
    "How many objects are there?": "3",
    "How many shapes are there?": "3",
    "What colour is the circle?": "red",
    "Which colours are there?": "blue, red and yellow",
    "Where is the triangle?": "bottom right",
    "Is there a circle?": "yes",
    "Is there a star?": "no",
    "Write down its text.": "I do not see any text.",
    "What do its tables say?": "Sorry, I can only answer questions about .*",
    "What is the capital of France?": "Sorry, I can only answer questions about .*",
}
"""Patterns of answers about examples/shapes.png."""
ELSEWHERE = {"What shape is there?", "How large is the circle?", "How many corners does the triangle have?"}
"""Questions about other images, with a function, or for an adapter."""


def suggested() -> set[str]:
    """Find the questions in the page's source and in quotes in the documentation."""
    source = (ROOT / "web/src/chat/composer.tsx").read_text()
    lists = re.findall(r"const ABOUT_\w+ = \[(.*?)\];", source, re.DOTALL)
    assert len(lists) == 2
    text = "\n".join(lists)
    text += "\n".join((ROOT / page).read_text() for page in PAGES)
    return set(re.findall(r'"((?:What|Which|How|Where|Is|Describe|Write)\b[^"\n]*[?.])"', text))


@pytest.fixture(scope="module")
def pixie() -> LLM:
    return LLM("pixie", dtype="float32", device="cpu", kv_cache_memory="64MiB")


def test_every_suggestion_gets_its_answer(pixie):
    questions = sorted(suggested() - ELSEWHERE | {"Which colours are there?", "What is the capital of France?"})
    assert len(questions) > 8
    image = Image.open(ROOT / "examples/shapes.png")
    conversations = [
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}]
        for question in questions
    ]
    results = pixie.chat(conversations, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
    answers = {question: one.outputs[0].text for question, one in zip(questions, results, strict=True)}
    assert {question: EXPECTED.get(question) for question in questions} == {
        question: expected if re.fullmatch(expected := EXPECTED.get(question, ""), answer) else answer
        for question, answer in answers.items()
    }

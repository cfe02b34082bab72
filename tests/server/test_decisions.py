"""/v1/decisions with the openai client and a mock engine, and its arithmetic."""

from __future__ import annotations

import math

import numpy as np
import openai
import pytest

from tests.media.images_for_tests import encoded, noise
from tests.server.live import LiveServer
from tests.server.test_chat import data_url
from vlmserve.errors import ImageFetchError
from vlmserve.frontend.deciding import (
    Decider,
    Question,
    answers_as_text,
    asked,
    confidence,
    probabilities,
    shared_prefix,
)
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.prompt import template_limits
from vlmserve.server import preparation
from vlmserve.server.schema.decisions import DecisionRequest
from vlmserve.settings.config import MediaConfig
from vlmserve.types import Prompt

PREDICATE = {"type": "predicate", "name": "red", "instructions": "The image is red"}
CHOICE = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "Which?"}, {"type": "input_json", "data": {"a": [1]}}],
    "choices": [{"value": "true"}, {"value": True, "description": "a boolean"}, {"value": "true, but"}],
}
SCORE = {
    "type": "score",
    "instructions": "How good?",
    "levels": [{"label": "bad"}, {"label": "fair", "description": "so so"}, {"label": "good"}],
}
IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": data_url("red")}]}]


def decide(server: LiveServer, questions, content=IMAGE):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        return client.decisions.create(model="tiny", input=content, questions=questions)


def test_questions_are_answered_in_order(live):
    decision = decide(live, [PREDICATE, CHOICE, SCORE])
    predicate, choice, score = decision.answers
    assert (predicate.type, predicate.name) == ("predicate", "red")
    assert 0 < predicate.probability < 1
    assert [one.value for one in choice.probabilities] == ["true", True, "true, but"]
    assert choice.choice == max(choice.probabilities, key=lambda one: one.probability).value
    assert [(one.value, one.label) for one in score.probabilities] == [(0, "bad"), (1, "fair"), (2, "good")]
    assert score.score == pytest.approx(sum(one.value * one.probability for one in score.probabilities))
    for one in (choice, score):
        values = [each.probability for each in one.probabilities]
        assert sum(values) == pytest.approx(1)
        assert one.confidence == pytest.approx(confidence(values))


def test_stored_temperature_divides_log_probabilities(live, monkeypatch):
    [plain] = decide(live, [PREDICATE]).answers
    monkeypatch.setattr(live.service.preparer, "decision_temperature", 2.0)
    [softer] = decide(live, [PREDICATE]).answers
    odds = [one.probability / (1 - one.probability) for one in (plain, softer)]
    assert math.log(odds[0]) == pytest.approx(2 * math.log(odds[1]))


def test_the_content_counts_once(live):
    other = {**PREDICATE, "instructions": "The image is blue"}
    one, both = (decide(live, questions).usage for questions in ([PREDICATE], [PREDICATE, other]))
    assert one.output_tokens == 0
    assert one.input_tokens == one.total_tokens
    assert 0 < both.input_tokens - one.input_tokens < one.input_tokens


def test_each_input_token_is_cached_or_missed(real):
    counts = []
    for _ in range(2):
        usage = decide(real, [PREDICATE, CHOICE], "Once upon a time " * 20).usage.to_dict()
        details = usage["input_tokens_details"]
        missed = {name: count for name, count in details["missed_tokens"].items() if name != "seconds_since_eviction"}
        assert details["cached_tokens"] + sum(missed.values()) == usage["input_tokens"]
        counts.append((details["cached_tokens"], missed["never_seen"]))
    [(_, unknown), (cached, still_unknown)] = counts
    assert unknown > 0
    assert cached > 0
    assert still_unknown == 0


def test_image_urls_are_fetched_once(live, monkeypatch):
    fetched = []

    def fetch(url, limits):
        fetched.append(url)
        if "missing" in url:
            raise ImageFetchError("there is none")
        return encoded(noise(30, 20))

    monkeypatch.setattr(preparation, "fetch_file", fetch)
    part = {"type": "input_image", "image_url": "https://example.org/a.png"}
    content = [{"role": "user", "content": [part, part]}]
    assert len(decide(live, [PREDICATE, CHOICE, SCORE], content).answers) == 3
    assert fetched == ["https://example.org/a.png"]
    missing = {**part, "image_url": "https://example.org/missing.png"}
    with pytest.raises(openai.BadRequestError, match="there is none") as error:
        decide(live, [PREDICATE], [{"role": "user", "content": [part, missing]}])
    assert error.value.param == "input[0].content[1].image_url"


def test_questions_look_an_image_up_once(live):
    before = live.service.preparer.media.image_cache.stats()
    decide(live, [PREDICATE, CHOICE, SCORE], [{"role": "user", "content": [IMAGE[0]["content"][0]] * 2}])
    after = live.service.preparer.media.image_cache.stats()
    assert after.hits + after.misses - before.hits - before.misses == 1


def test_questions_of_text_are_prepared_together(live, monkeypatch):
    sizes = []
    prepare = preparation.Preparation.prepare_alike

    async def noted(self, conversations, known, **options):
        sizes.append(len(conversations))
        return await prepare(self, conversations, known, **options)

    monkeypatch.setattr(preparation.Preparation, "prepare_alike", noted)
    with_image = {**PREDICATE, "instructions": [{"type": "input_image", "image_url": data_url("blue")}]}
    together = decide(live, [PREDICATE, CHOICE, with_image, SCORE])
    assert sizes == [2]
    alone = [decide(live, [one]) for one in (PREDICATE, CHOICE, with_image, SCORE)]
    assert [one.to_dict() for one in together.answers] == [one.answers[0].to_dict() for one in alone]


def test_slow_templates_are_rendered_alone(live, monkeypatch):
    expected = decide(live, [PREDICATE, CHOICE, SCORE]).to_dict()
    monkeypatch.setattr(template_limits, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(template_limits, "CHECK_INTERVAL", 1)
    assert decide(live, [PREDICATE, CHOICE, SCORE]).to_dict()["answers"] == expected["answers"]


def test_items_of_all_types_are_content(live):
    items = [
        {"role": "developer", "content": "Be strict"},
        {"role": "user", "content": [{"type": "input_json", "data": [{"price": 3}]}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "a cat"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A cat"}]},
    ]
    assert len(decide(live, [PREDICATE], items).answers) == 1
    assert len(decide(live, [PREDICATE], "A cat").answers) == 1


@pytest.mark.parametrize(
    ("questions", "content", "message"),
    [
        ([], IMAGE, "questions"),
        ([PREDICATE] * 401, IMAGE, "questions"),
        ([{**CHOICE, "choices": [{"value": "a"}]}], IMAGE, "choices"),
        ([{**CHOICE, "choices": [{"value": "a"}, {"value": "a"}]}], IMAGE, "unique"),
        ([{**CHOICE, "choices": [{"value": str(n)} for n in range(255)]}] * 9, IMAGE, "at most 2,048"),
        ([{**SCORE, "levels": [{"label": str(n)} for n in range(11)]}], IMAGE, "levels"),
        ([PREDICATE], [{"role": "user", "content": [{"type": "input_json", "data": 3}]}], "object"),
        ([PREDICATE], [{"type": "function_call_output", "call_id": "1", "output": "a"}], "call_id"),
        ([PREDICATE, {**PREDICATE, "instructions": "one two three " * 9000}], IMAGE, "maximum context length"),
        (
            [
                PREDICATE,
                {**PREDICATE, "instructions": [{"type": "input_image", "image_url": "nowhere"}]},
            ],
            IMAGE,
            r"questions\[1\]\.instructions\[0\]",
        ),
    ],
)
def test_wrong_requests_are_errors(live, questions, content, message):
    with pytest.raises(openai.BadRequestError, match=message):
        decide(live, questions, content)


def test_choices_equal_transformers_whole_sums(real):
    """One choice begins another, and none is a single token."""
    import torch
    from transformers import AutoModelForCausalLM

    texts = ["a cat", "a cat, but", "the dog"]
    question = {"type": "choice", "instructions": "Which?", "choices": [{"value": text} for text in texts]}
    for _ in range(2):  # the second time, all but the answers is cached
        *_, answer = decide(real, [PREDICATE, question], "Long ago " * 20).answers
        preparer = RequestPreparer(real.folder, MediaConfig.model_validate({}))
        body = DecisionRequest.model_validate({"input": "-", "questions": [question]})
        asking = body.questions[0].asked([{"type": "text", "text": "Which?"}])
        prompt = preparer.chat(asking.after([{"role": "user", "content": "Long ago " * 20}]))
        model = AutoModelForCausalLM.from_pretrained(real.folder, dtype=torch.float32).eval()
        sums, start = [], len(prompt.token_ids)
        for tail in Decider(preparer).task(texts).continuations:
            assert len(tail) > 2
            ids = [*prompt.token_ids, *tail]
            with torch.inference_mode():
                scores = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            sums.append(scores[range(start - 1, len(ids) - 1), ids[start:]].sum())
        expected = torch.stack(sums).softmax(0).tolist()
        assert [one.probability for one in answer.probabilities] == pytest.approx(expected, abs=1e-4)


def test_probabilities_are_normalized_sums():
    assert probabilities(np.log(np.array([0.25, 0.125, 0.125], "<f4"))) == pytest.approx([0.5, 0.25, 0.25])


def test_confidence_measures_concentration():
    assert confidence([0.25] * 4) == pytest.approx(0)
    assert confidence([1.0, 0.0]) == 1
    assert confidence([0.9, 0.1]) == pytest.approx(1 + (0.9 * math.log(0.9) + 0.1 * math.log(0.1)) / math.log(2))


def test_booleans_and_strings_are_written_differently():
    assert answers_as_text(["true", True]) == ['"true"', "true"]
    assert answers_as_text(["no", True]) == ["no", "true"]


def test_questions_join_the_users_last_message():
    question = [{"type": "text", "text": "b"}]
    assert asked([{"role": "user", "content": "a"}], question) == [{"role": "user", "content": "a\n\nb"}]
    assert len(asked([{"role": "assistant", "content": "a"}], question)) == 2


def test_predicates_share_the_rule():
    first, second = (Question.predicate(text).after([{"role": "user", "content": "a"}]) for text in "bc")
    assert first[0]["content"].removesuffix("b") == second[0]["content"].removesuffix("c")


def test_each_scored_answer_is_admitted(live, monkeypatch):
    counts = []
    admit = live.service.admit
    monkeypatch.setattr(live.service, "admit", lambda count: counts.append(count) or admit(count))
    decide(live, [PREDICATE, CHOICE, SCORE])
    assert counts == [2 + 3 + 3]


def test_prompts_share_their_beginning():
    shared = shared_prefix([Prompt([1, 2, 3, 4]), Prompt([1, 2, 5]), Prompt([1, 2])])
    assert shared is not None
    assert shared.token_ids == [1, 2]
    assert shared_prefix([Prompt([1]), Prompt([2])]) is None

"""What clients ask answers to look like, mostly through the real openai client."""

from __future__ import annotations

import json
import re
from enum import StrEnum

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

import vlmserve
from tests.server.live import QUESTION, LiveServer
from tests.server.test_bad_input import refused

SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 9}, "color": {"enum": ["red", "blue"]}},
    "required": ["count", "color"],
    "additionalProperties": False,
}


class Size(StrEnum):
    SMALL = "small"
    LARGE = "large"


class Shape(BaseModel):
    size: Size
    round: bool
    sides: list[int]


@pytest.fixture(scope="module", params=["mock", "real"])
def either(request, live, real):
    return {"mock": live, "real": real}[request.param]


def text_of(server: LiveServer, **fields) -> str:
    answer = server.ask(**{"temperature": 1.2, "max_tokens": 300, **fields})
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


def test_the_client_parses_a_pydantic_model(either):
    for seed in range(2):
        answer = either.openai.chat.completions.parse(
            model="tiny", messages=QUESTION, response_format=Shape, seed=seed, temperature=1.2, max_tokens=400
        )
        assert isinstance(answer.choices[0].message.parsed, Shape)


def test_responses_are_parsed_as_well(either):
    fields = {"model": "tiny", "input": "Which?", "temperature": 1.2, "max_output_tokens": 400}
    parsed = either.openai.responses.parse(text_format=Shape, extra_body={"seed": 2}, **fields)
    assert isinstance(parsed.output_parsed, Shape)
    assert parsed.text.format.type == "json_schema"
    schema = {**Shape.model_json_schema(), "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "shape", "schema": schema}}
    stream = either.openai.responses.create(text=form, stream=True, extra_body={"seed": 2}, **fields)
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert Shape.model_validate_json(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
def test_every_spelling_of_a_schema_holds(either, fields):
    for seed in range(2):
        jsonschema.validate(json.loads(text_of(either, seed=seed, **fields)), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"\d{4}-\d\d"}, r"[0-9]{4}-[0-9]{2}"),
        ({"structured_outputs": {"regex": r"[ab]{3}"}}, r"[ab]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_grammar": 'start: "<" /[a-z]{2}/ ">"'}, "<[a-z]{2}>"),
        ({"grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, "x[0-9]"),
    ],
)
def test_regular_expressions_choices_and_grammars_hold(either, fields, pattern):
    for seed in range(2):
        assert re.fullmatch(pattern, text_of(either, seed=seed, **fields))


def test_completions_obey_too(live):
    answer = live.openai.completions.create(
        model="tiny", prompt="one", max_tokens=50, n=3, extra_body={"guided_choice": ["left", "right"]}
    )
    assert {choice.text for choice in answer.choices} <= {"left", "right"}


def test_stream_equals_the_whole_answer(either):
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, "seed": 5}
    stream = either.openai.chat.completions.create(
        model="tiny", messages=QUESTION, stream=True, temperature=1.2, max_tokens=300, **fields
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text_of(either, **fields)


def test_any_object_comes_with_json_object(live):
    assert isinstance(json.loads(text_of(live, response_format={"type": "json_object"}, seed=1)), dict)


def test_truncated_answer_reports_length_to_the_client(live):
    with pytest.raises(openai.LengthFinishReasonError):
        live.openai.chat.completions.parse(model="tiny", messages=QUESTION, response_format=Shape, max_tokens=3)


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"guided_json": {"type": "foo"}}, "foo", "guided_json"),
        ({"guided_json": "{"}, "not JSON", "guided_json"),
        ({"guided_json": 5}, "JSON schema", "guided_json"),
        ({"guided_json": {"uniqueItems": True}}, "uniqueItems", "guided_json"),
        ({"guided_regex": "("}, "unclosed group", "guided_regex"),
        ({"guided_choice": []}, "empty", "guided_choice"),
        ({"guided_grammar": "start: missing"}, "missing", "guided_grammar"),
        ({"guided_grammar": "\U0006e179 root"}, "GBNF", "guided_grammar"),
        ({"structured_outputs": {}}, "one of", "structured_outputs"),
        ({"structured_outputs": {"regex": "["}}, "regex", "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "not supported", "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "use_beam_search": True, "temperature": 0}, "beam", "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "both", "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "both", "guided_regex"),
        ({"response_format": {"type": "json_schema"}}, "missing", "response_format.json_schema"),
        ({"guided_regex": "a" * 140_000}, "longer", "guided_regex"),
    ],
)
def test_a_broken_grammar_is_refused_by_name(live, fields, message, param):
    refused(live.ask(**fields), 400, message, param=param, code="invalid_request")
    assert text_of(live, guided_choice=["fine"]) == "fine"


def test_strict_schema_is_rejected_and_loose_one_followed(live):
    schema = {"type": "array", "uniqueItems": True, "items": {"const": 1}, "maxItems": 2}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert set(json.loads(text_of(live, response_format=wanted))) <= {1}
    wanted["json_schema"]["strict"] = True
    param = "response_format.json_schema.schema"
    refused(live.ask(response_format=wanted), 400, "uniqueItems", param=param, code="invalid_request")


def test_schema_true_is_the_empty_schema(live):
    texts = []
    for schema in (True, {}):
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        response = live.ask(response_format=wanted, seed=1, max_tokens=30)
        assert response.status_code == 200, response.text
        texts.append(response.json()["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]
    wanted["json_schema"]["schema"] = False
    refused(live.ask(response_format=wanted), 400, "no value fits", param="response_format.json_schema.schema")


LOOSE = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 1}}}, "propertyNames": {}}
FORM = {"type": "json_schema", "name": "x", "schema": LOOSE}
RELAXING_BODIES = {
    "chat/completions": {"messages": QUESTION, "response_format": {"type": "json_schema", "json_schema": FORM}},
    "completions": {"prompt": "a", "response_format": {"type": "json_object", "schema": LOOSE}},
    "responses": {"input": "a", "text": {"format": FORM}},
    "messages": {"messages": QUESTION, "max_tokens": 9, "tools": [{"name": "f", "input_schema": LOOSE}]},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", RELAXING_BODIES)
def test_header_names_keywords_not_enforced(live, path, stream):
    body = {"model": "tiny", "stream": stream, **RELAXING_BODIES[path]}
    for _ in range(2):  # the second grammar comes from the cache
        answer = httpx.post(f"{live.url}/v1/{path}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-vlmserve-not-enforced"] == "not, propertyNames"
    assert "x-vlmserve-not-enforced" not in live.ask(guided_json=SCHEMA).headers


def test_log_names_keywords_not_enforced(live, caplog):
    schema = {**LOOSE, "title": "logged"}
    live.ask(response_format={"type": "json_object", "schema": schema})
    assert "response_format.schema: not enforced: not, propertyNames (strict would reject them)" in caplog.messages


def test_logprobs_accompany_every_constrained_token(real):
    fields = {"logprobs": True, "top_logprobs": 2, "seed": 3, "guided_choice": ["left", "right"]}
    [choice] = real.ask(**fields).json()["choices"]
    told = choice["logprobs"]["content"]
    assert "".join(one["token"] for one in told) == choice["message"]["content"]
    assert choice["message"]["content"] in ("left", "right")


def test_biases_cannot_override_a_grammar(real):
    fields = {"guided_regex": "[ab]{20}", "logit_bias": {"60": 100}, "frequency_penalty": 2, "repetition_penalty": 1.5}
    assert re.fullmatch("[ab]{20}", text_of(real, **fields))


def test_growing_grammar_is_the_clients_fault(either):
    rules = [f'r{n}: "a{n}" r{(n + 1) % 1500}?' for n in range(1500)]
    grammar = "\n".join(["start: " + " | ".join(f"r{n}" for n in range(1500)), *rules])
    response = either.ask(guided_grammar=grammar, max_tokens=20)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "guided_grammar")


def test_json_answers_report_confidence_per_value(either):
    wanted = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA, "strict": True}}
    fields = {"model": "tiny", "messages": QUESTION, "response_format": wanted, "n": 2, "seed": 5, "logprobs": True}
    answer = either.openai.chat.completions.create(max_tokens=300, **fields)
    streamed = [{}, {}]
    for chunk in either.openai.chat.completions.create(max_tokens=300, stream=True, **fields):
        for choice in chunk.choices:
            assert hasattr(choice, "confidence") == (choice.finish_reason is not None)
            if choice.finish_reason is not None:
                streamed[choice.index] = choice.confidence
    for choice in answer.choices:
        assert choice.confidence.keys() == json.loads(choice.message.content).keys()
        assert choice.confidence == pytest.approx(vlmserve.confidence(choice))
        assert choice.confidence == pytest.approx(streamed[choice.index])
    cut = either.openai.chat.completions.create(max_tokens=1, **fields)
    assert [choice.confidence for choice in cut.choices] == [None, None]


def test_responses_match_chat_logprobs_and_confidence(either):
    format = {"type": "json_schema", "name": "shape", "schema": SCHEMA, "strict": True}
    common = {"model": "tiny", "temperature": 0, "top_logprobs": 2}
    wanted = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA, "strict": True}}
    chat = either.openai.chat.completions.create(
        messages=QUESTION, response_format=wanted, logprobs=True, max_tokens=300, **common
    ).choices[0]
    include = ["message.output_text.logprobs"]
    fields = {"input": QUESTION, "text": {"format": format}, "include": include, "max_output_tokens": 300, **common}
    response = either.openai.responses.create(**fields)
    assert response.output_text == chat.message.content
    [part] = response.output[0].content
    assert [token.to_dict() for token in part.logprobs] == [token.to_dict() for token in chat.logprobs.content]
    assert response.confidence == pytest.approx(chat.confidence)
    assert vlmserve.confidence(response) == pytest.approx(chat.confidence)
    assert response.top_logprobs == 2
    pieces = []
    for event in either.openai.responses.create(stream=True, **fields):
        if event.type == "response.output_text.delta":
            pieces += event.logprobs
        elif event.type == "response.output_text.done":
            assert [(one.token, one.logprob) for one in event.logprobs] == [(one.token, one.logprob) for one in pieces]
        elif event.type == "response.completed":
            assert event.response.confidence == response.confidence
            assert event.response.output[0].content == response.output[0].content
    assert "".join(token.token for token in pieces) == chat.message.content
    cut = either.openai.responses.create(**{**fields, "max_output_tokens": 1})
    assert cut.confidence is None


@pytest.mark.parametrize(
    ("fields", "has"),
    [
        ({"response_format": {"type": "json_object"}, "logprobs": True}, True),
        ({"structured_outputs": {"json": SCHEMA}, "logprobs": True}, True),
        ({"response_format": {"type": "json_object"}}, False),
        ({"guided_choice": ["1", "2"], "logprobs": True}, False),
        ({"logprobs": True}, False),
    ],
)
def test_other_answers_have_no_confidence(live, fields, has):
    answer = live.ask(max_tokens=300, **fields)
    assert answer.status_code == 200, answer.text
    assert ("confidence" in answer.json()["choices"][0]) == has


def test_calls_have_no_confidence(live):
    function = {"name": "draw", "parameters": SCHEMA}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    answer = live.ask(logprobs=True, response_format={"type": "json_object"}, **tools)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["message"]["tool_calls"]
    assert choice["confidence"] is None

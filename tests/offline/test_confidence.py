"""The probability of each value of an answer in JSON."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.live import LiveServer
from vlmserve import LLM, Grammar, SamplingParams, confidence
from vlmserve.errors import InvalidRequestError
from vlmserve.models.hub import resolve_model
from vlmserve.offline.outputs import CompletionOutput, Logprob, RequestOutput
from vlmserve.settings.config import BUILT_IN_MODEL


def completion(tokens: list[tuple[str, float]], text: str | None = None) -> CompletionOutput:
    text = "".join(token for token, _ in tokens) if text is None else text
    logprobs = [{number: Logprob(math.log(p), 1, token)} for number, (token, p) in enumerate(tokens)]
    return CompletionOutput(0, text, [*range(len(tokens))], "stop", logprobs=logprobs)


def choice(tokens: list[tuple[bytes, float]]) -> dict:
    content = [{"token": "?", "bytes": list(token), "logprob": math.log(p)} for token, p in tokens]
    text = b"".join(token for token, _ in tokens).decode()
    return {"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": {"content": content}}


def test_a_value_has_the_product_of_its_tokens():
    tokens = [
        ('{"', 0.1), ("colour", 0.1), ('": "', 0.2), ("re", 0.5), ("d", 0.5), ('",', 0.8), (' "n":', 0.1), (" 1", 0.7),
        ("2", 0.5), (', "ok"', 0.1), (":true", 0.9), ("}", 0.3),
    ]  # fmt: skip
    found = confidence(completion(tokens))
    assert found == pytest.approx({"colour": 0.5 * 0.5 * 0.8, "n": 0.7 * 0.5, "ok": 0.9})
    assert confidence(RequestOutput("a", "", [], [completion(tokens)])) == found


def test_values_in_objects_and_arrays_keep_their_places():
    text = '{"a": [1, {"b": "x\\"y"}, [], {}], "c": null, "d": -1.5e3}'
    found = confidence(completion([(character, 0.5) for character in text]))
    rounded = json.loads(json.dumps(found), parse_float=lambda number: round(float(number), 9))
    assert rounded == {"a": [0.5, {"b": 0.5**5}, [], {}], "c": 0.5**4, "d": 0.5**6}


def test_chat_completions_are_read_by_bytes():
    euro = "€".encode()
    tokens = [(b'{"a":"', 0.1), (euro[:1], 0.5), (euro[1:], 0.5), (b'!"}', 0.9)]
    wanted = {"a": pytest.approx(0.5 * 0.5 * 0.9)}
    one = choice(tokens)
    assert confidence(one) == wanted
    assert confidence({"choices": [one, choice([(b"1", 0.1)])]}) == wanted
    assert confidence(SimpleNamespace(model_dump=lambda: {"choices": [one]})) == wanted


def test_split_characters_are_found_without_bytes():
    tokens = [('{"a":"', 0.1), ("\ufffd", 0.5), ("\ufffd", 0.4), ('"', 0.9), (',"b":1', 0.7), ("}", 0.3)]
    assert confidence(completion(tokens, '{"a":"€","b":1}')) == pytest.approx({"a": 0.5 * 0.4 * 0.9, "b": 0.7})


def test_values_after_a_space_are_found():
    assert confidence(completion([(" 1", 0.7), ("2", 0.5)], "12")) == pytest.approx(0.35)


def test_servers_give_the_same_confidences():
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green", "blue"]}, "count": {"type": "integer", "maximum": 9}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    question = [{"role": "user", "content": "What colour is the circle?"}]
    params = SamplingParams(temperature=0, max_tokens=64, logprobs=0, grammar=Grammar.json(schema))
    settings = {"kv_cache_memory": "64MiB", "num_threads": 1}
    [result] = LLM("pixie", **settings).chat(question, params, use_tqdm=False)
    found = confidence(result)
    assert found.keys() == result.outputs[0].parsed.keys()
    assert all(math.exp(result.outputs[0].cumulative_logprob) <= one <= 1 for one in found.values())
    with LiveServer(resolve_model(BUILT_IN_MODEL), engine={"engine": "real", **settings}) as server:
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
        answer = server.openai.chat.completions.create(
            model="tiny", messages=question, temperature=0, max_tokens=64, logprobs=True, response_format=wanted
        )
    assert answer.choices[0].message.content == result.text
    assert confidence(answer) == pytest.approx(found)
    assert confidence(answer.choices[0].model_dump()) == pytest.approx(found)
    assert answer.choices[0].confidence == pytest.approx(found)


WRONG = ["", "{", '{"a"', '{"a":}', '{"a": 1', "[1,]", "1 2", '{"a": "b', "nothing", "[" * 99999]


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_what_is_no_json_is_refused(text):
    with pytest.raises(InvalidRequestError, match="no whole JSON"):
        confidence(completion([(text, 0.5)]))


def test_answers_without_logprobs_are_refused():
    for answer, named in [
        (CompletionOutput(0, "{}", [1], "stop"), "logprobs=0"),
        ({"message": {"content": "{}"}, "logprobs": None}, "logprobs=True"),
        ("{}", "an answer is"),
        (completion([("a", 0.5), ("b", 0.5)], "12"), "do not belong"),
    ]:
        with pytest.raises(InvalidRequestError, match=named):
            confidence(answer)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def leaves(value):
    match value:
        case dict():
            return {name: leaves(inner) for name, inner in value.items()}
        case list():
            return [leaves(inner) for inner in value]
    return 1.0


@given(VALUES, st.booleans(), st.integers(1, 4), st.sampled_from([None, 2]))
def test_each_json_value_has_a_probability(value, ascii_only, size, indent):
    data = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode(errors="surrogatepass")
    data = data.decode(errors="replace").encode()
    value = json.loads(data)
    tokens = [(data[start : start + size], 1.0) for start in range(0, len(data), size)]
    assert confidence(choice(tokens)) == leaves(value)

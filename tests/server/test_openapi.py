"""The OpenAPI document tells the truth: whatever it lets a client send, the answer is one that it describes."""

from __future__ import annotations

import os
from collections import Counter

import httpx
import hypothesis
import jsonschema
import pytest

from tests.server.live import QUESTION, LiveServer
from tests.waiting import wait_until

CASES = int(os.environ.get("OPENAPI_CASES", "100"))
"""Of all operations together."""


@pytest.fixture(scope="module")
def server(folder):
    with LiveServer(folder, server={"storage_url": "memory"}) as server:
        yield server


@pytest.fixture(scope="module")
def schema(server):
    import schemathesis  # a second, which no other test process needs

    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_optional_fields_may_be_null(server) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    components = {"components": document["components"]}
    optional = body["properties"].keys() - set(body["required"])
    assert len(optional) > 20
    for name in optional:
        jsonschema.validate(None, {**components, **body["properties"][name]})
        assert server.ask(max_tokens=1, **({} if name == "max_tokens" else {name: None})).status_code == 200
    nested = document["components"]["schemas"]["StreamOptions"]["properties"]["include_usage"]
    jsonschema.validate(None, {**components, **nested})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(None, {**components, **body["properties"]["messages"]})
    assert server.ask(messages=None).status_code == 400


@pytest.mark.parametrize(
    ("path", "field", "others"),
    [
        ("/v1/chat/completions", "top_logprobs", {"messages": QUESTION, "logprobs": True}),
        ("/v1/completions", "logprobs", {"prompt": "one"}),
    ],
)
def test_logprobs_have_their_maximum(server, path, field, others) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    [most] = [choice["maximum"] for choice in body["properties"][field]["anyOf"] if "maximum" in choice]
    assert most == server.service.max_logprobs
    for count, status in ((most, 200), (most + 1, 400)):
        request = {**others, "max_tokens": 1, field: count}
        assert httpx.post(f"{server.url}{path}", json=request, timeout=60).status_code == status


def test_every_answer_is_one_that_the_document_describes(server, schema) -> None:
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    conformance = [
        not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
        checks.response_headers_conformance, checks.response_schema_conformance,
    ]  # fmt: skip
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 20
    statuses: Counter[int] = Counter()
    # Any string is a path, so that only a body and a query can be wrong.
    modes = {True: [*schemathesis.GenerationMode], False: [schemathesis.GenerationMode.POSITIVE]}
    cases = [(one, mode) for one in operations for mode in modes[bool(one.body) or bool(one.query)]]
    assert len(operations) < len(cases) < 2 * len(operations)
    for operation, mode in cases:

        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        @hypothesis.settings(
            max_examples=max(2, CASES // len(operations) // 2), deadline=None, database=None, derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        def answers_as_described(case) -> None:
            if isinstance(case.body, dict) and "max_tokens" in case.body:
                case.body["max_tokens"] = 4
            response = case.call(timeout=60)
            statuses[response.status_code] += 1
            case.validate_response(response, checks=conformance)

        answers_as_described()
    assert statuses.keys() >= {200, 400, 404}
    assert statuses[200] > 5
    wait_until(lambda: server.client.num_unfinished == 0)


def test_summaries_differ_and_fit_a_line(server) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    found = [one["summary"] for place in paths.values() for one in place.values()]
    assert len(set(found)) == len(found) > 30
    assert max(map(len, found)) <= 90

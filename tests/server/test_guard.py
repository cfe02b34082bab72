"""Keys, limits, origins and the log."""

from __future__ import annotations

import threading
import time

import httpx
import openai
import pytest

from tests.server.live import QUESTION, LiveServer
from tests.server.test_bad_input import data_url, png, with_images
from tests.waiting import wait_until
from vlmserve.cancellation import client
from vlmserve.server.keys import add_key

OPEN = ("/", "/health", "/ping", "/ready", "/version", "/openapi.json", "/docs", "/docs/start.js", "/metrics")
"""Probes, public descriptions and pages, and metrics without --protect-metrics."""
CLOSED = ("/v1/models", "/v1/models/tiny", "/debug/cache", "/v1/nothing")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.jsonl"
    limits = {
        "alice": {},
        "bob": {},
        "narrow": {"max_concurrency": 1},
        "rare": {"requests_per_minute": 2},
        "terse": {"tokens_per_minute": 30},
        "team-a": {"cache_salt": "team"},
        "team-b": {"cache_salt": "team"},
    }
    return path, {name: add_key(path, name, **limit) for name, limit in limits.items()}


@pytest.fixture(scope="module")
def guarded(folder, keys):
    settings = {"api_keys_file": str(keys[0]), "api_key": ("plain",), "enable_debug": True}
    with LiveServer(folder, server=settings, engine={"mock_tpot": 0.01}) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(server: LiveServer, key: str, **fields) -> httpx.Response:
    return server.post({"messages": QUESTION, "max_tokens": 3, **fields}, headers=bearer(key))


@pytest.mark.parametrize("path", OPEN)
def test_open_paths_need_no_key(guarded, path):
    assert httpx.get(guarded.url + path).status_code == 200


@pytest.mark.parametrize("path", CLOSED)
def test_everything_else_needs_one(guarded, path):
    response = httpx.get(guarded.url + path)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["code"], error["param"]) == ("invalid_api_key", None)
    assert "Authorization: Bearer" in error["message"]
    assert httpx.get(guarded.url + path, headers=bearer("plain")).status_code == (404 if "nothing" in path else 200)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer, plain"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer plai"},
        {"Authorization": "Bearer plainx"},
        {"Authorization": "plain"},
        {"Authorization": "Basic cGxhaW46"},
        {"Authorization": "Bearer " + "x" * 10_000},
        {"x-api-key": "wrong"},
        {"x-api-key": ""},
        {"Cookie": "api_key=plain"},
    ],
)
def test_wrong_key_is_401_without_reaching_the_engine(guarded, headers):
    before = guarded.client.stats.steps
    response = guarded.post({"messages": QUESTION}, headers=headers)
    assert response.status_code == 401
    assert "plain" not in response.text
    assert guarded.client.stats.steps == before


@pytest.mark.parametrize(
    "headers", [{"Authorization": "Bearer plain"}, {"authorization": "bearer  plain"}, {"x-api-key": "plain"}]
)
def test_clients_of_both_apis_get_in(guarded, headers):
    assert guarded.post({"messages": QUESTION, "max_tokens": 2}, headers=headers).status_code == 200


def test_error_form_is_that_of_the_api(guarded):
    response = httpx.post(f"{guarded.url}/v1/messages", json={}, headers={"x-api-key": "wrong"})
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"


def test_openai_client_needs_its_key(guarded):
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="plain", max_retries=0)
    assert client.models.list().data[0].id == "tiny"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_large_body_without_a_key_reads_why(guarded):
    for _ in range(3):
        response = guarded.post({"messages": QUESTION, "user": "x" * 3_000_000})
        assert response.status_code == 401


def test_metrics_can_be_closed_too(folder):
    with LiveServer(folder, server={"api_key": ("plain",), "protect_metrics": True}) as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert httpx.get(f"{server.url}/metrics", headers=bearer("plain")).status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_requests_over_the_rate_get_a_retry_time(guarded, keys):
    key = keys[1]["rare"]
    first, second, third = (ask(guarded, key) for _ in range(3))
    assert [response.status_code for response in (first, second, third)] == [200, 200, 429]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert [r.headers["x-ratelimit-remaining-requests"] for r in (first, second, third)] == ["1", "0", "0"]
    assert third.headers["x-ratelimit-reset-requests"].endswith("s")
    assert 25 <= int(third.headers["retry-after"]) <= 30
    error = third.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "rare" in error["message"]
    assert httpx.get(f"{guarded.url}/v1/models", headers=bearer(key)).status_code == 200, "looking costs nothing"
    assert ask(guarded, keys[1]["alice"]).status_code == 200, "others are not concerned"
    with pytest.raises(openai.RateLimitError):
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0).completions.create(
            model="tiny", prompt="hi"
        )


def test_tokens_are_charged_in_streams_and_whole_answers(guarded, keys):
    key = keys[1]["terse"]
    first = ask(guarded, key, max_tokens=1)
    cost = first.json()["usage"]["prompt_tokens"] + 1
    assert first.headers["x-ratelimit-limit-tokens"] == "30"
    account = guarded.service.keys.find(key)
    left = account.buckets["tokens"].level
    assert 30 - cost <= left < 31 - cost
    body = {"messages": QUESTION, "max_tokens": 40, "ignore_eos": True, "stream": True}
    assert ask(guarded, key, **body).text.endswith("data: [DONE]\n\n")
    wait_until(lambda: account.num_running == 0)
    refused = ask(guarded, key)
    assert refused.status_code == 429
    # Nothing but what both requests have cost, less what came back meanwhile.
    assert 2 * cost + 39 - 30 - 5 < int(refused.headers["retry-after"]) * 30 / 60 <= 2 * cost + 39 - 30 + 2


def test_stream_counts_until_it_ends(guarded, keys):
    key = keys[1]["narrow"]
    account = guarded.service.keys.find(key)
    body = {"messages": QUESTION, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{guarded.url}/v1/chat/completions", json=body, headers=bearer(key)) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert account.num_running == 1
        refused = ask(guarded, key)
        assert refused.status_code == 429
        assert "1 running requests" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
    wait_until(lambda: account.num_running == 0)
    assert ask(guarded, key).status_code == 200


def test_a_stream_is_not_held_back(folder):
    settings = {"api_key": ("plain",), "cors_origins": ("https://chat.example",)}
    with LiveServer(folder, engine={"mock_ttft": 60}, server=settings) as server:
        body = {"messages": QUESTION, "stream": True}
        headers = bearer("plain") | {"Origin": "https://chat.example"}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, headers=headers) as stream:
            assert "assistant" in next(stream.iter_lines()), "the first event comes before the first token"


@pytest.fixture
def salts(guarded, monkeypatch):
    """Of what arrives at the engine: the request's and its first image's key."""
    arrived = []
    submit = guarded.client.submit_together

    async def record(requests):
        arrived.extend((request.cache_salt, request.prompt.images[0].image.key) for request in requests)
        return await submit(requests)

    monkeypatch.setattr(guarded.client, "submit_together", record)
    return arrived


def test_every_key_has_a_cache_of_its_own(guarded, keys, salts):
    def one(name: str, **fields) -> tuple[str, bytes]:
        body = {**with_images(data_url(png())), "max_tokens": 2, **fields}
        response = guarded.post(body, headers=bearer(keys[1][name]))
        assert response.status_code == 200
        return salts[-1]

    alice, bob = one("alice"), one("bob")
    assert alice == one("alice")
    kinds = [alice, bob, one("alice", cache_salt="x"), one("bob", cache_salt="x"), one("team-a")]
    assert len({salt for salt, _ in kinds}) == len({image for _, image in kinds}) == 5
    assert one("team-a") == one("team-b")
    assert one("alice", cache_salt=alice[0]) != alice
    assert all(len(salt) == 64 for salt, _ in salts)


def test_without_keys_salts_are_what_requests_say(live, monkeypatch):
    arrived = []
    submit = live.client.submit_together

    async def record(requests):
        arrived.extend(request.cache_salt for request in requests)
        return await submit(requests)

    with monkeypatch.context() as patch:
        patch.setattr(live.client, "submit_together", record)
        assert live.ask().status_code == live.ask(cache_salt="x").status_code == 200
    assert arrived == ["", "x"]


ORIGIN = "https://chat.example"


@pytest.fixture(scope="module")
def with_cors(folder):
    origins = (ORIGIN, "moz-extension://*")
    with LiveServer(folder, server={"api_key": ("plain",), "cors_origins": origins}) as server:
        yield server


def preflight(server: LiveServer, origin: str, **more: str) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
        **more,
    }
    return httpx.options(f"{server.url}/v1/chat/completions", headers=headers)


def test_preflight_of_an_allowed_page_needs_no_key(with_cors):
    response = preflight(with_cors, ORIGIN)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-credentials" not in response.headers


def test_a_preflight_for_a_private_network_is_allowed(with_cors):
    private = {"Access-Control-Request-Private-Network": "true"}
    for origin in (ORIGIN, "moz-extension://6f1c"):
        response = preflight(with_cors, origin, **private)
        assert response.status_code == 200
        assert response.headers["access-control-allow-private-network"] == "true"
        assert response.headers["access-control-allow-origin"] == origin
    assert preflight(with_cors, "https://evil.example", **private).status_code == 400


def test_other_pages_are_not_allowed(with_cors):
    response = preflight(with_cors, "https://evil.example")
    assert response.status_code == 400
    assert "access-control-allow-origin" not in response.headers


def test_an_allowed_page_may_read_answers_and_errors(with_cors):
    body = {"messages": QUESTION, "max_tokens": 2}
    for key, status in (("plain", 200), ("wrong", 401)):
        response = with_cors.post(body, headers={**bearer(key), "Origin": ORIGIN})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in response.headers["access-control-expose-headers"]


def test_by_default_no_page_may_ask(live):
    response = live.ask(max_tokens=1)
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert "access-control-allow-origin" not in preflight(live, ORIGIN).headers


def test_no_response_says_what_serves_it(live):
    for response in (live.ask(max_tokens=1), live.ask(n=0), httpx.get(f"{live.url}/nothing")):
        assert "server" not in response.headers


def test_log_has_ids_and_key_names_without_content(guarded, keys, caplog):
    caplog.set_level("DEBUG")
    headers = bearer(keys[1]["alice"]) | {"x-request-id": "mine-7"}
    body = {"messages": [{"role": "user", "content": "xylophone"}], "max_tokens": 2}
    assert guarded.post(body, headers=headers).headers["x-request-id"] == "mine-7"
    wrong = {"messages": [{"role": "user", "content": [{"type": "xylophone"}]}]}
    assert guarded.post(wrong, headers=headers).status_code == 400
    wait_until(lambda: caplog.text.count("mine-7") >= 2)
    assert "key alice" in caplog.text
    assert "xylophone" not in caplog.text
    assert keys[1]["alice"] not in caplog.text


def test_prompts_are_logged_on_request_without_images(folder, caplog):
    caplog.set_level("INFO")
    with LiveServer(folder, server={"log_prompts": True}) as server:
        image = data_url(png())
        body = with_images(image)
        body["messages"][0]["content"][1]["text"] = "xylophone\nsecond line"
        assert server.post(body, headers={"x-request-id": "mine-8"}).status_code == 200
        source = {"type": "base64", "media_type": "image/png", "data": image.partition(",")[2]}
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": "marimba"}]
        body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": blocks}]}
        assert httpx.post(f"{server.url}/v1/messages", json=body).status_code == 200
        body = {"model": "tiny", "max_output_tokens": 2, "input": "celesta", "instructions": "glockenspiel"}
        assert httpx.post(f"{server.url}/v1/responses", json=body).status_code == 200
    said = [record.getMessage() for record in caplog.records if record.name == "vlmserve.prompts"]
    assert len(said) == 3
    assert "celesta" in said[2]
    assert "glockenspiel" in said[2]
    assert said[0].startswith("mine-8 says ")
    assert "xylophone\\nsecond line" in said[0]
    assert "marimba" in said[1]
    assert image[100:140] not in "".join(said)


def test_path_cannot_inject_a_log_line(live, caplog):
    caplog.set_level("INFO", logger="vlmserve.access")
    httpx.get(f"{live.url}/nothing%0A12:00:00%20GET%20/forged")
    wait_until(lambda: "forged" in caplog.text)
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_many_keys_at_once_stay_apart(guarded, keys):
    statuses: dict[str, list[int]] = {"alice": [], "bob": [], "wrong": []}

    def work(name: str) -> None:
        for _ in range(8):
            statuses[name].append(ask(guarded, keys[1].get(name, "wrong")).status_code)

    threads = [threading.Thread(target=work, args=(name,)) for name in statuses for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert statuses == {"alice": [200] * 16, "bob": [200] * 16, "wrong": [401] * 16}
    # A request ends after its answer has arrived.
    wait_until(lambda: all(guarded.service.keys.find(keys[1][name]).num_running == 0 for name in ("alice", "bob")))


def test_a_new_key_gets_in_without_a_restart(guarded, keys):
    key = add_key(keys[0], f"late-{time.monotonic_ns()}")
    wait_until(lambda: httpx.get(f"{guarded.url}/v1/models", headers=bearer(key)).status_code == 200)


def test_a_refusal_is_a_metric(guarded):
    guarded.post({"messages": QUESTION}, headers=bearer("wrong"))
    page = httpx.get(f"{guarded.url}/metrics").text
    assert 'code="invalid_api_key"' in page


def test_keys_see_nothing_of_each_others_history(folder):
    keys = ["alices", "bobs"]
    with LiveServer(folder, server={"api_key": tuple(keys), "storage_url": "memory"}) as live:
        alice, bob = (live.openai.with_options(api_key=key) for key in keys)
        conversation = alice.conversations.create(items=[{"type": "message", "role": "user", "content": "Mine"}])
        response = alice.responses.create(model="tiny", input="What?", conversation=conversation.id)
        file = alice.files.create(file=("shape.png", png()), purpose="vision")
        assert alice.responses.retrieve(response.id).output_text == response.output_text
        for see in (
            lambda: bob.responses.retrieve(response.id),
            lambda: bob.responses.input_items.list(response.id),
            lambda: bob.responses.create(model="tiny", input="And?", previous_response_id=response.id),
            lambda: bob.responses.create(model="tiny", input="And?", conversation=conversation.id),
            lambda: bob.conversations.retrieve(conversation.id),
            lambda: bob.conversations.items.list(conversation.id),
            lambda: bob.files.retrieve(file.id),
            lambda: bob.files.content(file.id),
            lambda: bob.responses.delete(response.id),
            lambda: bob.conversations.delete(conversation.id),
            lambda: bob.files.delete(file.id),
        ):
            with pytest.raises(openai.NotFoundError):
                see()
        assert bob.files.list().data == []
        assert [own.id for own in alice.files.list().data] == [file.id]
        assert alice.conversations.retrieve(conversation.id).id == conversation.id


@pytest.mark.parametrize(
    ("guards", "headers", "expected"),
    [
        ("guarded", [bearer("plain"), bearer("plain")], 1),
        ("guarded", [bearer("plain"), {"x-forwarded-for": "192.0.2.1", **bearer("plain")}], 1),
        ("guarded", ["alice", "bob", "plain"], 3),
        ("live", [{}, {}], 1),
        ("live", [{"x-forwarded-for": "192.0.2.1"}, {"x-forwarded-for": "192.0.2.2"}, {}], 3),
    ],
    ids=["one key", "one key, two addresses", "keys", "one address", "addresses behind a proxy"],
)
def test_limits_count_keys_or_else_addresses(request, keys, monkeypatch, guards, headers, expected) -> None:
    """Clients behind one address share no limit if they have keys of their own."""
    server, seen = request.getfixturevalue(guards), set()
    conversation = server.service.preparer.conversation

    def spy(*arguments, **options):
        seen.add(client.get())
        return conversation(*arguments, **options)

    monkeypatch.setattr(server.service.preparer, "conversation", spy)
    for one in headers:
        sent = bearer(keys[1].get(one, one)) if isinstance(one, str) else one
        assert server.post({"messages": QUESTION, "max_tokens": 1}, headers=sent).status_code == 200
    assert len(seen) == expected

"""The small routes, and what every response has."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.server.live import LiveServer
from tests.waiting import wait_until
from vlmserve.errors import OverloadedError, UnknownModelError
from vlmserve.server.app import create_app
from vlmserve.server.run import bind, default_sampling
from vlmserve.server.service import Service
from vlmserve.server.web import WebServer
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig
from vlmserve.types import SamplingParams


def get(live: LiveServer, path: str, **headers: str) -> httpx.Response:
    return httpx.get(live.url + path, headers=headers, timeout=60)


def test_the_model_is_listed_and_shown_by_name(live):
    [model] = live.openai.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert live.openai.models.retrieve("tiny") == model


def test_health_and_version(live):
    assert get(live, "/health").json() == {"status": "ok"}
    assert get(live, "/version").json()["version"]


@pytest.mark.parametrize("path", ["/health", "/version", "/v1/models", "/v1/models/tiny", "/v1/models/nothing"])
def test_head_answers_as_get_does_without_a_body(live, path):
    head, whole = httpx.head(live.url + path, timeout=60), get(live, path)
    assert head.status_code == whole.status_code
    assert head.headers["content-length"] == whole.headers["content-length"] == str(len(whole.content))
    assert head.content == b""


def test_request_id_is_returned_or_generated(live):
    assert get(live, "/health", **{"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made_up = {get(live, "/health").headers["x-request-id"] for _ in range(2)}
    assert len(made_up) == 2
    assert len(get(live, "/health", **{"x-request-id": "x" * 500}).headers["x-request-id"]) < 100


def test_log_line_tells_request_and_cost(live, caplog):
    caplog.set_level("INFO", logger="vlmserve.access")
    usage = live.ask(max_tokens=3).json()["usage"]
    wait_until(lambda: "vlmserve.access" in [record.name for record in caplog.records])
    [line] = [record.getMessage() for record in caplog.records if record.name == "vlmserve.access"]
    assert "POST /v1/chat/completions 200" in line
    assert f"{usage['prompt_tokens']} + 3 tokens" in line


def test_the_openapi_document_describes_the_chat_request(live):
    document = get(live, "/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert {"messages", "stream", "temperature"} <= set(schema["properties"])
    references = {part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]}
    assert references <= set(document["components"]["schemas"])


async def test_a_server_that_loads_says_so():
    service = Service(EngineConfig(), MediaConfig(), ServerConfig())
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        answer = await client.post("/v1/chat/completions", json={})
        assert answer.status_code == 503
        assert "still loading pixie" in answer.json()["error"]["message"]
        service.load_progress = "1.50 of 4.00 GB, 150 MB/s, 17 s left"
        assert "pixie (1.50 of 4.00 GB, 150 MB/s, 17 s left)" in (await client.get("/ready")).json()["reason"]
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "pixie"


@pytest.mark.parametrize(
    ("model", "served", "shown"),
    [
        ("pixie", (), "pixie"),
        ("llava-hf/llava-1.5-7b-hf", (), "llava-hf/llava-1.5-7b-hf"),
        ("/data/models/mine/", (), "mine"),
        ("./mine", (), "mine"),
        ("/data/models/mine", "ours", "ours"),
        ("/data/models/mine", ("ours", "yours"), "ours"),
        ("/", (), "/"),
    ],
)
async def test_clients_see_a_name_not_server_paths(model, served, shown):
    service = Service(EngineConfig(model=model), MediaConfig(), ServerConfig(served_model_name=served))
    assert service.model_name == shown


@pytest.mark.parametrize("served", [(), ("ours",)])
async def test_model_answers_to_short_name_and_repository(served):
    service = Service(EngineConfig(model="qwen3-vl:2b"), MediaConfig(), ServerConfig(served_model_name=served))
    for name in (*served, "qwen3-vl:2b", "Qwen/Qwen3-VL-2B-Instruct"):
        service.names.check(name)
    with pytest.raises(UnknownModelError):
        service.names.check("Qwen/Qwen3-VL-4B-Instruct")
    service.close()


async def test_refusal_names_limit_of_answers():
    service = Service(EngineConfig(max_num_seqs=1, max_waiting=1), MediaConfig(), ServerConfig())
    with service.admit(1), pytest.raises(OverloadedError, match=r"1 answers .* wants 2, and 2 are"), service.admit(2):
        pass
    service.close()


async def test_model_answers_to_all_served_names():
    service = Service(EngineConfig(), MediaConfig(), ServerConfig(served_model_name=("a", "b", "a")))
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["a", "b"]
        assert [(await client.get(f"/v1/models/{name}")).json()["id"] for name in ("a", "b", "pixie")] == [
            "a",
            "b",
            "a",
        ]
        refused = await client.get("/v1/models/c")
    assert refused.status_code == 404
    assert "only 'a', 'b'" in refused.json()["error"]["message"]
    service.close()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"do_sample": False, "temperature": 0.7}, SamplingParams(temperature=0.0)),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 40}, SamplingParams(temperature=0.7, top_p=0.9, top_k=40)),
        ({"repetition_penalty": 1.05}, SamplingParams(repetition_penalty=1.05)),
        (
            {"do_sample": False, "repetition_penalty": 1.05, "top_k": 5},
            SamplingParams(temperature=0.0, repetition_penalty=1.05),
        ),
        ({"eos_token_id": 2}, SamplingParams()),
        ({"temperature": -3}, SamplingParams()),
        (None, SamplingParams()),
    ],
)
def test_default_sampling_comes_from_the_checkpoint(tmp_path, settings, expected):
    if settings is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert default_sampling(tmp_path) == expected


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")])
async def test_the_address_that_is_shown_can_be_opened(host, shown):
    config = ServerConfig(host=host, port=0)
    listener = bind(config)
    web = WebServer(create_app(Service(EngineConfig(), MediaConfig(), config)), config, listener)
    assert web.url == f"http://{shown}:{listener.getsockname()[1]}"
    listener.close()

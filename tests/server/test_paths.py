"""Paths that clients get nearly right."""

from __future__ import annotations

import httpx
import pytest

from tests.server.live import QUESTION


def message_at(live, path: str, method: str = "GET") -> str:
    response = httpx.request(method, f"{live.url}{path}")
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert len(message) <= 140
    return message


@pytest.mark.parametrize("path", ["/v1/models/", "//v1/models", "/v1//models//"])
def test_superfluous_slashes_are_ignored(live, path):
    response = httpx.get(f"{live.url}{path}")
    assert response.json()["data"][0]["id"] == "tiny"


def test_superfluous_slashes_are_ignored_in_posts(live):
    body = {"messages": QUESTION, "max_tokens": 1}
    assert httpx.post(f"{live.url}//v1/chat/completions/", json=body).status_code == 200


def test_slashes_do_not_bypass_keys(folder):
    from tests.server.live import LiveServer

    with LiveServer(folder, server={"api_key": ("plain",)}) as server:
        for path in ("//v1/models", "/assets//../v1/models", "//health//..//v1/models", "/assets/../v1/models/"):
            assert httpx.get(httpx.URL(server.url, raw_path=path.encode())).status_code in (401, 404)
        assert httpx.get(f"{server.url}//health/").status_code == 200


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/chat/completions", "use /v1/chat/completions"),
        ("/completions", "use /v1/completions"),
        ("/models/tiny", "use /v1/models/tiny"),
        ("/v1/v1/messages", "use /v1/messages"),
        ("/openai/v1/responses", "use /v1/responses"),
        ("/v1/tokenize", "use /tokenize"),
        ("/proxy/chat/completions", "use /v1/chat/completions"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/mesages", "did you mean /v1/messages?"),
        ("/v1/embedding", "did you mean /v1/embeddings?"),
        ("/v1/moderations", "/openapi.json lists all paths"),
        ("/" + "x" * 5000, "/openapi.json lists all paths"),
    ],
)
def test_unknown_paths_name_the_right_one(live, path, instead):
    assert message_at(live, path).endswith(instead)


def test_unknown_path_of_ollama_gets_its_error(live):
    response = httpx.post(f"{live.url}/api/copy", json={})
    assert (response.status_code, list(response.json())) == (404, ["error"])
    assert "/api/chat" in response.json()["error"]
    assert response.json()["error"].endswith("OpenAI's API is at /v1")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/files", "GET, HEAD, POST"),
        ("PATCH", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
def test_405_names_all_methods(live, method, path, allowed):
    response = httpx.request(method, f"{live.url}{path}")
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    assert response.json()["error"]["message"].endswith(f"use {allowed}")

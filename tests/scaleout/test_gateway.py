"""A gateway answers as one server does."""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import itertools
import json
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest
from PIL import Image

from tests.media.documents_for_tests import exponential, page, pdf_file, square
from tests.scaleout.processes import TOKEN, Cluster
from tests.server.test_attacks import send_chunked
from tests.server.test_batches import content, finished, line, start
from tests.server.test_hostile_grammars import ENDLESS
from tests.server.test_streams import PATHS, num_pings, stream
from tests.waiting import wait_until
from vlmserve.scaleout.door import BEAT
from vlmserve.scaleout.member_messages import GatewayLaunch
from vlmserve.scaleout.settings import GatewayConfig
from vlmserve.server.keys import add_key
from vlmserve.settings.config import ServerConfig

QUESTION = [{"role": "user", "content": "What is in the picture?"}]


def image_url(color: str) -> str:
    file = io.BytesIO()
    Image.new("RGB", (28, 28), color).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def cluster(folder, tmp_path_factory):
    history = tmp_path_factory.mktemp("history") / "history.db"
    limited = tmp_path_factory.mktemp("keys") / "keys.jsonl"
    slow = {"head_timeout": 2, "body_timeout": 2}
    keys = {"api_key": ["alice-key", "bob-key"], "api_keys_file": str(limited), "max_body_bytes": 200_000, **slow}
    key, stored = add_key(limited, "carol", requests_per_minute=2), add_key(limited, "dave")
    with Cluster(folder, 2, server={"storage_url": None, "storage_path": str(history), **slow}, front=keys) as running:
        running.limited_key, running.stored_key, running.keys_file = key, stored, str(limited)
        yield running


@pytest.fixture(scope="module")
def alice(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="alice-key", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(cluster):
    with httpx.Client(base_url=cluster.url, headers={"authorization": "Bearer alice-key"}) as client:
        yield client


def test_answers_come_whole_and_in_pieces(alice):
    whole = alice.chat.completions.create(model="tiny", temperature=0, messages=QUESTION)
    pieces = list(alice.chat.completions.create(model="tiny", temperature=0, messages=QUESTION, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert whole.usage.prompt_tokens > 0


def test_endless_grammars_hold_up_no_other_request(http):
    schema = {"type": "json_schema", "json_schema": {"schema": ENDLESS}}
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 5}
    with ThreadPoolExecutor(1) as pool:
        attack = pool.submit(http.post, "/v1/chat/completions", json={**body, "response_format": schema}, timeout=120)
        answer = http.post("/v1/chat/completions", json={**body, "guided_choice": ["fine"]}, timeout=30)
        assert answer.json()["choices"][0]["message"]["content"] == "fine"
        assert not attack.done()
        assert attack.result().status_code == 400
    assert "make it simpler" in attack.result().text


def test_every_api_is_there(http):
    assert (
        http.post("/v1/completions", json={"prompt": "one", "max_tokens": 3}).json()["usage"]["completion_tokens"] == 3
    )
    assert len(http.post("/v1/embeddings", json={"input": ["one", "two"]}).json()["data"]) == 2
    asked = [{"type": "predicate", "instructions": text} for text in ("It is red", "It is blue")]
    decided = http.post("/v1/decisions", json={"model": "tiny", "input": "a", "questions": asked}).json()["answers"]
    assert all(0 < one["probability"] < 1 for one in decided)
    message = {"model": "tiny", "max_tokens": 3, "messages": QUESTION}
    assert http.post("/v1/messages", json=message).json()["type"] == "message"
    assert (
        http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": QUESTION}).json()["input_tokens"] > 1
    )
    tokens = http.post("/tokenize", json={"prompt": "one two"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "one two"
    assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    card = http.get("/v1/models/tiny").json()
    assert card["max_model_len"] == card["context_length"] == 4096
    assert card["capabilities"] == ["completion", "vision", "tools"]
    anthropic = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert anthropic["data"][0]["capabilities"]["image_input"] == {"supported": True}
    assert http.get("/ping").json() == {"status": "ok"}
    assert http.get("/tokenizer_info").json()["chat_template"]
    assert http.get("/ready").status_code == http.get("/health").status_code == 200
    assert "/v1/responses" in http.get("/openapi.json").json()["paths"]
    assert http.get("/").status_code == 200


def test_response_is_continued_only_by_its_key(cluster, alice):
    first = alice.responses.create(model="tiny", input="one")
    second = alice.responses.create(model="tiny", input="two", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert alice.responses.retrieve(first.id).output_text == first.output_text
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="bob-key", max_retries=0) as bob:
        with pytest.raises(openai.NotFoundError):
            bob.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            bob.responses.create(model="tiny", input="two", previous_response_id=first.id)


def test_files_and_conversations_are_shared_among_workers(alice):
    file = alice.files.create(file=("a.png", base64.b64decode(image_url("red").partition(",")[2])), purpose="vision")
    conversation = alice.conversations.create()
    content = [{"type": "input_image", "file_id": file.id, "detail": "auto"}, {"type": "input_text", "text": "What?"}]
    for _ in range(4):
        alice.responses.create(model="tiny", input=[{"role": "user", "content": content}], conversation=conversation.id)
    assert len(alice.conversations.items.list(conversation.id, limit=20).data) == 8
    assert alice.files.content(file.id).read().startswith(b"\x89PNG")


def test_batches_run_anywhere_and_belong_to_their_key(cluster, alice):
    ids = [start(alice, [line(f"{number}") for number in range(10)]).id for _ in range(3)]
    for id in ids:
        batch = finished(alice, id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 10)
        answers = content(alice, batch.output_file_id)
        assert [one["custom_id"] for one in answers] == [f"{number}" for number in range(10)]
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="bob-key", max_retries=0) as bob:
        with pytest.raises(openai.NotFoundError):
            bob.batches.retrieve(ids[0])
        assert list(bob.batches.list()) == []


def test_the_same_image_goes_to_the_same_worker(cluster, http):
    """Two images in turn, with other questions: each has one worker, unless chance has given both the same."""

    def requests() -> Counter[str]:
        lines = http.get("/metrics").text.splitlines()
        prefix = "vlmserve:gateway_requests_total{worker="
        return Counter({line.split('"')[1]: float(line.split()[-1]) for line in lines if line.startswith(prefix)})

    before = requests()
    for number in range(10):
        content = [
            {"type": "text", "text": f"{number}?"},
            {"type": "image_url", "image_url": {"url": image_url("blue")}},
        ]
        body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    added = requests() - before
    assert max(added.values()) >= 9


def test_image_budgets_and_sizes_pass_the_gateway(http):
    image = {"type": "image_url", "image_url": {"url": image_url("red"), "detail": "low"}}
    size = {"width": 28, "height": 28, "model_width": 28, "model_height": 28, "box": [0, 0, 28, 28], "tokens": 4}
    size |= {"frames": None}

    def ask(part, **fields):
        body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": [part]}], **fields}
        return http.post("/v1/chat/completions", json=body)

    kept = {"max_pixels": 784, "max_tokens": 4}
    for answer in (ask(image | kept), ask(image, mm_processor_kwargs=kept)):
        assert answer.json()["image_sizes"] == [size]
        assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 4
    for answer in (ask(image | {"max_pixels": 783}), ask(image, mm_processor_kwargs={"max_pixels": 783})):
        assert answer.status_code == 400
        assert "max_pixels is 783, but for this model an image has at least 784" in answer.json()["error"]["message"]
    streamed = ask(image | kept, stream=True, stream_options={"include_usage": True}).text.splitlines()
    *_, last = (line.removeprefix("data: ") for line in streamed if line.startswith("data: {"))
    assert json.loads(last)["image_sizes"] == [size]
    part = {"type": "input_image", "image_url": image_url("red"), **kept}
    body = {"model": "tiny", "max_output_tokens": 2, "input": [{"role": "user", "content": [part]}]}
    assert http.post("/v1/responses", json=body).json()["image_sizes"] == [size]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "other", "messages": QUESTION}, 404, "model_not_found"),
        ({"messages": QUESTION, "temperature": -1}, 400, "invalid_request"),
        ({"messages": QUESTION, "temprature": 1}, 400, "invalid_request"),
        ({"messages": [{"role": "user", "content": "x" * 300_000}]}, 413, "body_too_large"),
        ({"messages": [{"role": "user", "content": "red " * 6000}]}, 400, "context_length_exceeded"),
        ([], 400, "invalid_request"),
    ],
)
def test_errors_are_those_of_a_server(http, body, status, code):
    answer = http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_requests_need_a_key(cluster):
    assert httpx.post(f"{cluster.url}/v1/chat/completions", json={"messages": QUESTION}).status_code == 401
    assert httpx.get(f"{cluster.url}/v1/nothing", headers={"x-api-key": "alice-key"}).status_code == 404
    assert httpx.get(f"{cluster.url}/v1/completions", headers={"x-api-key": "alice-key"}).status_code == 405


def test_gateways_say_that_they_lack_ollamas_api(cluster):
    answer = httpx.get(f"{cluster.url}/api/tags", headers={"x-api-key": "alice-key"})
    assert (answer.status_code, "does not have Ollama's API" in answer.text) == (404, True)


def test_a_gateway_reads_compressed_bodies_and_corrects_paths(http):
    body = json.dumps({"model": "tiny", "max_tokens": 1, "messages": QUESTION}).encode()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    packed = gzip.compress(b"\xef\xbb\xbf" + body)
    assert http.post("/v1/chat/completions/", content=packed, headers=headers).status_code == 200
    bomb = gzip.compress(bytes(200_001))
    assert http.post("/v1/chat/completions", content=bomb, headers=headers).status_code == 413
    assert http.get("/v1/models/").json()["data"][0]["id"] == "tiny"
    assert "use /v1/messages" in http.get("/messages").json()["error"]["message"]
    assert http.put("/v1/files").headers["allow"] == "GET, HEAD, POST"


def test_gateways_and_workers_limit_trailers(cluster):
    [worker, url], *_ = cluster.workers.values()
    for process, address in ((cluster.gateway, cluster.url), (worker, url)):
        memory = psutil.Process(process.pid).memory_info
        before = memory().rss
        num_sent, _ = send_chunked(address, "/health", b"0\r\n", b"a: b\r\n" * 170_000)
        assert num_sent < 40
        assert memory().rss - before < 100_000_000


def test_gateways_and_workers_reject_dripping_requests(cluster):
    [_, worker], *_ = cluster.workers.values()
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    authorized = b"Authorization: Bearer alice-key\r\nX-Vlmserve-Cluster: " + TOKEN.encode() + b"\r\n"
    begun = (post + b"X-Slow: ", post + authorized + b"Content-Length: 5000\r\n\r\n")
    with contextlib.ExitStack() as stack:
        open_ones = set()
        for address, data in itertools.product((cluster.url, worker), begun):
            url = urlsplit(address)
            one = stack.enter_context(socket.create_connection((url.hostname, url.port), timeout=0.05))
            one.sendall(data)
            open_ones.add(one)
        deadline = time.monotonic() + 40
        while open_ones:
            assert time.monotonic() < deadline
            for one in list(open_ones):
                with contextlib.suppress(TimeoutError):
                    try:
                        one.sendall(b" ")
                        answer = one.recv(65536)
                    except ConnectionError:
                        answer = b""
                    assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")
                    open_ones.remove(one)
    assert httpx.get(f"{cluster.url}/health").status_code == 200


def test_workers_answer_gateways_alone(cluster):
    for _, url in cluster.workers.values():
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_a_gateway")
        wrong = {"x-vlmserve-cluster": "guess", "x-vlmserve-owner": "key api-key-1"}
        assert httpx.get(f"{url}/v1/files", headers=wrong).status_code == 403
        assert httpx.get(f"{url}/health").status_code == 200


def test_metrics_have_the_workers_names(cluster, http):
    page = http.get("/metrics").text
    for name in cluster.workers:
        assert f'vlmserve:num_requests_running{{worker="{name}",' in page
    names = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_the_live_view_has_all_workers(cluster, http):
    live = {}

    def is_whole() -> bool:
        """What takes a worker long to tell is missing."""
        live.update(http.get("/live").json())
        return all(one["engine"] and one["blocks"] for one in (live, *live["workers"].values()))

    wait_until(is_whole)
    assert live["workers"].keys() == cluster.workers.keys()
    assert live["engine"]["kv_blocks_total"] == sum(
        one["engine"]["kv_blocks_total"] for one in live["workers"].values()
    )
    assert live["blocks"]["num_blocks"] == sum(one["blocks"]["num_blocks"] for one in live["workers"].values())


def test_a_client_that_leaves_ends_its_answer(folder):
    """The answer would take minutes."""
    body = {"model": "tiny", "messages": QUESTION, "stream": True, "max_tokens": 3000, "ignore_eos": True}
    with Cluster(folder, 1, engine={"mock_tpot": 0.1}) as running, httpx.Client(base_url=running.url) as http:

        def num_running():
            return http.get("/live").json()["engine"]["num_running"]

        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            next(answer.iter_raw())
            wait_until(num_running, timeout=30)
        wait_until(lambda: not num_running(), timeout=30)


def test_limits_of_a_key_hold(cluster):
    headers = {"authorization": f"Bearer {cluster.limited_key}"}
    answers = [
        httpx.post(f"{cluster.url}/v1/chat/completions", json={"messages": QUESTION}, headers=headers) for _ in range(3)
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[-1].headers["retry-after"]
    assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded"


def test_gateway_streams_ping_before_the_first_token(folder):
    pings = {"stream_ping_interval": 0.1}
    with Cluster(folder, 1, engine={"mock_ttft": 0.6}, server=pings, front=pings) as running:
        for path, fields in PATHS.items():
            text = stream(running, path, **fields)
            assert num_pings(text, path) >= 3
            assert "data: {" in text
        assert httpx.post(f"{running.url}/v1/completions", json={"prompt": 1, "stream": True}).status_code == 400


def test_a_gateway_without_workers_says_so(folder):
    with Cluster(folder, 0) as cluster:
        answer = httpx.post(f"{cluster.url}/v1/chat/completions", json={"messages": QUESTION})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert answer.headers["retry-after"]
        assert httpx.get(f"{cluster.url}/ready").status_code == 503
        assert httpx.get(f"{cluster.url}/health").status_code == 200


def test_conversation_follows_another_gateways_choice(cluster):
    """The other one sends to each worker in turn, as no gateway would by what it sees in the requests. Prompts
    are long: mock engines take so little time for short ones that an idle worker would be worth more than a cache."""
    server, headers = ServerConfig(port=0, api_keys_file=cluster.keys_file), {"x-api-key": cluster.stored_key}
    settings = server.model_dump_json(), GatewayConfig(policy="round-robin").model_dump_json()
    other = cluster.start(GatewayLaunch(TOKEN, *settings, takes_over=False))
    other.set_workers([url for _, url in cluster.workers.values()])
    with (
        httpx.Client(base_url=other.wait_until_up(), headers=headers) as elsewhere,
        httpx.Client(base_url=cluster.url, headers=headers) as here,
    ):
        wait_until(lambda: elsewhere.get("/metrics").text.count('gateway_worker_up{worker="worker-') >= 2)

        def worker(client: httpx.Client, conversation: int, *later: str) -> str:
            texts = (f"conversation {conversation} " * 200, *later)
            messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
            answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
            assert answer.status_code == 200
            return answer.json()["id"].partition("-")[2][:8]

        began = [worker(elsewhere, number) for number in range(8)]
        assert len(set(began)) == 2
        time.sleep(2 * BEAT)
        assert [worker(here, number, "an answer", "and then?") for number in range(8)] == began


def test_hostile_documents_block_no_other_client(folder):
    part = {"type": "file", "file": {"file_data": base64.b64encode(exponential()).decode()}}
    media = {"document_timeout": 3, "media_processes": 2, "client_media_processes": 1}
    keys = {"api_key": ["alice-key", "bob-key"]}
    honest = {"type": "file", "file": {"file_data": base64.b64encode(pdf_file([page(square("1 0 0"))])).decode()}}
    with Cluster(folder, 1, media=media, front=keys) as running, ThreadPoolExecutor(6) as threads:

        def ask(key: str, part: dict, salt: str) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": [part]}], "cache_salt": salt, "max_tokens": 1}
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(f"{running.url}/v1/chat/completions", json=body, headers=headers, timeout=120)

        assert ask("bob-key", honest, "first").status_code == 200
        hostile = [threads.submit(ask, "alice-key", part, str(number)) for number in range(6)]
        wait_until(lambda: any(one.done() for one in hostile))
        assert ask("bob-key", honest, "during").status_code == 200
        assert httpx.get(f"{running.url}/health", timeout=20).status_code == 200
        assert not all(one.done() for one in hostile)
        for one in hostile:
            assert (one.result().status_code, one.result().json()["error"]["code"]) == (400, "document_too_large")

"""Traces as a collector gets them, from real servers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from tests.checkpoints import make_llava
from tests.server.collector import Collector
from tests.server.live import QUESTION, LiveServer, stream_lines
from tests.server.test_chat import about, data_url
from tests.waiting import wait_until
from vlmserve.errors import ConfigurationError
from vlmserve.server.service import open_tracing

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
SECRET = "nobody may read this 4711"


@pytest.fixture(scope="module")
def only_collector():
    with pytest.MonkeyPatch.context() as patch, Collector() as running:
        # Batches leave soon, so that tests need not wait for them.
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        yield running


@pytest.fixture
def collector(only_collector):
    """The collector of the module, without what other tests have sent."""
    only_collector.forget()
    return only_collector


@pytest.fixture(scope="module")
def traced(folder, only_collector):
    with LiveServer(folder, server={"otlp_traces_endpoint": only_collector.url}) as server:
        yield server


def the_request(collector: Collector, number: int = 0):
    wait_until(lambda: len(collector.requests()) > number)
    return collector.requests()[number]


def test_request_span_has_settings_but_no_content(traced, collector):
    before = time.time_ns()
    response = traced.ask(
        messages=[{"role": "user", "content": SECRET}], max_tokens=5, ignore_eos=True, temperature=0.5, top_p=0.75,
        top_k=9, seed=7, presence_penalty=0.25, stop=[SECRET], user=SECRET,
    )  # fmt: skip
    span = the_request(collector)
    answer = response.json()
    assert span.name == "chat tiny"
    assert before <= span.start <= span.end <= time.time_ns()
    assert span.status == ""
    ttft = span.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < ttft <= (span.end - span.start) / 1e9
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "vlmserve.request_id": response.headers["x-request-id"],
        "vlmserve.images": 0,
        "vlmserve.images_encoded": 0,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vlmserve",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.top_k": 9,
        "gen_ai.request.seed": 7,
        "gen_ai.request.presence_penalty": 0.25,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    said = answer["choices"][0]["message"]["content"].encode()
    assert not [body for body in collector.bodies if SECRET.encode() in body or said in body]


def test_its_parts_follow_one_another_within_it(traced, collector):
    traced.ask(max_tokens=5, ignore_eos=True)
    span = the_request(collector)
    media, queue, prefill, decode = parts = collector.parts(span)
    assert [part.name for part in parts] == ["media", "queue", "prefill", "decode"]
    assert {part.trace_id for part in parts} == {span.trace_id}
    assert span.start <= media.start <= media.end <= queue.start
    # Nanoseconds since 1970 are more than a float can tell apart.
    assert queue.end == pytest.approx(prefill.start, abs=2000)
    assert prefill.end == pytest.approx(decode.start, abs=2000)
    assert decode.end <= span.end


def test_each_of_n_answers_has_own_spans(traced, collector):
    traced.ask(n=2, max_tokens=3, ignore_eos=True)
    span = the_request(collector)
    assert span.attributes["gen_ai.request.choice.count"] == 2
    assert span.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    decoded = [part.attributes["vlmserve.answer"] for part in collector.parts(span) if part.name == "decode"]
    assert sorted(decoded) == [0, 1]


def test_images_have_their_time_within_prefill(collector, tmp_path):
    folder = make_llava(tmp_path, vision={"image_size": 28, "patch_size": 14})
    engine = {"engine": "real", "dtype": "float32", "device": "cpu", "kv_cache_memory": "4MiB", "num_threads": 1}
    with LiveServer(folder, engine=engine, server={"otlp_traces_endpoint": collector.url}) as server:
        server.ask(messages=about(data_url("red")), max_tokens=2, ignore_eos=True).raise_for_status()
        span = the_request(collector)
        [vision] = [part for part in collector.parts(span) if part.name == "vision"]
        [prefill] = [part for part in collector.parts(span) if part.name == "prefill"]
    assert prefill.start <= vision.start < vision.end <= prefill.end
    assert (span.attributes["vlmserve.images"], span.attributes["vlmserve.images_encoded"]) == (1, 1)


def test_request_continues_the_named_trace(traced, collector):
    traced.post({"model": "tiny", "messages": QUESTION, "max_tokens": 1}, headers={"traceparent": TRACEPARENT})
    span = the_request(collector)
    assert (span.trace_id, span.parent_id) == (TRACE_ID, PARENT_ID)
    traced.post({"model": "tiny", "messages": QUESTION, "max_tokens": 1}, headers={"traceparent": "nonsense"})
    other = the_request(collector, 1)
    assert other.trace_id != TRACE_ID
    assert other.parent_id == ""


def test_unrecorded_callers_trace_is_not_recorded(traced, collector):
    unsampled = TRACEPARENT.removesuffix("01") + "00"
    traced.post({"model": "tiny", "messages": QUESTION, "max_tokens": 1}, headers={"traceparent": unsampled})
    traced.ask(max_tokens=1)
    assert the_request(collector).trace_id != TRACE_ID
    assert {span.trace_id for span in collector.spans} == {the_request(collector).trace_id}


def test_completions_and_other_posts_are_named(traced, collector):
    httpx.post(f"{traced.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=60)
    assert the_request(collector).name == "text_completion tiny"
    httpx.post(f"{traced.url}/tokenize", json={"prompt": "a"}, timeout=60)
    assert the_request(collector, 1).name == "POST /tokenize"
    httpx.post(f"{traced.url}/nowhere/{SECRET}", timeout=60)
    assert the_request(collector, 2).name == "POST"
    httpx.get(f"{traced.url}/v1/models", timeout=60)
    httpx.get(f"{traced.url}/metrics", timeout=60)
    traced.ask(max_tokens=1)
    assert the_request(collector, 3).name == "chat tiny"


def test_client_error_span_has_a_type(traced, collector):
    traced.ask(temperature=-1)
    span = the_request(collector)
    assert (span.name, span.status) == ("POST /v1/chat/completions", "")
    assert (span.attributes["error.type"], span.attributes["http.response.status_code"]) == ("invalid_request", 400)
    traced.ask(messages=about("data:image/png;base64,AAAA"))
    broken = the_request(collector, 1)
    assert [part.name for part in collector.parts(broken)] == ["media"], "preparing took its time, too"


def test_leaving_client_ends_its_span_with_error(folder, collector):
    settings = {"otlp_traces_endpoint": collector.url, "shutdown_grace": 0.2}
    with LiveServer(folder, engine={"mock_tpot": 0.02}, server=settings) as server:
        with stream_lines(server.url, {"messages": QUESTION, "ignore_eos": True, "max_tokens": 400}) as lines:
            next(lines)
            wait_until(lambda: server.client.stats.generation_tokens >= 2)
        span = the_request(collector)
    assert (span.status, span.attributes["error.type"]) == ("error", "client_left")
    assert "gen_ai.response.finish_reasons" not in span.attributes
    assert span.attributes["gen_ai.usage.output_tokens"] >= 1
    assert [part.name for part in collector.parts(span)] == ["media", "queue", "prefill", "decode"]


def test_abandoned_stream_ends_its_span_with_error(folder, collector):
    settings = {"otlp_traces_endpoint": collector.url}
    with LiveServer(folder, engine={"mock_tpot": 0.02}, server=settings, process=True) as server:
        with stream_lines(server.url, {"messages": QUESTION, "ignore_eos": True, "max_tokens": 400}) as lines:
            next(lines)
            wait_until(lambda: server.client.stats.num_running == 1)
            os.kill(server.client.process.pid, signal.SIGKILL)
            assert any("engine_dead" in line for line in lines)
        span = the_request(collector)
    assert (span.attributes["http.response.status_code"], span.attributes["error.type"]) == (200, "engine_dead")
    assert span.status == "error"


def test_what_opentelemetry_lets_users_set_counts(folder, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "eyes")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with LiveServer(folder, server={"otlp_traces_endpoint": f"{collector.url}/of/ours"}) as server:
        server.ask(max_tokens=1)
        span = the_request(collector)
    assert collector.headers[0]["authorization"] == "Bearer abc"
    assert collector.headers[0]["content-type"] == "application/x-protobuf"
    assert set(collector.paths) == {"/of/ours"}
    assert (span.resource["service.name"], span.resource["deployment.environment"]) == ("eyes", "test")


def test_pending_spans_are_sent_at_shutdown(folder, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    with Collector() as collector:
        with LiveServer(folder, server={"otlp_traces_endpoint": collector.url}) as server:
            server.ask(max_tokens=1)
            assert collector.spans == []
        assert [span.name for span in collector.requests()] == ["chat tiny"]
        assert collector.paths == ["/v1/traces"], "which is where collectors expect them"
        assert collector.requests()[0].resource["service.name"] == "vlmserve"


def test_absent_collector_costs_one_warning_until_back(folder, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.05")
    caplog.set_level("INFO", logger="vlmserve.server.tracing")
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "INFO")
                and record.name.startswith(("vlmserve.server.tracing", "opentelemetry"))]  # fmt: skip

    with LiveServer(folder, server={"otlp_traces_endpoint": f"http://127.0.0.1:{port}"}) as server:
        for _ in range(3):
            assert server.ask(max_tokens=1).status_code == 200
        wait_until(lambda: len(said()) > 0)
        assert server.ask(max_tokens=1).status_code == 200
        assert len(said()) == 1
        with Collector(port) as collector:
            server.ask(max_tokens=1)
            the_request(collector)
            wait_until(lambda: len(said()) > 1)
    away, back, *_ = said()
    assert away.startswith(f"Traces do not arrive at http://127.0.0.1:{port}/v1/traces")
    assert back.startswith("Traces arrive")


def test_without_the_flag_nothing_of_opentelemetry_is_loaded(folder):
    program = (
        "import sys\n"
        "from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig\n"
        "from vlmserve.server.app import create_app\n"
        "from vlmserve.server.service import Service\n"
        "create_app(Service(EngineConfig(), MediaConfig(), ServerConfig(storage_url='none')))\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_packages_error_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "vlmserve.server.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'vlmserve\[otel\]'"):
        open_tracing("http://localhost:4318")


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "/v1/traces", ""])
def test_what_is_no_url_is_refused(endpoint):
    with pytest.raises(ConfigurationError, match="http://localhost:4318/v1/traces"):
        open_tracing(endpoint)

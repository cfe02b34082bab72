"""What /metrics says after real requests, and what the documents say about it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from tests.server.live import QUESTION, LiveServer, stream_lines
from tests.server.nvml import UUID, FakeNvml
from tests.server.test_chat import about, data_url
from tests.waiting import wait_until
from vlmserve.media.cache import ImageCacheStats
from vlmserve.server.collectors import Distribution, RunningEngine
from vlmserve.server.metrics import AnswerRecord, ServerMetrics
from vlmserve.server.service import Service
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig
from vlmserve.types import EngineOutput, EngineStats, ModelInfo, RequestTimings

STATS = EngineStats(**{field: 1000 + i for i, field in enumerate(EngineStats.__struct_fields__)})
INFO = ModelInfo("tiny", "llava", 128, 100, "float32", "cpu", 10, 127, 1000, True)
HERE = 0
"""Stands for the test's process, which is forked from the one that imports this file."""
ENGINE = RunningEngine(HERE, INFO, 2.5)
ON_GPU = RunningEngine(HERE, msgspec.structs.replace(INFO, device="cuda:0", gpu_uuid=UUID), 2.5)
IMAGES = ImageCacheStats(num_images=3, used_bytes=300, capacity_bytes=1000, hits=7, misses=5)
OF_COMPLETE_ANSWERS = (
    "e2e_request_latency_seconds",
    "request_time_per_output_token_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_queue_time_seconds",
    "request_vision_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_kv_computed_tokens",
)


def metrics_of(
    stats: EngineStats | None = STATS,
    images=IMAGES,
    engine: RunningEngine | None = ENGINE,
    cache_dtype: str = "auto",
) -> ServerMetrics:
    if engine is not None and engine.pid == HERE:
        engine = engine._replace(pid=os.getpid())
    return ServerMetrics(
        "tiny",
        engine_stats=lambda: stats,
        image_cache_stats=lambda: images,
        engine=lambda: engine,
        cache_config={"block_size": 16, "cache_dtype": cache_dtype, "enable_prefix_caching": True},
    )


def values_of(page: str) -> Counter[str]:
    """Every sample's value, under its name without prefix, with the labels other than model_name and le behind it."""
    values: Counter[str] = Counter()
    for family in parse(page):
        for sample in family.samples:
            if "le" not in sample.labels:
                assert sample.labels["model_name"] == "tiny"
                labels = [value for label, value in sample.labels.items() if label != "model_name"]
                values["/".join([sample.name.removeprefix("vlmserve:"), *labels])] = sample.value
    return values


def scrape(server: LiveServer) -> Counter[str]:
    response = httpx.get(f"{server.url}/metrics", timeout=60)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return values_of(response.text)


def since(server: LiveServer, before: Counter[str]) -> Counter[str]:
    after = scrape(server)
    after.subtract(before)
    return after


def test_requests_are_counted_with_their_tokens_and_images(live):
    before = scrape(live)
    usages = [live.ask(max_tokens=3, ignore_eos=True).json()["usage"] for _ in range(2)]
    seen = live.ask(messages=about(data_url("red"), data_url("blue")), max_tokens=4, ignore_eos=True).json()["usage"]
    grown = since(live, before)
    prompt_tokens = sum(usage["prompt_tokens"] for usage in (*usages, seen))
    assert grown["prompt_tokens_total"] == grown["request_prompt_tokens_sum"] == prompt_tokens
    assert grown["generation_tokens_total"] == grown["request_generation_tokens_sum"] == 3 + 3 + 4
    assert grown["images_encoded_total"] == 2
    assert grown["request_success_total/length"] == 3
    assert sum(grown[f"request_success_total/{other}"] for other in ("stop", "abort", "error")) == 0
    assert {name: grown[f"{name}_count"] for name in OF_COMPLETE_ANSWERS} == dict.fromkeys(OF_COMPLETE_ANSWERS, 3)
    assert grown["time_to_first_token_seconds_count"] == 3
    assert grown["inter_token_latency_seconds_count"] <= 2 + 2 + 3
    assert grown["request_media_time_seconds_count"] == 3
    assert grown["steps_total"] > 0


def test_the_times_of_a_request_add_up(slow):
    before = scrape(slow)
    slow.ask(max_tokens=10, ignore_eos=True)
    grown = since(slow, before)
    whole = grown["e2e_request_latency_seconds_sum"]
    parts = [grown[f"request_{part}_time_seconds_sum"] for part in ("media", "queue", "prefill", "decode")]
    assert all(part >= 0 for part in parts)
    assert sum(parts) <= whole
    assert grown["request_decode_time_seconds_sum"] >= 5 * 0.02
    assert grown["time_to_first_token_seconds_sum"] + grown["inter_token_latency_seconds_sum"] <= whole
    assert 0 < grown["request_time_per_output_token_seconds_sum"] <= whole / 9


def test_each_of_n_answers_counts_with_one_preparation(live):
    before = scrape(live)
    live.ask(n=3, max_tokens=2, ignore_eos=True)
    grown = since(live, before)
    assert grown["request_success_total/length"] == grown["e2e_request_latency_seconds_count"] == 3
    assert grown["request_media_time_seconds_count"] == 1


def test_stop_string_answer_counts_as_stopped(live):
    text = live.ask(max_tokens=20).json()["choices"][0]["message"]["content"]
    before = scrape(live)
    live.ask(max_tokens=20, stop=[text.split()[1]])
    grown = since(live, before)
    assert grown["request_success_total/stop"] == 1
    assert grown["request_success_total/abort"] == 0
    assert {name: grown[f"{name}_count"] for name in OF_COMPLETE_ANSWERS} == dict.fromkeys(OF_COMPLETE_ANSWERS, 1)


def test_leaving_client_counts_as_an_abort(slow):
    before = scrape(slow)
    with stream_lines(slow.url, {"messages": QUESTION, "ignore_eos": True, "max_tokens": 400, "n": 2}) as lines:
        next(lines)
        wait_until(lambda: slow.client.stats.num_running == 2)
        assert scrape(slow)["num_requests_running"] == 2
    wait_until(lambda: slow.service.num_answers == 0)
    grown = since(slow, before)
    assert grown["request_success_total/abort"] == 2
    assert [grown[f"{name}_count"] for name in OF_COMPLETE_ANSWERS] == [0] * len(OF_COMPLETE_ANSWERS)


def test_refused_requests_count_by_their_errors_code(live):
    before = scrape(live)
    assert live.ask(temperature=-1).status_code == 400
    assert live.ask(model="another").status_code == 404
    assert live.ask(messages=[{"role": "user", "content": "much " * 1000}]).status_code == 400
    grown = since(live, before)
    assert grown["request_errors_total/invalid_request"] == 1
    assert grown["request_errors_total/model_not_found"] == 1
    assert grown["request_errors_total/context_length_exceeded"] == 1
    assert grown["request_success_total/error"] == 0


def check_memory_and_processor_time(live: LiveServer) -> None:
    """Those of both processes are there."""
    values = scrape(live)
    for process, pid in (("server", os.getpid()), ("engine", live.client.process.pid)):
        rss = psutil.Process(pid).memory_info().rss
        assert values[f"process_resident_memory_bytes/{process}"] == pytest.approx(rss, rel=0.2)
        assert values[f"process_cpu_seconds_total/{process}"] > 0


def test_dying_engine_counts_its_requests_as_errors(folder):
    with LiveServer(folder, engine={"mock_tpot": 0.02}, process=True) as server:
        with stream_lines(server.url, {"messages": QUESTION, "ignore_eos": True, "max_tokens": 400}) as lines:
            next(lines)
            wait_until(lambda: server.client.stats.num_running == 1)
            check_memory_and_processor_time(server)
            os.kill(server.client.process.pid, signal.SIGKILL)
            assert any("engine_dead" in line for line in lines)
        wait_until(lambda: server.service.num_answers == 0)
        assert server.ask().status_code == 503
        values = scrape(server)
    assert values["request_success_total/error"] == 1
    assert values["request_errors_total/engine_dead"] == 1
    assert "num_requests_running" not in values
    assert "process_resident_memory_bytes/engine" not in values


def test_unreported_requests_are_waiting(live_waiting):
    with stream_lines(live_waiting.url, {"messages": QUESTION}):
        wait_until(lambda: live_waiting.client.num_unfinished == 1)
        values = scrape(live_waiting)
        assert values["num_requests_running"] + values["num_requests_waiting"] == 1


async def test_loading_server_has_metrics_but_no_engines():
    service = Service(EngineConfig(model="tiny"), MediaConfig(), ServerConfig())
    page, _ = service.metrics.exposition()
    values = values_of(page.decode())
    assert values["request_success_total/stop"] == 0
    assert "num_requests_running" not in values
    service.close()


async def test_server_shows_its_image_cache():
    service = Service(EngineConfig(model="tiny"), MediaConfig(), ServerConfig())
    client = SimpleNamespace(
        alive=True,
        stats=STATS,
        num_unfinished=0,
        process=SimpleNamespace(pid=os.getpid()),
        info=INFO,
        load_seconds=2.5,
        heartbeat=SimpleNamespace(silence=0.0),
        on_step=None,
    )
    service.open(client, SimpleNamespace(media=SimpleNamespace(image_cache=SimpleNamespace(stats=lambda: IMAGES))))
    values = values_of(service.metrics.exposition()[0].decode())
    assert (values["mm_cache_queries_total"], values["mm_cache_hits_total"]) == (12, 7)
    assert values["steps_total"] == STATS.steps
    service.close()


def test_every_statistic_of_the_engine_is_a_metric():
    values = values_of(metrics_of().exposition()[0].decode())
    assert set(msgspec.structs.asdict(STATS).values()) <= set(values.values())
    assert values["kv_cache_usage_perc"] == pytest.approx(STATS.kv_blocks_used / STATS.kv_blocks_total)
    assert values["num_preemptions_total"] == STATS.preemptions
    assert values["prefix_cache_hits_total"] == STATS.prefix_cached_tokens
    assert values["prefix_cache_queries_total"] == STATS.prefix_queried_tokens


def test_an_engine_without_blocks_uses_none_of_them():
    assert values_of(metrics_of(EngineStats()).exposition()[0].decode())["kv_cache_usage_perc"] == 0


def test_image_cache_metrics_exist_with_a_cache():
    values = values_of(metrics_of().exposition()[0].decode())
    assert (values["mm_cache_queries_total"], values["mm_cache_hits_total"]) == (12, 7)
    assert (values["mm_cache_used_bytes"], values["mm_cache_bytes"], values["mm_cache_images"]) == (300, 1000, 3)
    assert "mm_cache_queries_total" not in values_of(metrics_of(images=None).exposition()[0].decode())


def test_step_counts_tokens_time_and_image_time():
    metrics = metrics_of()
    start = EngineStats(steps=4, prompt_tokens=100, generation_tokens=50, step_seconds=2.0, vision_seconds=1.0)
    plain = msgspec.structs.replace(start, steps=5, generation_tokens=58, step_seconds=2.25)
    seeing = msgspec.structs.replace(
        plain, steps=6, prompt_tokens=300, images_encoded=2, step_seconds=3.25, vision_seconds=1.5
    )
    metrics.count_step(start, plain)
    metrics.count_step(plain, seeing)
    values = values_of(metrics.exposition()[0].decode())
    assert (values["iteration_tokens_total_count"], values["iteration_tokens_total_sum"]) == (2, 8 + 200)
    assert (values["step_time_seconds_count"], values["step_time_seconds_sum"]) == (2, 1.25)
    assert (values["step_vision_time_seconds_count"], values["step_vision_time_seconds_sum"]) == (1, 0.5)


def test_every_step_of_an_engine_counts(live):
    before = scrape(live)
    live.ask(max_tokens=7, ignore_eos=True)
    grown = since(live, before)
    assert grown["iteration_tokens_total_count"] == grown["step_time_seconds_count"] == grown["steps_total"]
    assert grown["iteration_tokens_total_sum"] == grown["prompt_tokens_total"] + grown["generation_tokens_total"]
    assert grown["step_time_seconds_sum"] == pytest.approx(grown["step_seconds_total"])


def test_what_requests_ask_for_counts_once_for_each(live):
    before = scrape(live)
    live.ask(n=3, max_tokens=2)
    live.ask(max_tokens=20)
    grown = since(live, before)
    assert (grown["request_params_n_count"], grown["request_params_n_sum"]) == (2, 3 + 1)
    assert (grown["request_params_max_tokens_count"], grown["request_params_max_tokens_sum"]) == (2, 2 + 20)


def test_cached_prompt_tokens_are_not_computed_tokens():
    metrics = metrics_of()
    record = AnswerRecord(metrics, arrived=0.0, num_prompt_tokens=10)
    record.output(EngineOutput("a", [1], "length", cached_tokens=8))
    record.end("length")
    values = values_of(metrics.exposition()[0].decode())
    assert (values["request_prompt_tokens_sum"], values["request_prefill_kv_computed_tokens_sum"]) == (10, 2)


def test_server_reports_loaded_model_and_load_time(live):
    page = httpx.get(f"{live.url}/metrics", timeout=60).text
    labels = {
        family.name.removeprefix("vlmserve:"): sample.labels
        for family in parse(page)
        for sample in family.samples
        if family.name.endswith("_info")
    }
    assert labels["model_info"]["architecture"] == "mock"
    total = int(values_of(page)["kv_cache_blocks"])
    assert total > 0
    assert labels["cache_config_info"]["num_gpu_blocks"] == str(total)
    assert (labels["cache_config_info"]["block_size"], labels["cache_config_info"]["enable_prefix_caching"]) == (
        "16",
        "true",
    )
    assert scrape(live)["model_load_time_seconds"] == live.client.load_seconds > 0


@pytest.mark.parametrize(("cache_dtype", "shown"), [("auto", ENGINE.info.dtype), ("int8", "int8")])
def test_cache_type_defaults_to_the_models(cache_dtype, shown):
    page = metrics_of(cache_dtype=cache_dtype).exposition()[0].decode()
    [sample] = [s for family in parse(page) for s in family.samples if s.name == "vlmserve:cache_config_info"]
    assert sample.labels["cache_dtype"] == shown


def test_gpu_blocks_count_tokens_of_all_layers():
    """A block of the cache holds tokens of some layers in models with sliding windows."""
    info = msgspec.structs.replace(INFO, kv_cache_tokens=48)
    page = metrics_of(engine=RunningEngine(HERE, info, 2.5)).exposition()[0].decode()
    [sample] = [s for family in parse(page) for s in family.samples if s.name == "vlmserve:cache_config_info"]
    assert sample.labels["num_gpu_blocks"] == "3" != str(STATS.kv_blocks_total)


async def test_gpu_figures_exist_for_gpu_engines(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    metrics = metrics_of(engine=ON_GPU)
    assert "gpu_memory_bytes/3" not in values_of(metrics.exposition()[0].decode()), "nobody has looked"
    await metrics.refresh()
    values = values_of(metrics.exposition()[0].decode())
    assert (values["gpu_utilization_perc/3"], values["gpu_memory_bytes/3"]) == (0.75, 80_000)
    assert (values["gpu_memory_used_bytes/3"], values["gpu_process_memory_bytes/3"]) == (50_000, 40_000)
    on_cpu = metrics_of()
    await on_cpu.refresh()
    assert not [name for name in values_of(on_cpu.exposition()[0].decode()) if name.startswith("gpu_")]


def test_an_engine_that_is_gone_has_no_process():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    values = values_of(metrics_of(engine=RunningEngine(gone.pid, INFO, 1.0)).exposition()[0].decode())
    assert values["process_cpu_seconds_total/server"] > 0
    assert values["process_start_time_seconds/server"] == pytest.approx(psutil.Process().create_time())
    assert "process_cpu_seconds_total/engine" not in values


@given(numbers=st.lists(st.floats(0, 1000) | st.sampled_from([0.001, 0.5, 100.0]), max_size=30))
def test_a_distribution_says_what_the_librarys_histogram_says(numbers):
    bounds = (0.001, 0.5, 100.0)
    registry = CollectorRegistry()
    theirs = Histogram("vlmserve:x", "A text.", ("model_name",), buckets=bounds, registry=registry)
    ours = Distribution("tiny", "x", "A text.", bounds)
    for number in numbers:
        theirs.labels("tiny").observe(number)
        ours.observe(number)
    [expected], [got] = registry.collect(), ours.collect()
    if numbers:  # theirs has no samples for labels that it has not seen
        samples = [sample for sample in expected.samples if not sample.name.endswith("_created")]
        assert sorted(map(str, got.samples)) == sorted(map(str, samples))
    assert (got.name, got.type, got.documentation) == (expected.name, expected.type, expected.documentation)


def test_servers_in_one_process_count_on_their_own():
    one, other = metrics_of(), metrics_of()
    one.count_error("overloaded")
    assert values_of(one.exposition()[0].decode())["request_errors_total/overloaded"] == 1
    assert "request_errors_total/overloaded" not in values_of(other.exposition()[0].decode())


def test_timings_fill_histograms_and_ends_count_once():
    metrics = metrics_of()
    record = AnswerRecord(metrics, arrived=0.0, num_prompt_tokens=10)
    record.output(EngineOutput("a", [1]))
    record.output(EngineOutput("a", [2, 3], "stop", 9, timings=RequestTimings(0.5, 0.25, 1.5, 4.0)))
    record.end("stop")
    record.end("abort")
    values = values_of(metrics.exposition()[0].decode())
    for part, seconds in (("queue", 0.5), ("vision", 0.25), ("prefill", 1.5), ("decode", 4.0)):
        assert values[f"request_{part}_time_seconds_sum"] == seconds
    assert values["request_inference_time_seconds_sum"] == 1.5 + 4.0
    assert values["request_generation_tokens_sum"] == 4
    assert values["inter_token_latency_seconds_count"] == values["request_time_per_output_token_seconds_count"] == 1
    assert (values["request_success_total/stop"], values["request_success_total/abort"]) == (1, 0)


def test_decoding_time_ends_at_the_stop_string(monkeypatch):
    clock = iter([1.0, 1.5, 3.0, 3.0])
    monkeypatch.setattr("vlmserve.server.metrics.time", SimpleNamespace(monotonic=lambda: next(clock)))
    metrics = metrics_of()
    record = AnswerRecord(metrics, arrived=0.0, num_prompt_tokens=10)
    record.output(EngineOutput("a", [1], timings=RequestTimings(0.5, 0.25, 0.125, None)))
    record.output(EngineOutput("a", [2]))
    record.output(EngineOutput("a", [3]))
    record.end("stop")
    values = values_of(metrics.exposition()[0].decode())
    for part, seconds in (("queue", 0.5), ("vision", 0.25), ("prefill", 0.125), ("decode", 2.0)):
        assert values[f"request_{part}_time_seconds_sum"] == seconds


def test_answer_without_tokens_has_no_tpot():
    metrics = metrics_of()
    record = AnswerRecord(metrics, arrived=0.0, num_prompt_tokens=10)
    record.output(EngineOutput("a", [], "length", timings=RequestTimings(0.5, 0.0, 1.5, 0.0)))
    record.end("length")
    values = values_of(metrics.exposition()[0].decode())
    assert values["time_to_first_token_seconds_count"] == values["request_time_per_output_token_seconds_count"] == 0
    assert values["e2e_request_latency_seconds_count"] == 1


@pytest.mark.parametrize("escaping", ["", ";escaping=allow-utf-8", ";escaping=underscores"])
def test_openmetrics_is_served_with_the_same_names(live, escaping):
    accept = f"application/openmetrics-text;version=1.0.0{escaping},text/plain;version=0.0.4;q=0.5"
    response = httpx.get(f"{live.url}/metrics", headers={"accept": accept}, timeout=60)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(response.text)}
    assert {"vlmserve:request_success", "vlmserve:e2e_request_latency_seconds"} <= names
    text = httpx.get(f"{live.url}/metrics", timeout=60).text
    samples = [
        {re.split("[ {]", line)[0] for line in page.splitlines() if line[0] != "#"} for page in (response.text, text)
    ]
    assert samples[0] == samples[1]


def test_series_do_not_carry_when_they_began():
    assert b"_created" not in metrics_of().exposition()[0]


async def test_the_document_lists_every_metric(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    metrics = metrics_of(engine=ON_GPU)
    metrics.count_error("overloaded")
    await metrics.refresh()
    rows = []
    for family in metrics.collect():
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"model_name", "le"})
        assert {"model_name"} <= {label for sample in family.samples for label in sample.labels}
        name = family.name + "_total" * (family.type == "counter")
        shown = f"{name}{{{','.join(labels)}}}" if labels else name
        rows.append(f"| `{shown}` | {family.type} | {family.documentation} |")
    document = Path(__file__).parents[2].joinpath("docs/metrics.md").read_text(encoding="utf-8")
    assert [line for line in document.splitlines() if line.startswith("| `vlmserve:")] == rows

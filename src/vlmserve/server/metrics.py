"""What Prometheus scrapes: the engine's figures as they are, and histograms of where requests spend their time.

Names are those that dashboards know from vLLM, with another prefix, where they mean the same:
https://docs.vllm.ai/en/stable/usage/metrics/
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from vlmserve.media.cache import PictureCacheStats
from vlmserve.server.recent import RecentLatencies
from vlmserve.types import EngineStats, FinishReason, RequestOutput, RequestTimings

PREFIX = "vlmserve:"

_DECADES = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
_SECONDS = tuple(round(decade * step, 4) for decade in _DECADES for step in (1, 2.5, 5))
_TOKENS = tuple(float(10**power * step) for power in range(6) for step in (1, 2, 5))


Stats = TypeVar("Stats")


@dataclass(frozen=True, slots=True)
class _Figure(Generic[Stats]):
    """A number among some statistics. A counter's name goes without its ``_total``."""

    kind: Literal["gauge", "counter"]
    name: str
    text: str
    value: Callable[[Stats], float]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


_ENGINE: tuple[_Figure[EngineStats], ...] = (
    _Figure("gauge", "num_requests_running", "Requests in the running batch.", lambda s: s.num_running),
    _Figure("gauge", "num_requests_waiting", "Requests that wait for their turn.", lambda s: s.num_waiting),
    _Figure(
        "gauge",
        "kv_cache_usage_perc",
        "Share of the KV cache's blocks that requests hold; 1 is all.",
        lambda s: _share(s.kv_blocks_used, s.kv_blocks_total),
    ),
    _Figure("gauge", "kv_cache_blocks", "Blocks of the KV cache.", lambda s: s.kv_blocks_total),
    _Figure("gauge", "kv_cache_used_blocks", "Blocks that requests hold.", lambda s: s.kv_blocks_used),
    _Figure(
        "gauge",
        "kv_cache_cached_blocks",
        "Blocks whose content can be found again, those that requests hold included.",
        lambda s: s.kv_blocks_cached,
    ),
    _Figure(
        "counter", "kv_cache_evictions", "Cached blocks that were taken for something else.", lambda s: s.kv_evictions
    ),
    _Figure("gauge", "host_cache_blocks", "Blocks of host memory for evicted ones.", lambda s: s.host_blocks_total),
    _Figure("gauge", "host_cache_used_blocks", "Host blocks with something in them.", lambda s: s.host_blocks_used),
    _Figure("counter", "blocks_swapped_out", "Blocks copied to host memory.", lambda s: s.blocks_swapped_out),
    _Figure("counter", "blocks_swapped_in", "Blocks copied back from host memory.", lambda s: s.blocks_swapped_in),
    _Figure(
        "counter", "num_preemptions", "Running requests that had to give up their blocks.", lambda s: s.preemptions
    ),
    _Figure(
        "counter",
        "prompt_tokens",
        "Prompt tokens computed: cached ones are not in it, those computed again are.",
        lambda s: s.prompt_tokens,
    ),
    _Figure("counter", "generation_tokens", "Tokens generated, end tokens left out.", lambda s: s.generation_tokens),
    _Figure(
        "counter",
        "prefix_cache_queries",
        "Prompt tokens of requests that have started.",
        lambda s: s.prefix_queried_tokens,
    ),
    _Figure(
        "counter",
        "prefix_cache_hits",
        "Prompt tokens of requests that have started, found in the prefix cache.",
        lambda s: s.prefix_cached_tokens,
    ),
    _Figure(
        "counter", "encoder_cache_queries", "Pictures whose embeddings a request needed.", lambda s: s.encoder_queries
    ),
    _Figure(
        "counter",
        "encoder_cache_hits",
        "Pictures that a request needed and whose embeddings were there or about to be.",
        lambda s: s.encoder_hits,
    ),
    _Figure("gauge", "encoder_cache_bytes", "Bytes that the encoder cache may take.", lambda s: s.encoder_cache_bytes),
    _Figure(
        "gauge", "encoder_cache_used_bytes", "Bytes that the encoder cache takes.", lambda s: s.encoder_cache_used_bytes
    ),
    _Figure(
        "gauge",
        "encoder_cache_pinned_pictures",
        "Pictures whose embeddings a running request needs.",
        lambda s: s.encoder_cache_pinned,
    ),
    _Figure("counter", "images_encoded", "Pictures that went through the vision tower.", lambda s: s.images_encoded),
    _Figure("counter", "steps", "Batches run.", lambda s: s.steps),
)
_PICTURE_CACHE: tuple[_Figure[PictureCacheStats], ...] = (
    _Figure("counter", "mm_cache_queries", "Pictures in requests.", lambda s: s.hits + s.misses),
    _Figure(
        "counter",
        "mm_cache_hits",
        "Pictures in requests that were prepared already or about to be.",
        lambda s: s.hits,
    ),
    _Figure("gauge", "mm_cache_pictures", "Prepared pictures in memory.", lambda s: s.num_pictures),
    _Figure("gauge", "mm_cache_bytes", "Bytes that prepared pictures may take.", lambda s: s.capacity_bytes),
    _Figure("gauge", "mm_cache_used_bytes", "Bytes that prepared pictures take.", lambda s: s.used_bytes),
)


class ServerMetrics:
    """All metrics of one server, in a registry of their own. To be used from one thread.

    engine_stats, picture_cache_stats, engine_pid: asked at every scrape; what returns None is left out.
    """

    def __init__(
        self,
        model_name: str,
        *,
        engine_stats: Callable[[], EngineStats | None],
        picture_cache_stats: Callable[[], PictureCacheStats | None],
        engine_pid: Callable[[], int | None],
    ) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(_Figures(model_name, _ENGINE, engine_stats))
        self._registry.register(_Figures(model_name, _PICTURE_CACHE, picture_cache_stats))
        self._registry.register(_Memory(engine_pid))
        self._restarts = Counter(
            PREFIX + "engine_restarts",
            "Times that the engine was restarted after it had died.",
            ("model_name",),
            registry=self._registry,
        ).labels(model_name)
        ended = self._counter(
            "request_success", "Answers that ended, by how; n of one request count n times.", "finished_reason"
        )
        self.ended = {reason: ended.labels(model_name, reason) for reason in get_args(FinishReason)}
        self.num_served = 0
        """Complete answers."""
        self.recent = RecentLatencies()
        self._errors = self._counter("request_errors", "HTTP requests answered with an error, by its code.", "code")
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first token."
        )
        self.gap = self._histogram(
            "inter_token_latency_seconds", "Seconds between one piece of an answer and the next."
        )
        self.tpot = self._histogram("request_time_per_output_token_seconds", "Mean seconds of a token after the first.")
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to the answer's end."
        )
        self.media = self._histogram(
            "request_media_time_seconds", "Seconds to get and prepare a request's pictures and prompt."
        )
        self.queue = self._histogram("request_queue_time_seconds", "Seconds until the request first ran.")
        self.vision = self._histogram(
            "request_vision_time_seconds", "Seconds in which steps encoded pictures that it needed."
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "Seconds from when it first ran to its first token, vision included."
        )
        self.decode = self._histogram("request_decode_time_seconds", "Seconds from its first token to its end.")
        self.prompt_tokens = self._histogram(
            "request_prompt_tokens", "Tokens of the prompt, pictures included.", _TOKENS
        )
        self.generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens of the answer, its end token included.", _TOKENS
        )

    def count_error(self, code: str) -> None:
        """An HTTP request got an error instead of an answer."""
        self._errors.labels(self._model_name, code).inc()

    def count_restart(self) -> None:
        """The engine has died and is started again."""
        self._restarts.inc()

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        for metric in self._registry.collect():
            # When a series began is of no use to most, and is a third of all of them.
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The page in the format that the header `accept` asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(_Page(self.collect)), content_type

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name", label), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        family = Histogram(PREFIX + name, text, ("model_name",), buckets=buckets, registry=self._registry)
        return family.labels(self._model_name)


class AnswerRecord:
    """What one answer adds to the metrics while it comes. It has to be told of its end.

    Latencies, token counts and the engine's timings are of complete answers only, and first tokens and gaps of all.
    """

    def __init__(self, metrics: ServerMetrics, arrived: float, num_prompt_tokens: int) -> None:
        """arrived: when the request was there, on the clock of `time.monotonic`."""
        self._metrics = metrics
        self._arrived = arrived
        self._first = self._last = 0.0
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._timings: RequestTimings | None = None
        self._ended = False

    def output(self, output: RequestOutput) -> None:
        """The engine produced something."""
        self._timings = output.timings or self._timings
        count = len(output.token_ids) + (output.stop_token_id is not None)
        if count == 0:
            return
        now = time.monotonic()
        if self._num_tokens == 0:
            self._first = now
            self._metrics.ttft.observe(now - self._arrived)
            self._metrics.recent.note("ttft", now - self._arrived)
        else:
            self._metrics.gap.observe(now - self._last)
        self._last = now
        self._num_tokens += count

    def end(self, reason: FinishReason) -> None:
        """It is over. Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        metrics.ended[reason].inc()
        if reason not in ("stop", "length"):
            return
        metrics.num_served += 1
        e2e = time.monotonic() - self._arrived
        metrics.e2e.observe(e2e)
        metrics.recent.note("e2e", e2e)
        metrics.prompt_tokens.observe(self._num_prompt_tokens)
        metrics.generation_tokens.observe(self._num_tokens)
        if self._num_tokens > 1:
            tpot = (self._last - self._first) / (self._num_tokens - 1)
            metrics.tpot.observe(tpot)
            metrics.recent.note("tpot", tpot)
        if self._timings is not None:
            metrics.queue.observe(self._timings.queue)
            metrics.vision.observe(self._timings.vision)
            metrics.prefill.observe(self._timings.prefill)
            # A stop string ends an answer here before the engine knows of it.
            decode = self._timings.decode
            metrics.decode.observe(self._last - self._first if decode is None else decode)


class _Page(Collector):
    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()


class _Figures(Collector, Generic[Stats]):
    """Figures as they are at the scrape; none while there are no statistics."""

    def __init__(self, model_name: str, figures: Sequence[_Figure[Stats]], stats: Callable[[], Stats | None]) -> None:
        self._model_name = model_name
        self._figures = figures
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        for figure in self._figures:
            make = GaugeMetricFamily if figure.kind == "gauge" else CounterMetricFamily
            family = make(PREFIX + figure.name, figure.text, labels=("model_name",))
            family.add_metric((self._model_name,), figure.value(stats))
            yield family


class _Memory(Collector):
    def __init__(self, engine_pid: Callable[[], int | None]) -> None:
        self._engine_pid = engine_pid

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            f"{PREFIX}process_resident_memory_bytes",
            "Bytes of resident memory of the two processes.",
            labels=("process",),
        )
        for process, pid in (("server", os.getpid()), ("engine", self._engine_pid())):
            if pid is not None and psutil.pid_exists(pid):
                family.add_metric((process,), psutil.Process(pid).memory_info().rss)
        yield family

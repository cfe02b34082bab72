"""Metrics for Prometheus: the engine's stats as they are, and histograms of where requests spend their time.

Names are those that dashboards know from vLLM, with another prefix, where they mean the same:
https://docs.vllm.ai/en/stable/usage/metrics/
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import get_args

import msgspec
from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector

from vlmserve.media.cache import ImageCacheStats
from vlmserve.server.collectors import (
    ENGINE_METRICS,
    IMAGE_CACHE_METRICS,
    PREFIX,
    Distribution,
    Gpu,
    ModelFacts,
    Processes,
    RunningEngine,
    StatsCollector,
)
from vlmserve.server.recent import RecentLatencies
from vlmserve.types import EngineOutput, EngineStats, FinishReason, RequestTimings

_DECADES = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
_SECONDS = tuple(round(decade * step, 4) for decade in _DECADES for step in (1, 2.5, 5))
_TOKENS = tuple(float(10**power * step) for power in range(6) for step in (1, 2, 5))
_ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)


class ServerMetrics:
    """All metrics of one server, in a registry of their own. To be used from one thread.

    engine_stats, image_cache_stats, engine: asked at every scrape; what returns None is left out. cache_config: what
    is set of the KV cache, by names of labels; a `cache_dtype` of "auto" is the model's.
    """

    def __init__(
        self,
        model_name: str,
        *,
        engine_stats: Callable[[], EngineStats | None],
        image_cache_stats: Callable[[], ImageCacheStats | None],
        engine: Callable[[], RunningEngine | None],
        cache_config: Mapping[str, object],
    ) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(StatsCollector(model_name, ENGINE_METRICS, engine_stats))
        self._registry.register(ModelFacts(model_name, engine, engine_stats, cache_config))
        self._registry.register(StatsCollector(model_name, IMAGE_CACHE_METRICS, image_cache_stats))
        self._registry.register(Processes(model_name, engine))
        self._restarts = Counter(
            PREFIX + "engine_restarts",
            "Times that the engine was restarted after it had died.",
            ("model_name",),
            registry=self._registry,
        ).labels(model_name)
        self._gpu = Gpu(model_name, engine)
        self._registry.register(self._gpu)
        self._add_steps()
        ended = self._counter(
            "request_success", "Answers that ended, by how; n of one request count n times.", "finished_reason"
        )
        self.ended = {reason: ended.labels(model_name, reason) for reason in get_args(FinishReason)}
        self.num_served = 0
        """Complete answers."""
        self.recent = RecentLatencies()
        self._errors = self._counter("request_errors", "HTTP requests answered with an error, by its code.", "code")
        self._add_latencies()
        self._add_sizes()

    def _add_steps(self) -> None:
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens that a step computed of prompts and generated.", _TOKENS
        )
        self._step_time = self._histogram("step_time_seconds", "Seconds that a step took.")
        self._step_vision = self._histogram(
            "step_vision_time_seconds", "Seconds in the vision tower of a step that encoded images."
        )

    def _add_latencies(self) -> None:
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first token."
        )
        self.gap = self._histogram("inter_token_latency_seconds", "Seconds between two chunks of an answer.")
        self.tpot = self._histogram("request_time_per_output_token_seconds", "Mean seconds of a token after the first.")
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to the answer's end."
        )
        self.media = self._histogram(
            "request_media_time_seconds", "Seconds to get and prepare a request's images and prompt."
        )
        self.queue = self._histogram("request_queue_time_seconds", "Seconds until the request first ran.")
        self.vision = self._histogram(
            "request_vision_time_seconds", "Seconds in which steps encoded images that it needed."
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "Seconds from when it first ran to its first token, vision included."
        )
        self.decode = self._histogram("request_decode_time_seconds", "Seconds from its first token to its end.")
        self.inference = self._histogram(
            "request_inference_time_seconds", "Seconds from when it first ran to its end: prefill and decode."
        )

    def _add_sizes(self) -> None:
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of the prompt, images included.", _TOKENS)
        self.computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Tokens of the prompt that were not cached.", _TOKENS
        )
        self.generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens of the answer, its end token included.", _TOKENS
        )
        self._wanted_answers = self._histogram("request_params_n", "Answers that a request asked for.", _ANSWERS)
        self._wanted_tokens = self._histogram(
            "request_params_max_tokens",
            "The token limit of answers, of the request or of the server.",
            _TOKENS,
        )

    def count_step(self, before: EngineStats, after: EngineStats) -> None:
        """The engine has run a step: its snapshots before and after that."""
        tokens = after.prompt_tokens - before.prompt_tokens + after.generation_tokens - before.generation_tokens
        self._step_tokens.observe(tokens)
        self._step_time.observe(after.step_seconds - before.step_seconds)
        if after.vision_seconds > before.vision_seconds:
            self._step_vision.observe(after.vision_seconds - before.vision_seconds)

    def count_request(self, num_answers: int, max_tokens: int | None) -> None:
        """A request is handed to the engine. max_tokens: of each answer; None: as many as fit into the context."""
        self._wanted_answers.observe(num_answers)
        if max_tokens is not None:
            self._wanted_tokens.observe(max_tokens)

    def count_error(self, code: str) -> None:
        """An HTTP request got an error instead of an answer."""
        self._errors.labels(self._model_name, code).inc()

    def count_restart(self) -> None:
        """The engine has died and is started again."""
        self._restarts.inc()

    async def refresh(self) -> None:
        """Ask the GPU's driver, if there is one, what `collect` shows from then on."""
        await self._gpu.refresh()

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            # When a series began is of no use to most, and is a third of all of them.
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The page in the format that the header `accept` asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        if content_type.startswith("application/openmetrics-text"):
            # Our names need no escaping, and the library would take their colons for something that does.
            encode = partial(encode, escaping=ALLOWUTF8)  # type: ignore[call-arg]  # which it has in that case
        return encode(_Page(self.collect)), content_type

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name", label), registry=self._registry)

    def _histogram(self, name: str, text: str, bounds: Sequence[float] = _SECONDS) -> Distribution:
        distribution = Distribution(self._model_name, name, text, bounds)
        self._registry.register(distribution)
        return distribution


class AnswerRecord:
    """What one answer adds to the metrics while it is generated. `end` has to be called at its end.

    Latencies, token counts and the engine's timings are of complete answers only, and first tokens and gaps of all.
    """

    def __init__(self, metrics: ServerMetrics, arrived: float, num_prompt_tokens: int) -> None:
        """arrived: when the request was there, on the clock of `time.monotonic`."""
        self._metrics = metrics
        self._arrived = arrived
        self._first = self._last = 0.0
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = self._num_cached_tokens = 0
        self._timings: RequestTimings | None = None
        self._ended = False

    def output(self, output: EngineOutput) -> None:
        """The engine produced something."""
        self._timings = output.timings or self._timings
        self._num_cached_tokens = output.cached_tokens
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
        """The answer has ended. Only the first call counts."""
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
        metrics.computed_tokens.observe(self._num_prompt_tokens - self._num_cached_tokens)
        metrics.generation_tokens.observe(self._num_tokens)
        if self._num_tokens > 1:
            tpot = (self._last - self._first) / (self._num_tokens - 1)
            metrics.tpot.observe(tpot)
            metrics.recent.note("tpot", tpot)
        if (timings := self.timings) is not None:
            metrics.queue.observe(timings.queue)
            metrics.vision.observe(timings.vision)
            metrics.prefill.observe(timings.prefill)
            metrics.decode.observe(timings.decode or 0.0)
            metrics.inference.observe(timings.prefill + (timings.decode or 0.0))

    @property
    def ttft(self) -> float | None:
        """Seconds from the request's arrival to its first token; None before that."""
        return self._first - self._arrived if self._num_tokens else None

    @property
    def timings(self) -> RequestTimings | None:
        """Where its time went until now; None before its first token."""
        timings = self._timings
        if timings is None or timings.decode is not None:
            return timings
        # A stop string ends an answer here before the engine knows of it.
        return msgspec.structs.replace(timings, decode=self._last - self._first)


class _Page(Collector):
    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()

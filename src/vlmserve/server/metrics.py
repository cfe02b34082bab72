"""Prometheus metrics, with vLLM's names after the prefix: https://docs.vllm.ai/en/stable/usage/metrics/"""

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


class ServerMetrics(Collector):
    """All metrics of a server, in their own registry. Use it from one thread.

    engine_stats, image_cache_stats, engine: called at every scrape; None omits metrics. cache_config: settings of the
    KV cache, by label; a `cache_dtype` of "auto" is the model's.
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
        """Number of complete answers."""
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
            "request_params_max_tokens", "The token limit of answers, of the request or of the server.", _TOKENS
        )

    def count_step(self, before: EngineStats, after: EngineStats) -> None:
        tokens = after.prompt_tokens - before.prompt_tokens + after.generation_tokens - before.generation_tokens
        self._step_tokens.observe(tokens)
        self._step_time.observe(after.step_seconds - before.step_seconds)
        if after.vision_seconds > before.vision_seconds:
            self._step_vision.observe(after.vision_seconds - before.vision_seconds)

    def count_request(self, num_answers: int, max_tokens: int | None) -> None:
        """max_tokens: of each answer; None: the rest of the context."""
        self._wanted_answers.observe(num_answers)
        if max_tokens is not None:
            self._wanted_tokens.observe(max_tokens)

    def count_error(self, code: str) -> None:
        self._errors.labels(self._model_name, code).inc()

    def count_restart(self) -> None:
        self._restarts.inc()

    async def refresh(self) -> None:
        """Read the GPU's stats for the following scrapes."""
        await self._gpu.refresh()

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            # few use creation times, a third of all samples
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Returns page and content type. accept: the `Accept` header."""
        encode, content_type = choose_encoder(accept)
        if content_type.startswith("application/openmetrics-text"):
            # the names need no escaping, but the library would escape their colons
            encode = partial(encode, escaping=ALLOWUTF8)  # type: ignore[call-arg]  # which it has in that case
        return encode(self), content_type

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name", label), registry=self._registry)

    def _histogram(self, name: str, text: str, bounds: Sequence[float] = _SECONDS) -> Distribution:
        distribution = Distribution(self._model_name, name, text, bounds)
        self._registry.register(distribution)
        return distribution


class AnswerRecord:
    """Collects the metrics of one answer. Call `end` at its end.

    Latencies, token counts and the engine's timings count only for complete answers; first tokens and gaps for all.
    """

    def __init__(self, metrics: ServerMetrics, arrived: float, num_prompt_tokens: int) -> None:
        """arrived: of the request, by `time.monotonic`."""
        self._metrics = metrics
        self._arrived = arrived
        self._first = self._last = 0.0
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = self._num_cached_tokens = 0
        self._timings: RequestTimings | None = None
        self._ended = False

    def output(self, output: EngineOutput) -> None:
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
        """Only the first call counts."""
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
        """Seconds from the request's arrival; None before the first token."""
        return self._first - self._arrived if self._num_tokens else None

    @property
    def timings(self) -> RequestTimings | None:
        """Durations of the answer's phases; None before the first token."""
        timings = self._timings
        if timings is None or timings.decode is not None:
            return timings
        # after a stop string, the engine does not know yet that the answer has ended
        return msgspec.structs.replace(timings, decode=self._last - self._first)

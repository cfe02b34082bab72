"""Collectors of /metrics: each reads its source when it is scraped."""

from __future__ import annotations

import asyncio
import contextlib
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import psutil
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from vlmserve.server.gpu import GpuReader, GpuStats
from vlmserve.types import EngineStats, ModelInfo

PREFIX = "vlmserve:"


class StatMetric(NamedTuple):
    """A metric that is read from a field of statistics. Counters' names omit ``_total``."""

    kind: Literal["gauge", "counter"]
    name: str
    text: str
    field: str


class RunningEngine(NamedTuple):
    """load_seconds: of the model. silence: seconds without a heartbeat."""

    pid: int
    info: ModelInfo
    load_seconds: float
    silence: float = 0.0


ENGINE_METRICS = (
    StatMetric("gauge", "num_requests_running", "Requests in the running batch.", "num_running"),
    StatMetric("gauge", "num_requests_waiting", "Requests in the waiting queue.", "num_waiting"),
    StatMetric(
        "gauge", "kv_cache_usage_perc", "Share of the KV cache's blocks that requests hold; 1 is all.", "kv_usage"
    ),
    StatMetric(
        "gauge",
        "kv_cache_blocks",
        "Blocks of the KV cache. With sliding windows, a block holds tokens of some layers.",
        "kv_blocks_total",
    ),
    StatMetric("gauge", "kv_cache_used_blocks", "Blocks that requests hold.", "kv_blocks_used"),
    StatMetric(
        "gauge",
        "kv_cache_cached_blocks",
        "Blocks whose content can be found again, those that requests hold included.",
        "kv_blocks_cached",
    ),
    StatMetric("counter", "kv_cache_evictions", "Cached blocks that were evicted.", "kv_evictions"),
    StatMetric("gauge", "state_cache_slots", "Slots of states of hybrid models.", "state_slots_total"),
    StatMetric("gauge", "state_cache_used_slots", "Slots that requests hold.", "state_slots_used"),
    StatMetric("gauge", "state_cache_checkpoints", "States that can be found again.", "state_checkpoints"),
    StatMetric("counter", "state_cache_evictions", "Checkpoints that were evicted.", "state_evictions"),
    StatMetric("gauge", "host_state_slots", "Slots of host memory for checkpoints.", "host_states_total"),
    StatMetric("gauge", "host_state_checkpoints", "Checkpoints in host memory.", "host_states_used"),
    StatMetric("counter", "state_offload_saved", "Checkpoints copied to host memory.", "states_offloaded"),
    StatMetric("counter", "state_offload_loaded", "Checkpoints copied back.", "states_loaded"),
    StatMetric("gauge", "host_cache_blocks", "Blocks of host memory for evicted ones.", "host_blocks_total"),
    StatMetric("gauge", "host_cache_used_blocks", "Host blocks in use.", "host_blocks_used"),
    StatMetric("counter", "kv_offload_blocks_saved", "Blocks copied to host memory.", "blocks_offloaded"),
    StatMetric("counter", "kv_offload_blocks_loaded", "Blocks copied back from host memory.", "blocks_loaded"),
    StatMetric("counter", "num_preemptions", "Running requests that were preempted.", "preemptions"),
    StatMetric(
        "counter",
        "prompt_tokens",
        "Prompt tokens computed, without cached ones, with those computed again.",
        "prompt_tokens",
    ),
    StatMetric("counter", "generation_tokens", "Tokens generated, end tokens left out.", "generation_tokens"),
    StatMetric(
        "counter", "prefix_cache_queries", "Prompt tokens of requests that have started.", "prefix_queried_tokens"
    ),
    StatMetric(
        "counter",
        "prefix_cache_hits",
        "Prompt tokens of requests that have started, found in the prefix cache.",
        "prefix_cached_tokens",
    ),
    StatMetric(
        "counter",
        "prefix_cache_never_seen",
        "Prompt tokens of requests that have started, in blocks that were never cached.",
        "prefix_never_seen_tokens",
    ),
    StatMetric(
        "counter",
        "prefix_cache_evicted",
        "Prompt tokens of requests that have started, in evicted blocks or before an evicted checkpoint.",
        "prefix_evicted_tokens",
    ),
    StatMetric(
        "counter",
        "prefix_cache_no_checkpoint",
        "Prompt tokens of requests that have started, in cached blocks without a checkpoint of a state.",
        "prefix_unsaved_tokens",
    ),
    StatMetric("counter", "encoder_cache_queries", "Images whose embeddings a request needed.", "encoder_queries"),
    StatMetric(
        "counter",
        "encoder_cache_hits",
        "Images that a request needed and whose embeddings were cached or about to be.",
        "encoder_hits",
    ),
    StatMetric("gauge", "encoder_cache_bytes", "Bytes that the encoder cache may take.", "encoder_cache_bytes"),
    StatMetric("gauge", "encoder_cache_used_bytes", "Bytes that the encoder cache takes.", "encoder_cache_used_bytes"),
    StatMetric(
        "gauge",
        "encoder_cache_pinned_images",
        "Images whose embeddings a running request needs.",
        "encoder_cache_pinned",
    ),
    StatMetric("gauge", "images_in_progress", "Images that are being encoded.", "images_in_progress"),
    StatMetric(
        "gauge",
        "image_seconds_left",
        "Expected seconds of the vision tower for the images in progress.",
        "image_seconds_left",
    ),
    StatMetric("gauge", "disk_cache_bytes", "Bytes that the disk cache may take; 0 without one.", "disk_limit_bytes"),
    StatMetric(
        "gauge",
        "disk_cache_used_bytes",
        "Bytes of the files of all engines, counted from time to time.",
        "disk_used_bytes",
    ),
    StatMetric("counter", "disk_cache_hits", "Entries that were read from disk.", "disk_hits"),
    StatMetric(
        "counter", "disk_cache_misses", "Entries that were looked for on disk and are not there.", "disk_misses"
    ),
    StatMetric(
        "counter", "disk_cache_broken", "Files that were changed or incomplete, which count as missing.", "disk_broken"
    ),
    StatMetric("counter", "disk_cache_read_bytes", "Bytes of the entries that were read.", "disk_read_bytes"),
    StatMetric("counter", "disk_cache_written", "Entries that were written.", "disk_written"),
    StatMetric("counter", "disk_cache_written_bytes", "Bytes of the entries that were written.", "disk_written_bytes"),
    StatMetric("gauge", "disk_cache_queued_bytes", "Bytes that wait to be written.", "disk_queued_bytes"),
    StatMetric(
        "counter", "disk_cache_dropped", "Entries that were not written because too many waited.", "disk_dropped"
    ),
    StatMetric("counter", "disk_cache_evictions", "Files that were removed for others.", "disk_evictions"),
    StatMetric("gauge", "lora_adapters_served", "Adapters that are served.", "adapters_served"),
    StatMetric("gauge", "lora_adapters_loaded", "Adapters in memory.", "adapters_loaded"),
    StatMetric("gauge", "lora_adapters_active", "Adapters of running requests.", "adapters_active"),
    StatMetric("gauge", "lora_memory_used_bytes", "Bytes that adapters in memory take.", "adapter_bytes"),
    StatMetric("counter", "lora_loads", "Adapters that were read into memory.", "adapter_loads"),
    StatMetric("counter", "lora_evictions", "Adapters that left memory for others.", "adapter_evictions"),
    StatMetric("counter", "spec_decode_num_draft_tokens", "Draft tokens that were checked.", "drafted_tokens"),
    StatMetric(
        "counter", "spec_decode_num_accepted_tokens", "Draft tokens that became part of answers.", "accepted_drafts"
    ),
    StatMetric("counter", "images_encoded", "Images that went through the vision tower.", "images_encoded"),
    StatMetric("counter", "steps", "Batches run.", "steps"),
    StatMetric("counter", "step_seconds", "Seconds that the engine spent in steps.", "step_seconds"),
    StatMetric("counter", "vision_seconds", "Seconds of steps that went to the vision tower.", "vision_seconds"),
)
IMAGE_CACHE_METRICS = (
    StatMetric("counter", "mm_cache_queries", "Images in requests.", "queries"),
    StatMetric("counter", "mm_cache_hits", "Images in requests that were prepared already or about to be.", "hits"),
    StatMetric("gauge", "mm_cache_images", "Prepared images in memory.", "num_images"),
    StatMetric("gauge", "mm_cache_bytes", "Bytes that prepared images may take.", "capacity_bytes"),
    StatMetric("gauge", "mm_cache_used_bytes", "Bytes that prepared images take.", "used_bytes"),
)


class StatsCollector(Collector):
    def __init__(self, model_name: str, metrics: Sequence[StatMetric], stats: Callable[[], object]) -> None:
        self._model_name, self._metrics, self._stats = model_name, metrics, stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        for metric in self._metrics:
            make = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            family = make(PREFIX + metric.name, metric.text, labels=("model_name",))
            family.add_metric((self._model_name,), getattr(stats, metric.field))
            yield family


class Distribution(Collector):
    """A histogram for one thread. The library's own would take a tenth of the time per streamed token."""

    def __init__(self, model_name: str, name: str, text: str, bounds: Sequence[float]) -> None:
        self._model_name, self._name, self._text = model_name, PREFIX + name, text
        self._bounds = list(bounds)
        self._labels = [*map(floatToGoString, bounds), "+Inf"]
        self._counts = [0] * len(self._labels)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=("model_name",))
        buckets = list(zip(self._labels, map(float, accumulate(self._counts)), strict=True))
        family.add_metric((self._model_name,), buckets, sum_value=self._sum)
        yield family


class ModelFacts(Collector):
    def __init__(
        self,
        model_name: str,
        engine: Callable[[], RunningEngine | None],
        stats: Callable[[], EngineStats | None],
        cache_config: Mapping[str, object],
    ) -> None:
        self._model_name = model_name
        self._engine = engine
        self._stats = stats
        self._cache_config = {label: str(value).lower() for label, value in cache_config.items()}

    def collect(self) -> Iterator[Metric]:
        engine, stats = self._engine(), self._stats()
        if engine is None or stats is None:
            return
        yield self._gauge(
            "model_load_time_seconds", "Seconds that the engine took to load the model.", engine.load_seconds
        )
        info = engine.info
        ranks = str(info.tensor_parallel_size)
        about = {"architecture": info.architecture, "device": info.device, "dtype": info.dtype, "ranks": ranks}
        yield self._gauge("model_info", "1; the model's properties are labels.", 1, about)
        # with sliding windows a block holds tokens of some layers, but readers multiply by block_size
        num_blocks = info.kv_cache_tokens // int(self._cache_config["block_size"])
        cache = {**self._cache_config, "num_gpu_blocks": str(num_blocks)}
        if cache["cache_dtype"] == "auto":
            cache["cache_dtype"] = info.dtype
        yield self._gauge(
            "cache_config_info",
            "1; labels are settings of the KV cache, and its capacity in blocks of all layers.",
            1,
            cache,
        )

    def _gauge(self, name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> GaugeMetricFamily:
        all_labels = {"model_name": self._model_name, **(labels or {})}
        family = GaugeMetricFamily(PREFIX + name, text, labels=tuple(all_labels))
        family.add_metric(tuple(all_labels.values()), value)
        return family


class Processes(Collector):
    def __init__(self, model_name: str, engine: Callable[[], RunningEngine | None]) -> None:
        self._model_name = model_name
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", "process")
        memory = GaugeMetricFamily(
            f"{PREFIX}process_resident_memory_bytes", "Bytes of resident memory of each process.", labels=labels
        )
        processor = CounterMetricFamily(
            f"{PREFIX}process_cpu_seconds", "Processor seconds that each process has used.", labels=labels
        )
        began = GaugeMetricFamily(
            f"{PREFIX}process_start_time_seconds", "When each process began, as Unix time.", labels=labels
        )
        engine = self._engine()
        for name, pid in {"server": os.getpid(), **({} if engine is None else _engine_pids(engine))}.items():
            # a process that has just died has no metrics
            with contextlib.suppress(psutil.NoSuchProcess), (process := psutil.Process(pid)).oneshot():
                times = process.cpu_times()
                memory.add_metric((self._model_name, name), process.memory_info().rss)
                processor.add_metric((self._model_name, name), times.user + times.system)
                began.add_metric((self._model_name, name), process.create_time())
        yield from (memory, processor, began)
        if engine is not None:
            silence = GaugeMetricFamily(
                f"{PREFIX}engine_silence_seconds", "Seconds without a heartbeat of the engine.", labels=("model_name",)
            )
            silence.add_metric((self._model_name,), engine.silence)
            yield silence


def _engine_pids(engine: RunningEngine) -> dict[str, int]:
    pids = {"engine": engine.pid}
    if engine.info.tensor_parallel_size > 1:
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks = sorted(psutil.Process(engine.pid).children(), key=psutil.Process.create_time)
            pids |= {f"rank {number}": rank.pid for number, rank in enumerate(ranks, 1)}
    return pids


class Gpu(Collector):
    def __init__(self, model_name: str, engine: Callable[[], RunningEngine | None]) -> None:
        self._model_name = model_name
        self._engine = engine
        self._reader = GpuReader()
        self._stats: GpuStats | None = None

    async def refresh(self) -> None:
        engine = self._engine()
        uuid = None if engine is None else engine.info.gpu_uuid
        self._stats = None
        if engine is not None and uuid is not None:
            self._stats = await asyncio.to_thread(self._reader.read, uuid, engine.pid)

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        if stats is None:
            return
        for name, text, value in (
            ("gpu_utilization_perc", "Share of time in which the GPU was busy; 1 is all.", stats.utilization),
            ("gpu_memory_bytes", "Bytes of the GPU's memory.", stats.total_bytes),
            ("gpu_memory_used_bytes", "Bytes of it in use by all processes.", stats.used_bytes),
            ("gpu_process_memory_bytes", "Bytes of it that the engine uses.", stats.process_bytes),
        ):
            if value is not None:
                family = GaugeMetricFamily(PREFIX + name, text, labels=("model_name", "gpu"))
                family.add_metric((self._model_name, str(stats.index)), value)
                yield family

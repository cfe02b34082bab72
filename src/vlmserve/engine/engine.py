"""The real engine: scheduler, caches and model, one synchronous step at a time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from vlmserve.adapters.store import AdapterStore
from vlmserve.cache.blocks import BlockPool
from vlmserve.cache.costs import CostModel
from vlmserve.cache.encoder import EncoderCache
from vlmserve.cache.prefix import PrefixCache
from vlmserve.cache.states import StatePool
from vlmserve.engine.adapters import AdapterLoading
from vlmserve.engine.base import BaseEngine
from vlmserve.engine.disk import DiskCache
from vlmserve.engine.drafting import start_drafting
from vlmserve.engine.grammars import grammar_compiler
from vlmserve.engine.image_speed import image_cost
from vlmserve.engine.intake import Intake
from vlmserve.engine.loading import CacheSizes, cache_sizes, load, may_draft
from vlmserve.errors import ConfigurationError
from vlmserve.models.identity import cache_identity
from vlmserve.models.protocols import LoadedModel, VisionEncoder
from vlmserve.runner.adapters import Observer, RunnerAdapters
from vlmserve.runner.ranks import Followers, LeadingRunner
from vlmserve.runner.runner import ModelRunner, RunningStep
from vlmserve.runner.warm_up import warm_up_steps
from vlmserve.scheduler.ahead import continues_on_device, forget_ended
from vlmserve.scheduler.drafts.drafter import Drafter
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.adapters import AdapterPlaces
from vlmserve.scheduler.resources.images import Images
from vlmserve.scheduler.resources.memory import KVMemory
from vlmserve.scheduler.resources.resource import Resource
from vlmserve.scheduler.resources.states import StateMemory, StatePlaces
from vlmserve.scheduler.scheduler import Scheduler
from vlmserve.scheduler.step_limits import MeasuredLimits
from vlmserve.settings.config import EngineConfig
from vlmserve.steps import ModelRunnerOutput, RunTimings, SchedulerOutput
from vlmserve.types import (
    MAX_MAP_CELLS,
    BlockMap,
    EngineOutput,
    EngineRequest,
    EngineSnapshot,
    EngineStats,
    ImageInput,
    ModelInfo,
    RequestSnapshot,
    RequestTimings,
)

logger = logging.getLogger(__name__)

USUAL_TOKENS = 2048
"""Tokens of a typical request for the start-up log, prompt and answer together."""
_WAIT = 0.05
"""Seconds that an idle engine waits for a grammar or adapter before it looks for other work."""


@dataclass(slots=True)
class StepTimings:
    """Seconds of the last step. `schedule` covers planning before and bookkeeping after the run."""

    schedule: float = 0.0
    run: RunTimings = field(default_factory=RunTimings)

    @property
    def overhead(self) -> float:
        return self.schedule + self.run.build + self.run.sample


class Engine(BaseEngine):
    """A `VLMEngine` with a model.

    Raises ModelLoadError if the checkpoint cannot be served, ConfigurationError for invalid settings.
    """

    overlaps: bool
    """Submit a step before the previous one has ended. Only devices with `draw_later` can, without other ranks."""

    def __init__(self, config: EngineConfig, folder: Path | None = None) -> None:
        if config.tensor_parallel_size == 1:
            self._setup(config, load(config, folder), folder)
            return
        from vlmserve.engine.ranks import RankProcesses

        followers = RankProcesses(config, folder)
        with followers.explained():
            self._setup(config, load(config, folder, followers.ranks), folder, followers)

    @classmethod
    def from_model(cls, config: EngineConfig, model: LoadedModel) -> Engine:
        engine = cls.__new__(cls)
        predicts = may_draft(config, model) and model.device.draw_later is None
        engine._setup(config, model if predicts else replace(model, predictor=None, assistant=None))
        return engine

    def _setup(
        self,
        config: EngineConfig,
        model: LoadedModel,
        folder: Path | None = None,
        followers: Followers | None = None,
    ) -> None:
        language_model = model.language_model
        sizes = self.sizes = cache_sizes(config, model)
        of_tokens, num_pages, num_host_pages, max_model_len = sizes[:4]
        _log_cache(config, model, sizes)
        chunk = config.max_num_batched_tokens
        self._config = config
        self._grammars = grammar_compiler(config, folder, language_model.vocab_size)
        one_block = language_model.allocate_cache(1, config.block_size)
        identity = cache_identity(model.identity, model.backend, one_block)
        self._prompt_tokens = self._generation_tokens = self._images_encoded = self._steps = 0
        self._step_seconds = self._vision_seconds = 0.0
        self.timings = StepTimings()
        self._costs = CostModel(config.block_size / len(of_tokens.windows))
        self._cache = PrefixCache(
            BlockPool(num_pages),
            BlockPool(num_host_pages) if num_host_pages else None,
            self._costs.worth_saving,
        )
        self._adapters = AdapterLoading.of(config, model)
        self._intake = intake = Intake(config, model, identity, self._grammars, self._adapters, sizes)
        slots = self._slots = self._adapter_slots = None
        if self._adapters is not None:
            store = self._adapters.store
            slots = self._slots = RunnerAdapters(model, config.max_loras, store.get, config.max_lora_rank)
            self._adapter_slots = AdapterPlaces(config.max_loras, store)
        # Planned by `Scheduler.schedule_ahead`.
        self._ahead: tuple[SchedulerOutput, float, RunningStep] | None = None
        self.overlaps = model.device.draw_later is not None and followers is None
        if followers is None:
            self.runner = ModelRunner(model, sizes.pools, self._grammars.begin, slots)
        else:
            self.runner = LeadingRunner(model, sizes.pools, self._grammars.begin, followers)
        self._followers = followers
        self._memory = _memory(config, self._cache, sizes)
        self._disk = DiskCache.open(config, model, self.runner, self._memory)
        self._images = Images(
            EncoderCache(config.encoder_cache_memory),
            max_encoded_images=config.max_encoded_images or model.device.images_per_step,
            image_token_bytes=intake.image_token_bytes,
            state_bytes=intake.state_bytes,
            macs=partial(_tower_macs, model.vision),
        )
        resources: list[Resource] = [self._images]
        if self._disk is not None:
            resources.insert(0, self._disk.resource(self._images))
        resources += [] if self._adapter_slots is None else [self._adapter_slots]
        if isinstance(self._memory, StateMemory):
            resources.append(StatePlaces(self._memory))
        self.scheduler = Scheduler(
            (*resources, self._memory), max_num_seqs=config.max_num_seqs, max_num_batched_tokens=chunk
        )
        if self._adapters is not None and self._adapter_slots is not None:
            self._adapters.follow(self.scheduler, self._adapter_slots)
        # GPUs need no limit: they compute whole prompts fast, and their first measurements include compilation.
        on_cpu = model.device.torch_device.type == "cpu"
        self._limits = MeasuredLimits(config.encoder_step_share, config.step_seconds if on_cpu else math.inf)
        warm_up = self.runner.warm_up()
        self._limits.encoded(*warm_up)
        self.scheduler.limits = self._limits
        if followers is None:
            warm_up_steps(
                self.runner,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=max_model_len,
                seconds=config.max_warm_up_seconds,
            )
        self._drafter = start_drafting(config, self.scheduler, self.runner, sizes, identity, overlaps=self.overlaps)
        self._info = _model_info(config, model, intake, sizes, warm_up)

    @property
    def watched(self) -> Sequence[int]:
        return () if self._followers is None else self._followers.watched

    @property
    def silence(self) -> float:
        return 0.0 if self._followers is None else self._followers.silence

    def check(self) -> None:
        if self._followers is not None:
            self._followers.check()

    def add(self, request: EngineRequest) -> None:
        self._check(request, self.scheduler, len(self.scheduler.waiting), len(self.scheduler.running))
        self.scheduler.add(*self._intake.accept(request))

    def step(self) -> list[EngineOutput]:
        started = time.perf_counter()
        is_ahead = self._ahead is not None
        if self._ahead is None:
            if self._drafter is not None:
                self._begin_drafts(self._drafter)
            step = self.scheduler.schedule()
            if self._drafter is not None:
                self._drafter.predict(step, self.scheduler.requests)
            if not step.has_work:
                return self._without_work()
            planned = time.perf_counter()
            running = self.runner.submit(step)
        else:
            step, planned, running = self._ahead
            self._ahead = None
        if self.overlaps and (following := self.scheduler.schedule_ahead(step)) is not None:
            self._ahead = following, time.perf_counter(), self.runner.submit(following)
            if self._drafter is not None:
                self.scheduler.awaits_tokens = self._drafter.awaits_tokens(
                    self.scheduler.running, self.timings.schedule, is_counted=not is_ahead
                )
        output = running.result()
        ran = time.perf_counter()
        if is_ahead:
            failed = forget_ended(self.scheduler.requests, step, output)
            if isinstance(self._memory, StateMemory):
                self._memory.lose(failed)
        prompt_tokens = self._note_progress(step, output, planned)
        self._costs.computed(prompt_tokens, output.timings.model)
        if step.block_copies and not step.state_copies:
            self._costs.copied(step.block_copies, output.timings.transfer)
        outputs = self.scheduler.end_failed() + self._update(step, output, ran)
        if self._disk is not None:
            self._disk.ran(output)
        self._prompt_tokens += prompt_tokens
        self._steps += 1
        if self._adapters is not None:
            self._adapters.store.drop_orphans()
        ended = time.perf_counter()
        self._step_seconds += ended - started
        self.timings = StepTimings(max(0.0, planned - started) + ended - ran, output.timings)
        return outputs

    def _begin_drafts(self, drafter: Drafter) -> None:
        running = self.scheduler.running
        self.scheduler.awaits_tokens = False
        is_ahead = self.overlaps and all(map(continues_on_device, running))
        self.runner.sampler.tells_forced = drafter.begin_step(running, is_ahead=is_ahead, host=self.timings.schedule)

    def _update(self, step: SchedulerOutput, output: ModelRunnerOutput, ran: float) -> list[EngineOutput]:
        requests, answered = self.scheduler.requests, dict[str, Request]()
        for request_id in output.token_ids:
            if (request := requests.get(request_id)) is not None:
                request.answered = request.answered or ran
                answered[request.answer_id] = request
        if self._drafter is not None:
            self._drafter.ran(step, output, requests)
        outputs = self.scheduler.update(step, output)
        for place, one in enumerate(outputs):
            request = answered[one.request_id]
            self._generation_tokens += _num_tokens(one)
            if self._drafter is not None and one.finish_reason in ("stop", "length"):
                self._drafter.learn([request])
            outputs[place] = _with_timings(request, one, ran)
        return outputs

    def _without_work(self) -> list[EngineOutput]:
        outputs = self.scheduler.end_failed()
        if not outputs:
            outputs = self._update(SchedulerOutput(), self.runner.collect(_WAIT), time.perf_counter())
        if not outputs:
            self.scheduler.resources.wait(_WAIT)
        return outputs

    @property
    def adapter_store(self) -> AdapterStore:
        """Raises ConfigurationError if adapters are disabled."""
        if self._adapters is None:
            raise ConfigurationError("no adapters are served here: start with --enable-lora")
        return self._adapters.store

    def observe_scalings(self, observer: Observer | None) -> None:
        """Set or remove an observer of X-LoRA scalings. Raises ConfigurationError without --enable-lora."""
        if self._slots is None:
            raise ConfigurationError("no adapters are served here: start with --enable-lora")
        self._slots.observer = observer

    def _note_progress(self, step: SchedulerOutput, output: ModelRunnerOutput, planned: float) -> int:
        """Record times of requests and of the step. Returns the number of prompt tokens computed."""
        requests = self.scheduler.requests
        if step.images_to_encode or step.encodings:
            self._note_images(step, output.timings, planned)
        prompt_tokens = num_tokens = 0
        for scheduled in step.requests:
            request = requests[scheduled.request_id]
            num_tokens += scheduled.num_tokens
            if scheduled.start < request.num_prompt_tokens:
                end = scheduled.start + scheduled.num_tokens
                prompt_tokens += min(end, request.num_prompt_tokens) - scheduled.start
            elif request.answered:
                continue
            request.started = request.started or planned
        self._limits.ran(output.timings, prompt_tokens, num_tokens - prompt_tokens)
        return prompt_tokens

    def _note_images(self, step: SchedulerOutput, timings: RunTimings, planned: float) -> None:
        for key in step.encoded_keys:
            for request_id in self._images.cache.holders(key):
                request = self.scheduler.requests[request_id]
                request.started = request.started or planned
                request.vision_started = request.vision_started or planned + timings.transfer
                request.vision_seconds += timings.vision
        self._images_encoded += len(step.images_to_encode) + sum(one.products is None for one in step.encodings)
        self._vision_seconds += timings.vision

    def abort(self, request_ids: Iterable[str]) -> None:
        ended = [*request_ids]
        if self._drafter is not None:
            known = self.scheduler.requests
            self._drafter.learn(known[request_id] for request_id in ended if request_id in known)
        self.scheduler.abort(ended)
        if self._adapters is not None:
            self._adapters.store.drop_orphans()

    def has_work(self) -> bool:
        return len(self.scheduler) > 0 or self._ahead is not None

    def stats(self) -> EngineStats:
        host = self._cache.host
        store, places = None if self._adapters is None else self._adapters.store, self._adapter_slots
        states = self._memory.states if isinstance(self._memory, StateMemory) else None
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_blocks_total=self._cache.pool.num_blocks,
            kv_blocks_used=self._cache.pool.num_used,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=self.scheduler.num_preemptions,
            images_encoded=self._images_encoded,
            steps=self._steps,
            step_seconds=self._step_seconds,
            vision_seconds=self._vision_seconds,
            images_in_progress=len(self._images.unfinished),
            image_seconds_left=self._limits.tower_seconds(sum(self._images.unfinished.values())),
            prefix_queried_tokens=self._memory.queried_tokens,
            prefix_cached_tokens=self._memory.cached_tokens,
            prefix_never_seen_tokens=self._memory.misses.total.never_seen,
            prefix_evicted_tokens=self._memory.misses.total.evicted,
            prefix_unsaved_tokens=self._memory.misses.total.no_checkpoint,
            kv_blocks_cached=self._cache.pool.num_cached,
            kv_evictions=self._cache.pool.num_evictions,
            state_slots_total=0 if states is None else states.num_slots,
            state_slots_used=0 if states is None else states.num_used,
            state_checkpoints=0 if states is None else states.num_cached,
            state_evictions=0 if states is None else states.num_evictions,
            host_states_total=0 if states is None else states.num_host_slots,
            host_states_used=0 if states is None else states.num_on_host,
            states_offloaded=0 if states is None else states.num_saved,
            states_loaded=0 if states is None else states.num_loaded,
            host_blocks_total=0 if host is None else host.num_blocks,
            host_blocks_used=0 if host is None else host.num_cached,
            blocks_offloaded=self._cache.num_saved,
            blocks_loaded=self._cache.num_loaded,
            encoder_queries=self._images.queries,
            encoder_hits=self._images.hits,
            encoder_cache_bytes=self._images.cache.capacity_bytes,
            encoder_cache_used_bytes=self._images.cache.used_bytes,
            encoder_cache_pinned=self._images.cache.num_pinned,
            adapters_served=0 if store is None else store.num_served,
            adapters_loaded=0 if store is None else store.num_loaded,
            adapters_active=0 if places is None else places.num_active,
            adapter_bytes=0 if store is None else store.used_bytes,
            adapter_loads=0 if store is None else store.num_loads,
            adapter_evictions=0 if store is None else store.num_evictions,
            **({} if self._disk is None else self._disk.stats()),
            drafted_tokens=0 if self._drafter is None else self._drafter.num_drafted,
            accepted_drafts=0 if self._drafter is None else self._drafter.num_accepted,
        )

    def inspect(self) -> EngineSnapshot:
        unfinished = self._images.unfinished
        requests = [_snapshot(request, unfinished, runs=True) for request in self.scheduler.running]
        requests += [_snapshot(request, unfinished, runs=False) for request in self.scheduler.waiting]
        return EngineSnapshot(self.stats(), requests)

    def map_blocks(self) -> BlockMap:
        return self._cache.pool.draw_map(MAX_MAP_CELLS)


def _memory(config: EngineConfig, cache: PrefixCache, sizes: CacheSizes) -> KVMemory:
    caching, windows = config.enable_prefix_caching, sizes.of_tokens.windows
    if not sizes.slots:
        chunk = config.max_num_batched_tokens
        return KVMemory(cache, config.block_size, prefix_caching=caching, max_chunk=chunk, windows=windows)
    return StateMemory(
        cache,
        config.block_size,
        states=StatePool(sizes.slots, sizes.host_slots),
        draft_places=sizes.draft_places,
        prefix_caching=caching,
        max_chunk=config.max_num_batched_tokens,
        windows=windows,
    )


def _model_info(
    config: EngineConfig, model: LoadedModel, intake: Intake, sizes: CacheSizes, warm_up: tuple[int, float]
) -> ModelInfo:
    """warm_up: see `ImageEncoder.warm_up`."""
    of_tokens, num_pages, ranks = sizes.of_tokens, sizes.pages, config.tensor_parallel_size
    room = num_pages * config.block_size
    return ModelInfo(
        name=config.model,
        architecture=model.architecture,
        max_model_len=sizes.max_model_len,
        vocab_size=model.language_model.vocab_size,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        num_parameters=model.num_parameters,
        max_prompt_len=intake.max_len - 1,
        kv_cache_bytes=num_pages * of_tokens.page * ranks,
        supports_images=model.vision is not None,
        kv_cache_tokens=of_tokens.fitting(num_pages, config.max_num_batched_tokens, room),
        weight_bytes=model.weight_bytes * ranks,
        end_token_ids=sorted(model.end_token_ids),
        gpu_uuid=model.device.gpu_uuid,
        image_token_bytes=intake.image_token_bytes,
        tensor_parallel_size=ranks,
        embedding_size=model.embedding_size,
        image_cost=image_cost(model, intake.identity, *warm_up),
    )


def _tower_macs(tower: VisionEncoder | None, image: ImageInput) -> int:
    return 0 if tower is None else tower.products(image.pixels.shape, image.tiling)


def _num_tokens(output: EngineOutput) -> int:
    return len(output.token_ids) if output.beams is None else sum(len(answer.token_ids) for answer in output.beams)


def _with_timings(request: Request, output: EngineOutput, now: float) -> EngineOutput:
    if request.answered != now and output.finish_reason is None:
        return output
    timings = RequestTimings(
        queue=request.started - request.arrived,
        vision=request.vision_seconds,
        prefill=request.answered - request.started,
        decode=None if output.finish_reason is None else now - request.answered,
        arrived=request.arrived_at,
        before_vision=max(0.0, request.vision_started - request.arrived),
    )
    return msgspec.structs.replace(output, timings=timings)


def _snapshot(request: Request, unfinished: Container[bytes], *, runs: bool) -> RequestSnapshot:
    """unfinished: keys of partly encoded images. runs: whether the request is in the batch."""
    has_run = request.num_cached is not None
    images = request.images_for(0, request.num_prompt_tokens)
    return RequestSnapshot(
        request_id=request.request_id,
        state="running" if runs else "preempted" if has_run else "waiting",
        num_prompt_tokens=request.num_prompt_tokens,
        num_tokens=len(request.token_ids),
        num_computed_tokens=request.num_computed,
        num_cached_tokens=request.num_cached or 0,
        num_images=len(images),
        num_blocks=sum(len(table.held) for table in request.tables),
        images_in_progress=sum(image.key in unfinished for image in images),
        adapter_shares=[one / (sum(map(abs, request.scalings)) or 1.0) for one in request.scalings],
    )


def _cache_type(config: EngineConfig, model: LoadedModel) -> str:
    return config.kv_cache_dtype if config.kv_cache_dtype != "auto" else str(model.dtype).removeprefix("torch.")


def _log_cache(config: EngineConfig, model: LoadedModel, sizes: CacheSizes) -> None:
    of_tokens, length = sizes.of_tokens, min(USUAL_TOKENS, sizes.max_model_len)
    page, chunk, columns = of_tokens.page, config.max_num_batched_tokens, len(of_tokens.windows)
    logger.info(
        "KV cache: %d blocks of %d tokens%s, %s, %d bytes a token; %.1f MB for 1,000, room for %d requests of %d",
        sizes.pages, config.block_size, f" ({columns} for all layers)" if columns > 1 else "",
        _cache_type(config, model), of_tokens.block // config.block_size,
        of_tokens.pages(1000, chunk) * page / 1e6, sizes.pages // of_tokens.pages(length, chunk), length,
    )  # fmt: skip
    if sizes.slots:
        on_host = f", and for {sizes.host_slots} in host memory" if sizes.host_slots else ""
        size = sizes.state_bytes / 1e6
        logger.info("State cache: room for %d states or checkpoints of %.1f MB%s", sizes.slots, size, on_host)

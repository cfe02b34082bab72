"""Runs scheduled steps: vision tower, decoder over one flat batch, sampling."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from vlmserve.cache.tiers import DiskTier
from vlmserve.devices.device import Clock
from vlmserve.devices.out_of_memory import MEMORY_ERRORS, is_out_of_memory
from vlmserve.kernels.attention import LayerCache
from vlmserve.models.image_rows import place_images
from vlmserve.models.protocols import LoadedModel
from vlmserve.runner.adapters import RunnerAdapters
from vlmserve.runner.assistant_drafts import AssistantDrafts
from vlmserve.runner.batch import Batch, BatchBuilder
from vlmserve.runner.encoder import ImageEncoder
from vlmserve.runner.heads.reading import head_rows, read_rows, write_results
from vlmserve.runner.kv import Contents, KVTensors, PoolSizes
from vlmserve.runner.predictions import Predictions
from vlmserve.runner.prompt_logprobs import score_prompts
from vlmserve.runner.requests import RequestStates, ScheduledRequest
from vlmserve.runner.run import Run
from vlmserve.runner.sampling import TokenSampler, append_drawn, can_draw_later
from vlmserve.sampling.guide import MakeMatcher
from vlmserve.sampling.sampler import changes_of, filters_of
from vlmserve.steps import DiskStores, ModelRunnerOutput, RequestFailure, RunTimings, SchedulerOutput

logger = logging.getLogger(__name__)


def _costliest(scheduled: list[ScheduledRequest]) -> ScheduledRequest:
    """The request with the most tokens; the last one of several."""
    return max(reversed(scheduled), key=lambda request: request.num_tokens)


def _fail(
    output: ModelRunnerOutput, scheduled: list[ScheduledRequest], failing: list[ScheduledRequest]
) -> list[ScheduledRequest]:
    for request in failing:
        output.token_ids[request.state.request_id] = []
        output.failures[request.state.request_id] = RequestFailure("out_of_memory")
    ended = set(output.failures)
    return [request for request in scheduled if request.state.request_id not in ended]


def _wanted_rows(batch: Batch, scheduled: list[ScheduledRequest], of_heads: Tensor | None) -> Tensor | None:
    """Return the rows whose hidden states are needed: sampled rows, then heads' rows.

    None: all rows, because all are sampled, a prompt is scored, the device repeats the step, or heads read rows with
    adapters.
    """
    decodes_only = batch.metadata.num_decodes == len(batch.metadata.query_lens)
    if decodes_only or batch.is_repeatable or (of_heads is not None and batch.adapters is not None):
        return None
    if any(request.state.num_scored is not None for request in scheduled):
        return None
    return batch.sampled_rows if of_heads is None else torch.cat([batch.sampled_rows, of_heads])


def _mixed(scheduled: list[ScheduledRequest], num_columns: int) -> list[ScheduledRequest]:
    return [request for request in scheduled if len(request.state.block_tables) > num_columns]


def _parted(
    hidden: Tensor, batch: Batch, wanted: Tensor | None, of_heads: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """wanted: the rows of `hidden`."""
    if wanted is None:
        return hidden[batch.sampled_rows], None if of_heads is None else hidden[of_heads]
    count = len(batch.sampled_rows)
    return (hidden, None) if of_heads is None else (hidden[:count], hidden[count:])


def _note_memory_error(error: Exception, model: LoadedModel) -> None:
    """Raises other errors, and this one if other ranks continue with the step."""
    if model.ranks is not None or not is_out_of_memory(error):
        raise error
    logger.warning("Memory ran out: %s", error)


def _keep(tier: DiskTier, stored: Contents, ids: Sequence[tuple[int, bytes]], model: LoadedModel) -> None:
    size = stored.num_bytes
    taken = ids[: tier.room // size]
    try:
        contents = stored.of([number for number, _ in taken]) if taken else ()
    except MEMORY_ERRORS as error:
        _note_memory_error(error, model)
        taken, contents = (), ()
    for (_, key), content in zip(taken, contents, strict=True):
        tier.store(key, size, partial(np.asarray, content))
    tier.note_dropped(len(ids) - len(taken))


class RunningStep:
    def __init__(self, finish: Callable[[], ModelRunnerOutput]) -> None:
        self._finish = finish

    def result(self) -> ModelRunnerOutput:
        """Wait for the output. Call it once. Raises the step's error."""
        return self._finish()


def _predictions(
    model: LoadedModel, block_size: int, num_columns: int, caches: list[LayerCache]
) -> Predictions | AssistantDrafts | None:
    if model.assistant is None:
        return Predictions.of(model, block_size, num_columns, caches)
    batches = BatchBuilder(block_size, model.device, num_columns=num_columns)
    return AssistantDrafts(model.assistant, model.language_model, batches, caches)


def _raising(error: Exception) -> Callable[[], NoReturn]:
    def finish() -> NoReturn:
        raise error

    return finish


class ModelRunner:
    """Owns the model, KV tensors, image embeddings and request states. It knows requests only from steps.

    make_matcher: for a request's grammar. padding_block: the last KV block, which padding rows write to.
    """

    def __init__(
        self,
        model: LoadedModel,
        sizes: PoolSizes,
        make_matcher: MakeMatcher,
        adapters: RunnerAdapters | None = None,
    ) -> None:
        self.model = model
        self.block_size, self.padding_block = sizes.block_size, sizes.pages
        self._adapters = adapters
        self.requests = RequestStates(model.language_model, make_matcher, model.output_layers)
        waits = model.device.draw_later is not None
        self.sampler = TokenSampler(model.device.draw, model.device.torch_device, waits=waits)
        self.images = ImageEncoder(model, adapters)
        self.num_columns = columns = len(model.language_model.cache_layout.windows)
        self._has_states = bool(model.language_model.state_specs)
        self._batches = BatchBuilder(
            sizes.block_size, model.device, sizes.pages, self.images.embeddings, columns, has_states=self._has_states
        )
        self._kv = KVTensors(model, sizes)
        self.predictions = _predictions(model, sizes.block_size, columns, self._kv.layers)
        # tokens that the last step sampled asynchronously, and each request's index
        self._drawn = torch.zeros(1, dtype=torch.int32, device=model.device.torch_device)
        self._drawn_rows: dict[str, int] = {}

    @property
    def takes_adapters(self) -> bool:
        return self._adapters is not None

    def reserving_adapters(self) -> AbstractContextManager[None]:
        """Launch adapter kernels even if no slot changes a layer."""
        return nullcontext() if self._adapters is None else self._adapters.reserving()

    @property
    def blocks(self) -> KVTensors:
        return self._kv

    def keep_images(self, tier: DiskTier) -> None:
        self.images.tier = tier

    def keep(self, tier: DiskTier, stores: DiskStores) -> None:
        """Write blocks and states, as many as fit, before a later step changes them."""
        for stored, ids in ((self._kv.block_contents, stores.blocks), (self._kv.state_contents, stores.states)):
            if ids:
                _keep(tier, stored, ids, self.model)
        if stores.forgotten:
            tier.forget(stores.forgotten)

    def warm_up(self) -> tuple[int, float]:
        return self.images.warm_up()

    def tiles_to_capture(self) -> Sequence[int]:
        return self.images.tiles_to_capture()

    def encode_tiles(self, count: int) -> None:
        self.images.encode_tiles(count)

    def submit(self, step: SchedulerOutput) -> RunningStep:
        """Returns early if the device samples asynchronously. Take results in the order of submission."""
        try:
            return RunningStep(self._launch(step))
        except Exception as error:
            return RunningStep(_raising(error))

    @torch.inference_mode()
    def collect(self, timeout: float) -> ModelRunnerOutput:
        """Return tokens of earlier steps that waited for slow grammars. timeout: seconds."""
        output = ModelRunnerOutput()
        self.sampler.collect(timeout, output)
        return output

    @torch.inference_mode()
    def _launch(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """The returned function waits for the step's output."""
        device = self.model.device
        clock = device.clock()
        if self._adapters is not None:
            self._adapters.load(step.adapter_loads)
        self._kv.prepare(step)
        if self.predictions is not None:
            self.predictions.copied(step.block_copies)
        clock.mark()
        products = self.images.run(step)
        clock.mark()
        output = ModelRunnerOutput()
        scheduled = self.requests.update(step)
        if device.draw_later is not None and not self._drawn_rows:
            # the previous step ran out of memory before it sampled these requests' tokens
            scheduled = [request for request in scheduled if not request.pending]
        # requests with late rows that are scheduled again were preempted
        self.sampler.drop(step.finished_request_ids, scheduled)
        if lacking := self.images.lacking(scheduled):
            scheduled = _fail(output, scheduled, lacking)
        predicts = bool(step.num_predicted)
        run = self._compute(scheduled, clock, predicts=predicts) if scheduled else None
        while scheduled and run is None:
            scheduled = _fail(output, scheduled, [_costliest(scheduled)])
            if self._has_states:
                # computed layers have already changed states
                output.undone = [request.state.request_id for request in scheduled]
                break
            run = self._compute(scheduled, None, predicts=predicts) if scheduled else None
        if run is None:
            self._drawn_rows = {}
            self.sampler.collect(0.0, output)
            transfer, vision, *_ = clock.seconds()
            output.timings = RunTimings(transfer=transfer, vision=vision, products=products)
            return lambda: output
        output.scalings = run.scalings
        clock.mark()
        results, tokens = self._read(run, scheduled, output, step.num_predicted)
        clock.mark()

        def finish() -> ModelRunnerOutput:
            if tokens is not None:
                append_drawn(tokens(), run.sampled, output)
            if results:
                write_results(results, output)
            transfer, vision, build, model, sampling = clock.seconds()
            output.timings = RunTimings(transfer, build, vision, model, sampling, products)
            return output

        return finish

    def _read(
        self, run: Run, scheduled: list[ScheduledRequest], output: ModelRunnerOutput, num_predicted: Mapping[str, int]
    ) -> tuple[list[tuple[str, Tensor]], Callable[[], list[int]] | None]:
        """Pass rows to heads, sample, score prompts, and draft. Returns results of heads, and what `_sample` returns.

        If memory runs out, requests that lack a token, a result or log-probabilities fail.
        """
        language_model, results, tokens = self.model.language_model, list[tuple[str, Tensor]](), None
        failing = [request for request in scheduled if request.state.head or request.state.num_scored is not None]
        sampling = [request for request in scheduled if request.num_sampled]
        try:
            if run.of_heads is not None:
                results = read_rows(scheduled, run.of_heads, language_model, self._adapters)
            tokens = self._sample(run, scheduled, output)
            sampling = []
            output.prompt_logprobs = score_prompts(scheduled, run.hidden, language_model, self._adapters)
            if self.predictions is not None:
                self.predictions.run(run, scheduled, num_predicted, output)
        except MEMORY_ERRORS as error:
            _note_memory_error(error, self.model)
            if sampling:
                self._drawn_rows = {}
            failing += [request for request in sampling if request.state.request_id not in output.token_ids]
            _fail(output, scheduled, failing)
            results = []
        return results, tokens

    def _sample(
        self, run: Run, scheduled: list[ScheduledRequest], output: ModelRunnerOutput
    ) -> Callable[[], list[int]] | None:
        """The returned function waits for asynchronously sampled tokens."""
        device = self.model.device
        if run.later is None:
            self.sampler.sample(run.logits, scheduled, output)
            return None
        self.sampler.collect(0.0, output)
        drawn = run.later.launch(run.logits, run.batch.extra)
        self._drawn = drawn if run.sampled else self._drawn
        self._drawn_rows = {request.state.request_id: row for row, request in enumerate(run.sampled)}
        return device.download(drawn)

    def _draws_later(self, scheduled: list[ScheduledRequest]) -> bool:
        return can_draw_later(scheduled)

    def _compute(self, scheduled: list[ScheduledRequest], clock: Clock | None, *, predicts: bool) -> Run | None:
        """Return hidden states and logits. None: memory ran out. predicts: hidden states of all rows are needed."""
        device = self.model.device
        later = device.draw_later
        if later is not None and not self._draws_later(scheduled):
            later = None
        sampled: list[ScheduledRequest] = []
        extra: list[np.ndarray] = []
        if later is not None:
            sampled = [request for request in scheduled if request.num_sampled]
            rows = [request.state.sampling_row(int(request.pending)) for request in sampled]
            extra = later.arrays(*filters_of(rows), changes_of(rows))
        sums: dict[str, list[float]] = {}
        try:
            batch = self._build(scheduled, extra, clock)
            if self._adapters is not None:
                scalings = self._scalings(scheduled, batch.scaling_pass, sums)
                self._adapters.use_for_batch(scheduled, batch, scalings)
            of_heads = head_rows(scheduled, device.torch_device)
            reads_all = predicts and self.predictions is not None and self.predictions.reads_all_rows
            wanted = None if reads_all else _wanted_rows(batch, scheduled, of_heads)
            embeddings, hidden = self.hidden_states(batch, wanted)
            if self._adapters is not None:
                self._adapters.use_for_samples()
            own, read = _parted(hidden, batch, wanted, of_heads)
            logits = self.logits_of(own)
        except MEMORY_ERRORS as error:
            _note_memory_error(error, self.model)
            return None
        return Run(batch, wanted, embeddings, hidden, read, logits, later, sampled, sums)

    def _build(self, scheduled: list[ScheduledRequest], extra: list[np.ndarray], clock: Clock | None) -> Batch:
        try:
            if self._adapters is None:
                return self._batches.build(scheduled, self._drawn_rows, extra)
            mixed = _mixed(scheduled, self.num_columns)
            slots, mixed_slots = self._adapters.slots_of(scheduled), self._adapters.slots_of_scaling_pass(mixed)
            return self._batches.build(scheduled, self._drawn_rows, extra, slots, mixed, mixed_slots)
        finally:
            if clock is not None:
                clock.mark()

    def _scalings(
        self, scheduled: list[ScheduledRequest], batch: Batch | None, sums: dict[str, list[float]]
    ) -> Tensor | None:
        """Run the scaling pass if a request needs it. sums: see `ModelRunnerOutput`."""
        if batch is None:
            return None
        assert self._adapters is not None
        mixed = _mixed(scheduled, self.num_columns)
        self._adapters.use_for_scaling_pass(mixed, batch)
        return self._adapters.scalings(scheduled, mixed, self.hidden_states(batch)[1], sums)

    def hidden_states(self, batch: Batch, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns embeddings and final hidden states ``[tokens, hidden_size]``, the latter of `wanted` rows only."""
        language_model = self.model.language_model
        token_ids = batch.token_ids
        if batch.drawn_rows is not None:
            # A request that could not be sampled has -1. Its result is discarded.
            token_ids = self._drawn.clamp(min=0)[batch.drawn_rows].long()
        embeddings = language_model.embed(token_ids)
        features = place_images(embeddings, batch.image_rows, self.images.embeddings)
        caches, states = self._kv.layers, self._kv.states
        positions, metadata = batch.positions, batch.metadata
        return embeddings, language_model.forward(embeddings, positions, metadata, caches, features, wanted, states)

    def logits_of(self, hidden: Tensor) -> Tensor:
        language_model = self.model.language_model
        out = self.model.device.logits_buffer(len(hidden), language_model.vocab_size)
        return language_model.logits(hidden, out)

"""Runs scheduled steps: images through the vision encoder, one flat batch through the decoder, then sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from vlmserve.models.protocols import LoadedModel
from vlmserve.runner.adapters import RunnerAdapters
from vlmserve.runner.batch import Batch, BatchBuilder
from vlmserve.runner.encoder import ImageEncoder
from vlmserve.runner.kv import KVTensors
from vlmserve.runner.prompt_logprobs import score_prompts
from vlmserve.runner.requests import MakeMatcher, RequestStates
from vlmserve.runner.sampling import append_drawn, can_draw_later, sample_tokens
from vlmserve.sampling.sampler import changes_of, filters_of
from vlmserve.steps import ModelRunnerOutput, RunTimings, SchedulerOutput


class RunningStep:
    """A step that was submitted."""

    def __init__(self, finish: Callable[[], ModelRunnerOutput]) -> None:
        self._finish = finish

    def result(self) -> ModelRunnerOutput:
        """Its output, once the device has computed it; to be asked for once. Raises what went wrong in it."""
        return self._finish()


def _raising(error: Exception) -> Callable[[], NoReturn]:
    def finish() -> NoReturn:
        raise error

    return finish


class ModelRunner:
    """Owns the model, the KV cache's tensors, the embeddings of images, and the states of requests. All that it knows
    of requests comes from the steps that it runs.

    make_matcher: makes a matcher of a request's grammar, which was compiled before.
    """

    def __init__(
        self,
        model: LoadedModel,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        make_matcher: MakeMatcher,
        adapters: RunnerAdapters | None = None,
    ) -> None:
        """adapters: the model's slots for them; None: it has none."""
        self.model = model
        self._adapters = adapters
        self._requests = RequestStates(model.language_model, make_matcher)
        # The block behind all others belongs to rows that only pad a batch.
        self._images = ImageEncoder(model, adapters)
        self._batches = BatchBuilder(block_size, model.device, num_blocks, self._images.embeddings)
        self._kv = KVTensors(model, num_blocks, num_host_blocks, block_size)
        # What the last step drew, and which request each is of.
        self._drawn = torch.empty(0, dtype=torch.int32)
        self._drawn_rows: dict[str, int] = {}

    def warm_up(self) -> tuple[int, float]:
        """See `ImageEncoder.warm_up`."""
        return self._images.warm_up()

    def submit(self, step: SchedulerOutput) -> RunningStep:
        """Run a step. Where the device draws tokens by itself, this returns before it has; steps run in the order in
        which they are submitted, and their results are to be taken in that order."""
        try:
            return RunningStep(self._launch(step))
        except Exception as error:
            return RunningStep(_raising(error))

    @torch.inference_mode()
    def _launch(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Start a step; what is returned waits for its output."""
        device = self.model.device
        clock = device.clock()
        if self._adapters is not None:
            self._adapters.load(step.adapter_loads)
        self._kv.zero(step.blocks_to_zero)
        self._kv.copy(step.block_copies)
        clock.mark()
        products = self._images.run(step)
        clock.mark()
        scheduled = self._requests.update(step)
        output = ModelRunnerOutput()
        if not scheduled:
            transfer, vision = clock.seconds()
            output.timings = RunTimings(transfer=transfer, vision=vision, products=products)
            return lambda: output
        later = device.draw_later if can_draw_later(scheduled) else None
        sampled = [request for request in scheduled if request.num_sampled]
        further: list[np.ndarray] = []
        if later is not None:
            rows = [request.state.sampling_row(int(request.pending)) for request in sampled]
            further = later.arrays(*filters_of(rows), changes_of(rows))
        batch = self._batches.build(scheduled, self._drawn_rows, further)
        clock.mark()
        if self._adapters is not None:
            self._adapters.use_for_batch(scheduled, len(batch.token_ids))
        hidden = self._hidden(batch)
        if self._adapters is not None:
            self._adapters.use_for_samples(scheduled)
        logits = self._logits(hidden[batch.sampled_rows])
        clock.mark()
        tokens: Callable[[], list[int]] | None = None
        if later is None:
            sample_tokens(logits, scheduled, output, device.draw)
        else:
            self._drawn = later.launch(logits, batch.further)
            self._drawn_rows = {request.state.request_id: row for row, request in enumerate(sampled)}
            tokens = device.download(self._drawn)
        output.prompt_logprobs = score_prompts(scheduled, hidden, self.model.language_model, self._adapters)
        clock.mark()

        def finish() -> ModelRunnerOutput:
            if tokens is not None:
                append_drawn(tokens(), sampled, output)
            transfer, vision, build, model, sampling = clock.seconds()
            output.timings = RunTimings(transfer, build, vision, model, sampling, products)
            return output

        return finish

    def _hidden(self, batch: Batch) -> Tensor:
        """``[tokens, hidden_size]``: the final hidden states."""
        language_model = self.model.language_model
        token_ids = batch.token_ids
        if batch.drawn_rows is not None:
            # Where nothing could be drawn, -1 is no token, and what follows on it is for nobody.
            token_ids = self._drawn.clamp(min=0)[batch.drawn_rows].long()
        embeddings = language_model.embed(token_ids)
        for rows in batch.image_rows:
            image = self._images.embeddings[rows.key][rows.offset : rows.offset + rows.last - rows.first]
            embeddings[rows.first : rows.last] = image
        return language_model.forward(embeddings, batch.positions, batch.metadata, self._kv.layers)

    def _logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[rows, vocabulary]``."""
        language_model = self.model.language_model
        out = self.model.device.logits_buffer(len(hidden), language_model.vocab_size)
        return language_model.logits(hidden, out)

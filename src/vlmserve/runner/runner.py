"""Runs scheduled steps: images through the vision encoder, one flat batch through the decoder, then sampling."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import Tensor

from vlmserve.layers.attention import CrossRows
from vlmserve.models.protocols import LoadedModel
from vlmserve.runner.adapters import RunnerAdapters
from vlmserve.runner.batch import Batch, BatchBuilder
from vlmserve.runner.encoder import ImageEncoder
from vlmserve.runner.kv import KVTensors
from vlmserve.runner.prompt_logprobs import score_prompts
from vlmserve.runner.requests import MakeMatcher, RequestStates
from vlmserve.runner.sampling import sample_tokens
from vlmserve.steps import ModelRunnerOutput, RunTimings, SchedulerOutput


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
        self._batches = BatchBuilder(block_size, model.device, padding_block=num_blocks)
        self._kv = KVTensors(model, num_blocks, num_host_blocks, block_size)
        self._images = ImageEncoder(model, adapters)

    def warm_up(self) -> tuple[int, float]:
        """See `ImageEncoder.warm_up`."""
        return self._images.warm_up()

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run a step. It has finished when this returns; steps run in the order in which they are submitted."""
        handle: Future[ModelRunnerOutput] = Future()
        try:
            handle.set_result(self._run(step))
        except Exception as error:
            handle.set_exception(error)
        return handle

    @torch.inference_mode()
    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        clock = self.model.device.clock()
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
            return output
        batch = self._batches.build(scheduled)
        clock.mark()
        if self._adapters is not None:
            self._adapters.use_for_batch(scheduled, len(batch.token_ids))
        hidden = self._hidden(batch)
        if self._adapters is not None:
            self._adapters.use_for_samples(scheduled)
        logits = self._logits(hidden[batch.sampled_rows])
        clock.mark()
        sample_tokens(logits, scheduled, output, self.model.device.draw)
        output.prompt_logprobs = score_prompts(scheduled, hidden, self.model.language_model, self._adapters)
        clock.mark()
        transfer, vision, build, model, sampling = clock.seconds()
        output.timings = RunTimings(transfer, build, vision, model, sampling, products)
        return output

    def _hidden(self, batch: Batch) -> Tensor:
        """``[tokens, hidden_size]``: the final hidden states."""
        language_model = self.model.language_model
        embeddings = language_model.embed(batch.token_ids)
        for rows in batch.image_rows:
            image = self._images.embeddings[rows.key][rows.offset : rows.offset + rows.last - rows.first]
            embeddings[rows.first : rows.last] = image
        cross = [CrossRows(rows.first, rows.last, self._images.embeddings[rows.key]) for rows in batch.cross_rows]
        return language_model.forward(embeddings, batch.positions, batch.metadata, self._kv.layers, cross)

    def _logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[rows, vocabulary]``."""
        language_model = self.model.language_model
        out = self.model.device.logits_buffer(len(hidden), language_model.vocab_size)
        return language_model.logits(hidden, out)

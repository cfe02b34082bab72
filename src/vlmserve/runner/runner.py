"""Runs scheduled steps: pictures through the vision encoder, one flat batch through the decoder, then sampling."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmserve.layers.attention import CrossRows
from vlmserve.models.protocols import LoadedModel
from vlmserve.runner.batch import Batch, BatchBuilder
from vlmserve.runner.kv import KVTensors
from vlmserve.sampling.sampler import SamplingRow, sample
from vlmserve.scheduler.scheduler import Look, Step
from vlmserve.scheduler.sequence import Sequence
from vlmserve.types import ImageInput

_NOTHING_BANNED: frozenset[int] = frozenset()


@dataclass(slots=True)
class RunTimings:
    """Seconds that the last step spent in each part."""

    transfer: float = 0.0
    build: float = 0.0
    vision: float = 0.0
    model: float = 0.0
    sample: float = 0.0


class ModelRunner:
    """Owns the model, the KV cache's tensors, the embeddings of cached pictures and what sequences look at."""

    def __init__(self, model: LoadedModel, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.model = model
        self.timings = RunTimings()
        self._batches = BatchBuilder(block_size, model.device)
        self._kv = KVTensors(model, num_blocks, num_host_blocks, block_size)
        self._embeddings: dict[bytes, Tensor] = {}
        self._logits_memory = torch.empty(0, model.language_model.vocab_size)

    @torch.inference_mode()
    def run(self, step: Step) -> list[int | None]:
        """Run a step. Returns a token for each chunk that samples, in order; None where the logits are unusable."""
        clock = [time.perf_counter()]
        self._kv.clear(step.clear)
        self._kv.transfer(step.transfers)
        clock.append(time.perf_counter())
        if not step.chunks:
            self.timings = RunTimings(transfer=clock[1] - clock[0])
            return []
        self._encode(step.encode, step.evict)
        self._look(step.look)
        clock.append(time.perf_counter())
        batch = self._batches.build(step)
        clock.append(time.perf_counter())
        logits = self._logits(batch)
        clock.append(time.perf_counter())
        sequences = [chunk.sequence for chunk in step.chunks if chunk.samples]
        _hold_to_grammars(logits, sequences)
        rows = [_sampling_row(sequence) for sequence in sequences]
        tokens = sample(logits, rows, native=self.model.native)
        clock.append(time.perf_counter())
        transfer, vision, build, model, sampling = (after - before for before, after in itertools.pairwise(clock))
        self.timings = RunTimings(transfer=transfer, build=build, vision=vision, model=model, sample=sampling)
        return tokens

    def _encode(self, images: list[ImageInput], evict: list[bytes]) -> None:
        for key in evict:
            del self._embeddings[key]
        if not images:
            return
        if self.model.vision is None:
            raise ValueError("the model has no vision encoder")
        # Not from_numpy: it warns of arrays that are read-only, as those of pictures are that requests share.
        pixels = [torch.tensor(image.pixels, device=self.model.device, dtype=self.model.dtype) for image in images]
        encoded = self.model.vision.encode(pixels, [image.tiling for image in images])
        for image, embeddings in zip(images, encoded, strict=True):
            # A copy: a view would keep the whole batch of pictures in memory until the last of them is evicted.
            self._embeddings[image.key] = embeddings.clone()

    def _look(self, looks: list[Look]) -> None:
        if not looks:
            return
        if self.model.cross is None:
            raise ValueError("the model has no cross attention")
        features = [self._embeddings[look.cross.image.key] for look in looks]
        states = self.model.cross.encode(features, [look.cross.token_ids for look in looks])
        for look, rows in zip(looks, states, strict=True):
            self._embeddings[look.key] = rows

    def _logits(self, batch: Batch) -> Tensor:
        """float32 ``[sampled rows, vocabulary]``. Native kernels write them where the next step's go as well: pages of
        fresh memory would cost more than all of sampling."""
        language_model = self.model.language_model
        embeddings = language_model.embed(batch.token_ids)
        for rows in batch.image_rows:
            picture = self._embeddings[rows.key][rows.offset : rows.offset + rows.last - rows.first]
            embeddings[rows.first : rows.last] = picture
        cross = [CrossRows(rows.first, rows.last, self._embeddings[rows.key]) for rows in batch.looking]
        hidden = language_model.forward(embeddings, batch.positions, batch.metadata, self._kv.layers, cross)
        hidden = hidden[batch.sampled_rows]
        if not self.model.native:
            return language_model.logits(hidden)
        if len(hidden) > len(self._logits_memory):
            self._logits_memory = torch.empty(len(hidden), language_model.vocab_size)
        return language_model.logits(hidden, self._logits_memory[: len(hidden)])


def _hold_to_grammars(logits: Tensor, sequences: list[Sequence]) -> None:
    """Make what a row's grammar forbids impossible, in place."""
    for number, sequence in enumerate(sequences):
        if sequence.matcher is None:
            continue
        allowed = sequence.matcher.allowed(sequence.end_token_ids, may_end=sequence.may_end)
        logits[number].masked_fill_(torch.from_numpy(~allowed).to(logits.device, non_blocking=True), -torch.inf)


def _sampling_row(sequence: Sequence) -> SamplingRow:
    # Where there is a grammar, it knows when an answer may end.
    banned = _NOTHING_BANNED if sequence.may_end or sequence.matcher is not None else sequence.end_token_ids
    return SamplingRow(sequence.params, sequence.seed, sequence.num_generated, banned)

"""Runs scheduled steps: pictures through the vision encoder, one flat batch through the decoder, then sampling."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vlmserve.layers.attention import CrossRows
from vlmserve.models.protocols import LoadedModel
from vlmserve.runner.batch import Batch, BatchBuilder
from vlmserve.runner.kv import KVTensors
from vlmserve.sampling.logprobs import token_logprobs
from vlmserve.sampling.sampler import SamplingRow, sample
from vlmserve.scheduler.scheduler import Look, ScheduledChunk, Step
from vlmserve.types import ImageInput, TokenLogprobs

_NOTHING_BANNED: frozenset[int] = frozenset()
_SCORES_AT_ONCE = 2**23
"""Logits of a prompt that may be in memory at a time."""


@dataclass(slots=True)
class RunTimings:
    """Seconds that the last step spent in each part."""

    transfer: float = 0.0
    build: float = 0.0
    vision: float = 0.0
    model: float = 0.0
    sample: float = 0.0


class RunResult(NamedTuple):
    """What came of a step.

    tokens: one for each chunk that samples, in order; None where the logits are unusable. logprobs: as many, None where
    nobody asks. prompt_logprobs: by request, of the tokens of its prompt that come next; None for those of pictures.
    """

    tokens: list[int | None]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: dict[str, list[TokenLogprobs | None]]


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
    def run(self, step: Step) -> RunResult:
        """Run a step."""
        clock = [time.perf_counter()]
        self._kv.clear(step.clear)
        self._kv.transfer(step.transfers)
        clock.append(time.perf_counter())
        if not step.chunks:
            self.timings = RunTimings(transfer=clock[1] - clock[0])
            return RunResult([], [], {})
        self._encode(step.encode, step.evict)
        self._look(step.look)
        clock.append(time.perf_counter())
        batch = self._batches.build(step)
        clock.append(time.perf_counter())
        hidden = self._hidden(batch)
        logits = self._logits(hidden[batch.sampled_rows])
        clock.append(time.perf_counter())
        rows = [_sampling_row(chunk) for chunk in step.chunks if chunk.samples]
        result = RunResult(*_sample(logits, rows, native=self.model.native), self._score_prompts(step, hidden))
        clock.append(time.perf_counter())
        transfer, vision, build, model, sampling = (after - before for before, after in itertools.pairwise(clock))
        self.timings = RunTimings(transfer=transfer, build=build, vision=vision, model=model, sample=sampling)
        return result

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

    def _hidden(self, batch: Batch) -> Tensor:
        """``[tokens, hidden_size]``: the final hidden states."""
        language_model = self.model.language_model
        embeddings = language_model.embed(batch.token_ids)
        for rows in batch.image_rows:
            picture = self._embeddings[rows.key][rows.offset : rows.offset + rows.last - rows.first]
            embeddings[rows.first : rows.last] = picture
        cross = [CrossRows(rows.first, rows.last, self._embeddings[rows.key]) for rows in batch.looking]
        return language_model.forward(embeddings, batch.positions, batch.metadata, self._kv.layers, cross)

    def _logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[rows, vocabulary]``. Native kernels write them where the next step's go as well: pages of fresh
        memory would cost more than all of sampling."""
        language_model = self.model.language_model
        if not self.model.native:
            return language_model.logits(hidden)
        if len(hidden) > len(self._logits_memory):
            self._logits_memory = torch.empty(len(hidden), language_model.vocab_size)
        return language_model.logits(hidden, self._logits_memory[: len(hidden)])

    def _score_prompts(self, step: Step, hidden: Tensor) -> dict[str, list[TokenLogprobs | None]]:
        """How likely the tokens are that follow on this step's, where prompts want to know. hidden: of all tokens."""
        scores = {}
        row = 0
        for chunk in step.chunks:
            if chunk.sequence.prompt_logprobs is not None:
                scores[chunk.sequence.request_id] = self._score_prompt(chunk, hidden[row : row + chunk.num_tokens])
            row += chunk.num_tokens
        return scores

    def _score_prompt(self, chunk: ScheduledChunk, hidden: Tensor) -> list[TokenLogprobs | None]:
        """hidden: of the chunk's tokens. After a preemption some of what follows on them has its scores already."""
        sequence, start = chunk.sequence, chunk.sequence.num_computed
        first = len(sequence.prompt_logprobs or ())
        end = min(start + chunk.num_tokens + 1, sequence.num_prompt_tokens)
        pictured = {place for span in sequence.spans_between(first, end) for place in range(span.start, span.end)}
        places = [place for place in range(first, end) if place not in pictured]
        language_model = self.model.language_model
        at_once = max(1, _SCORES_AT_ONCE // language_model.vocab_size)
        scores: dict[int, TokenLogprobs] = {}
        for some in (places[begin : begin + at_once] for begin in range(0, len(places), at_once)):
            logits = language_model.logits(hidden[[place - 1 - start for place in some]])
            followers = [sequence.token_ids[place] for place in some]
            num_top = [sequence.params.prompt_logprobs or 0] * len(some)
            scores.update(zip(some, token_logprobs(logits, followers, num_top), strict=True))
        return [scores.get(place) for place in range(first, end)]


def _sample(
    logits: Tensor, rows: list[SamplingRow], *, native: bool
) -> tuple[list[int | None], list[TokenLogprobs | None]]:
    """A token for each row, and how likely it was where that is asked for."""
    asking = [number for number, row in enumerate(rows) if row.params.logprobs is not None]
    raw = logits[asking] if asking else None  # drawing overwrites them
    tokens = [
        token if token is None or row.matcher is None else row.matcher.settle(token)
        for token, row in zip(sample(logits, rows, native=native), rows, strict=True)
    ]
    scores: list[TokenLogprobs | None] = [None] * len(rows)
    if raw is not None:
        chosen = [tokens[number] or 0 for number in asking]
        num_top = [rows[number].params.logprobs or 0 for number in asking]
        for number, score in zip(asking, token_logprobs(raw, chosen, num_top), strict=True):
            scores[number] = score
    return tokens, scores


def _sampling_row(chunk: ScheduledChunk) -> SamplingRow:
    sequence = chunk.sequence
    if sequence.matcher is None:
        banned, allowed = _NOTHING_BANNED if sequence.may_end else sequence.end_token_ids, None
    else:
        left = sequence.max_len - len(sequence.token_ids)
        allowed = sequence.matcher.allowed(sequence.end_token_ids, may_end=sequence.may_end, left=left)
        banned = _NOTHING_BANNED
    return SamplingRow(
        sequence.params, sequence.seed, sequence.num_generated, banned, sequence.adjustment, allowed, sequence.matcher
    )

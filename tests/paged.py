"""Sequences in a paged cache, without a scheduler: what a test needs to call a backend or a decoder by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from vlmserve.kernels.attention import BatchMetadata, CrossRows, LayerCache
from vlmserve.kernels.blocks import allocate_states
from vlmserve.kernels.states import Segments, StateRows
from vlmserve.models.protocols import LanguageModel


class BlockTables:
    """Block tables over a pool whose blocks are handed out in random order."""

    def __init__(self, lengths: Sequence[int], block_size: int, seed: int = 0) -> None:
        """lengths: the longest context of each sequence."""
        self.block_size = block_size
        counts = [-(-length // block_size) for length in lengths]
        # One block more than needed: block 0 is nobody's, though padding names it.
        blocks = list(range(1, sum(counts) + 1))
        random.Random(seed).shuffle(blocks)
        self.num_blocks = len(blocks) + 1
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]

    def metadata(self, chunks: Sequence[tuple[int, int, int]], device: torch.device | None = None) -> BatchMetadata:
        """Of a batch of chunks ``(sequence, tokens in the cache before, new tokens)``, decodes first. device: where it
        lies; None: on the CPU."""
        spans = [(before, before + new) for _, before, new in chunks]
        width = max(-(-end // self.block_size) for _, end in spans)
        tables = [self.tables[sequence][:width] for sequence, _, _ in chunks]
        return BatchMetadata.of_chunks(spans, tables, self.block_size, device)


class PagedRun:
    """Feeds whole sequences of embeddings through a decoder in batches of chunks, and collects all logits."""

    def __init__(
        self,
        model: LanguageModel,
        sequences: Sequence[Tensor],
        block_size: int = 4,
        seed: int = 0,
        cross_states: Sequence[Tensor] = (),
    ) -> None:
        """sequences: ``[length, hidden_size]`` each. cross_states: `CrossRows.states` of each, if they attend to
        any."""
        self.model = model
        self.sequences = sequences
        self.blocks = BlockTables([len(sequence) for sequence in sequences], block_size, seed)
        self.caches: list[LayerCache] = model.allocate_cache(self.blocks.num_blocks, block_size)
        self.cross_states = cross_states
        kind = sequences[0].dtype, sequences[0].device
        self.states = allocate_states(model.state_specs, 1 + len(sequences), *kind)
        self.done = [0] * len(sequences)
        self.logits: list[list[Tensor]] = [[] for _ in sequences]

    @torch.inference_mode()
    def step(self, counts: Sequence[int]) -> None:
        """Compute that many further tokens of each sequence, as far as there are any."""
        chunks = [
            (i, self.done[i], min(count, len(sequence) - self.done[i]))
            for i, (sequence, count) in enumerate(zip(self.sequences, counts, strict=True))
        ]
        chunks = sorted((chunk for chunk in chunks if chunk[2]), key=lambda chunk: chunk[2] > 1)
        if not chunks:
            return
        embeddings = torch.cat([self.sequences[i][before : before + new] for i, before, new in chunks])
        positions = torch.cat([torch.arange(before, before + new) for _, before, new in chunks])
        ends = list(accumulate(new for _, _, new in chunks))
        cross = [
            CrossRows(end - new, end, self.cross_states[i])
            for (i, _, new), end in zip(chunks, ends, strict=True)
            if self.cross_states
        ]
        segments = Segments.of_chunks(
            [(before, before + new) for _, before, new in chunks], [1 + i for i, *_ in chunks]
        )
        metadata = replace(self.blocks.metadata(chunks), cross=cross, states=StateRows.of(segments))
        hidden = self.model.forward(embeddings, positions, metadata, self.caches, states=self.states)
        for (i, _, new), rows in zip(chunks, hidden.split([new for _, _, new in chunks]), strict=True):
            self.logits[i].append(self.model.logits(rows))
            self.done[i] += new

    def finish(self, counts: Sequence[int]) -> list[Tensor]:
        """Repeat the step until all is computed. Returns each sequence's logits, ``[length, vocab_size]``."""
        while any(done < len(sequence) for done, sequence in zip(self.done, self.sequences, strict=True)):
            self.step(counts)
        return [torch.cat(logits) for logits in self.logits]

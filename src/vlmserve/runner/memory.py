"""Memory available for the KV cache."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmserve.devices.graphs import MOST_TILES, captured_sequences
from vlmserve.errors import CapacityError
from vlmserve.kernels.attention import BatchMetadata
from vlmserve.kernels.blocks import allocate_states
from vlmserve.kernels.states import StateRows
from vlmserve.kernels.torch_sampling import Filters
from vlmserve.layer_specs import CacheBytes
from vlmserve.layers.stages import StageBudget, Stages
from vlmserve.levels import Levels
from vlmserve.models.protocols import LoadedModel, TileEncoder

ROW_ARRAYS = 8
"""Arrays of a step with a number for each row: ids, three positions, adapters, and what sampling reads."""
_LEVELS = Levels(1 / 255, (0.5,) * 3, (0.5,) * 3)


@torch.inference_mode()
def run_largest_step(
    model: LoadedModel, *, num_tokens: int, num_rows: int, max_model_len: int, block_size: int
) -> None:
    """Let the device measure the memory of the largest step.

    Runs prompts of `num_tokens` total tokens through the decoder, then `num_rows` rows through output head and
    sampling. max_model_len: tokens of the longest sequence.
    """
    language_model, device = model.language_model, model.device.torch_device
    lens = [max_model_len] * (num_tokens // max_model_len)
    lens += [rest] if (rest := num_tokens - sum(lens)) else []
    positions = torch.cat([torch.arange(length) for length in lens]).to(device)
    blocks_each = -(-max(lens) // block_size)
    tables = np.arange(len(lens) * blocks_each).reshape(len(lens), blocks_each)
    metadata = BatchMetadata.of_chunks([(0, length) for length in lens], tables.tolist(), block_size, device)
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    metadata = replace(metadata, states=StateRows.of_prompts(lens, device))
    caches = language_model.allocate_cache(tables.size, block_size)
    states = allocate_states(language_model.state_specs, 1, model.dtype, device)
    hidden = language_model.forward(language_model.embed(token_ids), positions, metadata, caches, states=states)
    rows = min(num_rows, num_tokens)
    out = model.device.logits_buffer(rows, language_model.vocab_size)
    filters = Filters([1.0] * rows, [0] * rows, [0.9] * rows, [0.0] * rows)
    model.device.draw(language_model.logits(hidden[:rows], out), filters, [0.5] * rows)


@torch.inference_mode()
def run_longest_step(
    model: LoadedModel, *, num_tokens: int, num_seqs: int, max_model_len: int, block_size: int, passes: int = 1
) -> None:
    """Allocate the buffers of captured steps, by a small step with maximum lengths on the host.

    They are for uploads, split-KV and RoPE tables. Only backends that read lengths on the device need it. passes: 2 if
    requests may have X-LoRA.
    """
    if not model.backend.reads_on_device:
        return
    num_decodes = captured_sequences(num_seqs + 1) - 1
    blocks = passes * (num_decodes + 1) * -(-max_model_len // block_size)
    model.device.upload(_largest_arrays(model, passes * (num_tokens + num_decodes), blocks))
    decodes = torch.tensor([num_decodes], dtype=torch.int32, device=model.device.torch_device)
    lens = [*[1] * num_decodes, 2]
    _run_short(model, lens, block_size, decodes=decodes, host_context_lens=[max_model_len] * len(lens))


def _largest_arrays(model: LoadedModel, num_rows: int, num_blocks: int) -> list[np.ndarray]:
    """Arrays of the sizes that `runner.batch` uploads. num_blocks: of all block tables."""
    columns = len(model.language_model.cache_layout.windows)
    return [np.zeros((columns, num_blocks), np.int32), np.zeros((columns + ROW_ARRAYS, num_rows), np.int64)]


@torch.inference_mode()
def run_largest_graphs(model: LoadedModel, *, num_decodes: int, block_size: int) -> None:
    _run_short(model, [1] * num_decodes, block_size)
    if (shape := _tiles_shape(model)) is not None:
        assert isinstance(model.vision, TileEncoder)
        model.vision.encode_tiles(torch.zeros(shape, dtype=model.dtype, device=model.device.torch_device))


def graph_inputs_bytes(model: LoadedModel, num_decodes: int) -> int:
    elements = num_decodes * model.language_model.hidden_size + math.prod(_tiles_shape(model) or (0,))
    return elements * model.dtype.itemsize


def _tiles_shape(model: LoadedModel) -> tuple[int, ...] | None:
    if not isinstance(model.vision, TileEncoder) or (shape := model.vision.example_shape) is None:
        return None
    return (MOST_TILES, *shape[1:])


def _run_short(model: LoadedModel, lens: list[int], block_size: int, **changes: Any) -> None:
    """Run prompts of `lens` tokens, at most 2 each. changes: of the batch's metadata."""
    language_model, device = model.language_model, model.device.torch_device
    tables = [[0] * -(-2 // block_size)] * len(lens)
    metadata = BatchMetadata.of_chunks([(0, length) for length in lens], tables, block_size, device)
    metadata = replace(metadata, states=StateRows.of_prompts(lens, device), **changes)
    rows = torch.zeros(sum(lens), dtype=torch.int64, device=device)
    caches = language_model.allocate_cache(1, block_size)
    states = allocate_states(language_model.state_specs, 1, model.dtype, device)
    language_model.forward(language_model.embed(rows), rows, metadata, caches, states=states)


@torch.inference_mode()
def run_largest_encoding(model: LoadedModel, *, num_tokens: int, num_images: int) -> Stages[list[Tensor]] | None:
    """Let the device measure the memory of encoding as many images as fit into a step.

    Returns an encoding after its first stage, since its memory adds to later steps. Skips towers without example
    images. num_tokens, num_images: maximum per step.
    """
    tower, device = model.vision, model.device
    if tower is None or (shape := tower.example_shape) is None:
        return None
    [embeddings] = tower.encode([_blank(model, shape)], [None])
    count = max(1, num_tokens // len(embeddings))
    shapes = [shape] * min(count, num_images)
    if tower.has_dynamic_resolution:
        # In one large image, more patches attend to each other than in several small images.
        side = math.isqrt(count)
        shapes = [(*shape[:-2], shape[-2] * side, shape[-1] * side)]
    images = [_blank(model, one) for one in shapes]
    tower.encode(images, [None] * len(images))
    budget = StageBudget(device.stage_products, least=device.stage_products, rows=device.stage_rows)
    stages = tower.in_stages(images[:1], [None], budget)
    next(stages, None)
    return stages


def _blank(model: LoadedModel, shape: tuple[int, ...]) -> Tensor:
    return model.device.upload_pixels(np.zeros(shape, np.uint8), model.dtype, _LEVELS)


def num_pages(
    *, budget: int, of_tokens: CacheBytes, max_model_len: int, max_num_seqs: int, max_chunk: int, passes: int = 1
) -> int:
    """Return the pages that fit into `budget` bytes, at most for `max_num_seqs` full contexts.

    max_chunk: maximum tokens of a step. passes: each has its own pages. Raises CapacityError if no block fits.
    """
    useful = passes * max_num_seqs * of_tokens.pages(max_model_len, max_chunk)
    pages = min(budget // of_tokens.page, useful)
    if pages < len(of_tokens.windows):
        raise CapacityError(
            f"the KV cache has {max(budget, 0):,} bytes and a block of {of_tokens.block_size} tokens needs "
            f"{of_tokens.block:,}; "
            "free memory, set --kv-cache-memory, or take a smaller model or dtype"
        )
    return pages

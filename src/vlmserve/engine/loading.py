"""Loads the configured model, and sizes its caches."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vlmserve.cores import MAX_SPINS, SPIN_VARIABLE, engine_threads, spinning_is_bounded
from vlmserve.devices.choice import find_device, free_device_memory
from vlmserve.devices.ranks import device_of_rank
from vlmserve.engine.calibrated import calibrated_copy
from vlmserve.engine.lengths import check_lengths, context_length
from vlmserve.errors import CapacityError, ConfigurationError, ModelLoadError
from vlmserve.layer_specs import MAX_STATE_DRAFTS, CacheBytes
from vlmserve.layers.parallel import Ranks
from vlmserve.models.assistant import load_assistant, read_assistant
from vlmserve.models.footprint import check_fits
from vlmserve.models.hub import resolve_model
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LanguageModel, LoadedModel
from vlmserve.models.registry import load_model
from vlmserve.models.weights_cache import WeightsCache
from vlmserve.runner.kv import PoolSizes
from vlmserve.runner.memory import (
    graph_inputs_bytes,
    num_pages,
    run_largest_encoding,
    run_largest_graphs,
    run_largest_step,
    run_longest_step,
)
from vlmserve.settings.config import EngineConfig
from vlmserve.settings.quantization import QuantizationConfig

logger = logging.getLogger(__name__)

SLOTS_OF_A_REQUEST = 4
"""State slots per request, if memory allows: its state and three checkpoints."""
SUMS_OF_ADAPTERS = 4
"""Bytes of float32 sums per byte of a gated linear's 16-bit results, for adapters."""
MAX_DRAFT_PLACES = 8
"""Maximum requests with drafts at once, if layers have states. A place of Qwen3.5-4B takes 12 MB."""
KV_TO_CHECKPOINTS = 10
"""Bytes of KV cache per byte of checkpoints at intervals."""


def load(config: EngineConfig, folder: Path | None = None, ranks: Ranks | None = None) -> LoadedModel:
    """folder: the checkpoint, if already resolved. ranks: load this rank's shard. Raises ConfigurationError if the
    settings need several ranks and `ranks` is None.
    """
    if ranks is None and config.tensor_parallel_size > 1:
        raise ConfigurationError("--tensor-parallel-size is not supported here: leave it out to use one device")
    set_threads(config.num_threads, config.tensor_parallel_size)
    folder = resolve_model(config.model, config.revision, config.mmproj) if folder is None else folder
    quantization = config.quantization
    if quantization.calibrates:
        if config.model_impl == "transformers":
            raise ConfigurationError(
                "--quantize-method and --weight-memory are for vlmserve's own implementations, not for --model-impl "
                "transformers: leave one of them out"
            )
        folder, quantization = calibrated_copy(config, folder), QuantizationConfig()
    device = find_device(config.device) if ranks is None else rank_device(config, ranks.rank)
    if (free := free_device_memory(device)) is not None:
        check_fits(config, folder, free * config.tensor_parallel_size)
    settings = LoadSettings(
        device=device,
        dtype=None if config.dtype == "auto" else getattr(torch, config.dtype),
        kernels=config.kernels,
        implementation=config.model_impl,
        quantization=quantization,
        input_bits=config.input_bits,
        cache_type=config.kv_cache_dtype,
        drafts=config.measures_drafts and device.type == "cpu",
    )

    draft_model = _find_draft_model(config, device, ranks)

    def check(language_model: LanguageModel, max_position: int) -> None:
        check_lengths(config, language_model.cache_bytes(config.block_size), max_position)

    cache = WeightsCache.at(config.weights_cache, config.weights_cache_size)
    model = load_model(folder, settings, ranks=ranks, check=check, cache=cache)
    if draft_model is not None:
        with _of_draft_model(config):
            assistant = load_assistant(*draft_model, model, settings)
        logger.info("draft model: %s, %.1f MB in memory", config.draft_model, assistant.weight_bytes / 1e6)
        model = replace(model, assistant=assistant)
    if config.enforce_eager:
        model.device.enforce_eager()
    return model


def _find_draft_model(
    config: EngineConfig, device: torch.device, ranks: Ranks | None
) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder and config of the draft model. None: there is none, or it cannot be used."""
    if config.draft_model is None:
        return None
    reason = None
    if not config.measures_drafts:
        reason = "--speculation or --max-warm-up-seconds switches drafts off"
    elif ranks is not None:
        reason = "several ranks share the model"
    elif device.type != "cpu":
        reason = "only CPUs draft with another model"
    if reason is not None:
        if ranks is None or ranks.rank == 0:
            logger.warning("--draft-model is not used, because %s", reason)
        return None
    with _of_draft_model(config):
        folder = resolve_model(config.draft_model)
        return folder, read_assistant(folder)


@contextmanager
def _of_draft_model(config: EngineConfig) -> Iterator[None]:
    """Name the draft model in errors about it."""
    try:
        yield
    except ModelLoadError as error:
        raise type(error)(f"--draft-model {config.draft_model}: {error}") from error


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    device = find_device(config.device)
    return device_of_rank(device, rank, config.tensor_parallel_size)


def set_threads(wanted: int | None, num_ranks: int = 1) -> None:
    """Divide configured threads among ranks. By default, keep the program's or environment's, up to the cores."""
    if wanted is not None:
        torch.set_num_threads(max(1, wanted // num_ranks))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), engine_threads()) // num_ranks))
    if torch.get_num_threads() > 1 and sys.platform == "linux" and not spinning_is_bounded(os.environ):
        logger.warning(
            "torch was imported before vlmserve: on a machine that computes anything else, vlmserve may be thirty times"
            " slower. Import vlmserve first, or start Python with %s=%d in the environment.", SPIN_VARIABLE, MAX_SPINS
        )  # fmt: skip


class CacheSizes(NamedTuple):
    of_tokens: CacheBytes
    pages: int
    host_pages: int
    max_model_len: int
    slots: int
    """State slots, without the padding slot."""
    state_bytes: int
    host_slots: int
    draft_places: int
    """Requests that may have drafts at once, if layers have states."""

    @property
    def pools(self) -> PoolSizes:
        size = self.of_tokens.block_size
        return PoolSizes(size, self.pages, self.host_pages, self.slots, self.host_slots, self.draft_places)


def cache_sizes(config: EngineConfig, model: LoadedModel) -> CacheSizes:
    """All ranks have the same number of pages.

    Raises CapacityError if no block fits, or if the settings exceed the model's context.
    """
    num_ranks = config.tensor_parallel_size
    of_tokens = model.language_model.cache_bytes(config.block_size)
    max_model_len = context_length(config, model.max_position)
    budget = _cache_budget(config, model, max_model_len)
    state_bytes = _state_bytes(model)
    slots = state_slots(config, state_bytes, budget)
    draft_places = min(MAX_DRAFT_PLACES, config.max_num_seqs) if slots and may_draft(config, model) else 0
    if not config.kv_cache_memory:
        budget -= (1 + slots) * state_bytes + draft_places * _draft_place_bytes(model)
    pages = num_pages(
        budget=budget,
        of_tokens=of_tokens,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_chunk=config.max_num_batched_tokens,
        passes=2 if config.enable_lora else 1,
    )
    # Evicted blocks are found by prefix cache keys only.
    offloaded = config.kv_offload_memory // num_ranks if config.enable_prefix_caching else 0
    host_slots = 0
    if slots:
        # Checkpoints need their prefix's blocks, so both get the same share of host memory.
        of_states = slots * state_bytes
        host_slots = offloaded * of_states // (of_states + pages * of_tokens.page) // state_bytes
    host_pages = (offloaded - host_slots * state_bytes) // of_tokens.page
    return CacheSizes(of_tokens, pages, host_pages, max_model_len, slots, state_bytes, host_slots, draft_places)


def may_draft(config: EngineConfig, model: LoadedModel) -> bool:
    """Return whether times of steps may be measured."""
    return config.measures_drafts and model.cross is None


def state_slots(config: EngineConfig, state_bytes: int, budget: int) -> int:
    """Return the state slots of each rank, without the padding slot.

    state_bytes: of a slot. budget: bytes of the caches. Raises CapacityError if no request fits.
    """
    if not state_bytes:
        return 0
    wanted = max(SLOTS_OF_A_REQUEST * config.max_num_seqs, budget // KV_TO_CHECKPOINTS // state_bytes)
    memory = min((1 + wanted) * state_bytes, budget // 2)
    if config.state_cache_memory is not None:
        memory = config.state_cache_memory // config.tensor_parallel_size
    slots = memory // state_bytes - 1
    if slots < 1:
        raise CapacityError(
            f"the state cache has {max(memory, 0):,} bytes and one request needs {2 * state_bytes:,}; set "
            "--state-cache-memory to more, free memory, or take a smaller model"
        )
    return slots


def _cache_budget(config: EngineConfig, model: LoadedModel, max_model_len: int) -> int:
    if config.kv_cache_memory:
        return config.kv_cache_memory // config.tensor_parallel_size

    def largest_step() -> None:
        # The encoding in progress keeps its memory during the step.
        _encoding = run_largest_encoding(
            model,
            num_tokens=config.max_num_batched_tokens,
            num_images=config.max_encoded_images or model.device.images_per_step,
        )
        run_largest_step(
            model,
            num_tokens=config.max_num_batched_tokens,
            num_rows=config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=config.block_size,
        )

    # Its buffers stay allocated, so all measurements count them.
    run_longest_step(
        model,
        num_tokens=config.max_num_batched_tokens,
        num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        block_size=config.block_size,
        passes=2 if config.enable_lora else 1,
    )
    reserved = _graph_bytes(config, model) + _later_bytes(config, model)
    budget = model.device.cache_budget(config.memory_fraction, largest_step, reserved)
    if model.ranks is None:
        return budget
    if model.device.torch_device.type == "cpu":
        budget //= model.ranks.size
    least = model.ranks.largest(torch.tensor([-budget], dtype=torch.int64, device=model.device.torch_device))
    return -int(least)


def _later_bytes(config: EngineConfig, model: LoadedModel) -> int:
    """Bytes allocated after the measurement: for images, adapters, and blocks to copy from and to the host."""
    later = 0 if model.vision is None else config.encoder_cache_memory
    if config.enable_lora:
        later += config.lora_memory
    if config.kv_offload_memory and config.enable_prefix_caching:
        later += model.device.staged_bytes(model.language_model.cache_bytes(config.block_size).page)
        later += model.device.staged_bytes(_state_bytes(model)) if model.language_model.state_specs else 0
    return later


def _state_bytes(model: LoadedModel) -> int:
    return sum(spec.state_bytes(model.dtype.itemsize) for spec in model.language_model.state_specs)


def _draft_place_bytes(model: LoadedModel) -> int:
    width = sum(spec.draft_width for spec in model.language_model.state_specs)
    return MAX_STATE_DRAFTS * width * model.dtype.itemsize


def _graph_bytes(config: EngineConfig, model: LoadedModel) -> int:
    """Return the bytes of the largest graph captured at start. Other graphs reuse its memory."""
    sizes = model.device.decode_sizes(config.max_num_seqs) if model.ranks is None and config.max_warm_up_seconds else []
    if not sizes:
        return 0
    activations = model.device.graph_bytes(
        partial(run_largest_graphs, model, num_decodes=sizes[0], block_size=config.block_size)
    )
    if config.enable_lora:
        activations *= 1 + SUMS_OF_ADAPTERS
    return graph_inputs_bytes(model, sizes[0]) + activations

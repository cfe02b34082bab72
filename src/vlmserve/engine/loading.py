"""From the settings to a model in memory, and how much memory its caches get."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from vlmserve.config import EngineConfig
from vlmserve.cores import MAX_SPINS, SPIN_VARIABLE, engine_threads, spinning_is_bounded
from vlmserve.devices.choice import find_device
from vlmserve.devices.ranks import device_of_rank
from vlmserve.engine.base import context_length
from vlmserve.engine.calibrated import calibrated_copy
from vlmserve.errors import ConfigurationError, UnsupportedModelError
from vlmserve.layer_specs import CacheBytes
from vlmserve.layers.parallel import Ranks
from vlmserve.models.hub import resolve_model
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LanguageModel, LoadedModel
from vlmserve.models.registry import load_model
from vlmserve.models.weights_cache import WeightsCache
from vlmserve.quantization import QuantizationConfig
from vlmserve.runner.memory import num_pages, run_largest_encoding, run_largest_step, run_longest_step

logger = logging.getLogger(__name__)


def load(config: EngineConfig, folder: Path | None = None, ranks: Ranks | None = None) -> LoadedModel:
    """The model that the settings name, on their device, with their threads; folder: where it is, if that is known.

    ranks: load this one's part. Raises ConfigurationError where the settings ask for several and there are none.
    """
    if ranks is None and config.tensor_parallel_size > 1:
        raise ConfigurationError("--tensor-parallel-size is for engines: this runs a model on one device")
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
    settings = LoadSettings(
        device=find_device(config.device) if ranks is None else rank_device(config, ranks.rank),
        dtype=None if config.dtype == "auto" else getattr(torch, config.dtype),
        kernels=config.kernels,
        implementation=config.model_impl,
        quantization=quantization,
        input_bits=config.input_bits,
        quantized_cache=config.kv_cache_dtype == "int8",
    )
    cache = WeightsCache.at(config.weights_cache, config.weights_cache_size)
    model = load_model(folder, settings, ranks=ranks, check=partial(check_lengths, config), cache=cache)
    if config.enforce_eager:
        model.device.enforce_eager()
    return model


def check_lengths(config: EngineConfig, language_model: LanguageModel, max_position: int) -> None:
    """Raises ConfigurationError for a context that the model or the KV cache that the settings ask for cannot hold.

    max_position: of the model, in tokens.
    """
    length = context_length(config, max_position)
    if config.kv_cache_memory and config.max_model_len is not None:
        sizes, ranks = language_model.cache_bytes(config.block_size), config.tensor_parallel_size
        chunk = config.max_num_batched_tokens
        if (tokens := sizes.fitting(config.kv_cache_memory // ranks // sizes.page, chunk, length)) < length:
            needed = sizes.pages(length, chunk) * sizes.page * ranks
            raise ConfigurationError(
                f"--kv-cache-memory holds {tokens:,} tokens, fewer than --max-model-len {length:,}: set it to "
                f"{needed:,} or more, or --max-model-len to less"
            )


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    device = find_device(config.device)
    return device_of_rank(device, rank, config.tensor_parallel_size)


def set_threads(wanted: int | None, num_ranks: int = 1) -> None:
    """Set torch's threads as configured, divided among ranks. By default, keep what the program or environment set, up
    to the cores."""
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
    """Sizes of the KV cache on each rank."""

    of_tokens: CacheBytes
    pages: int
    host_pages: int
    max_model_len: int
    """The longest context in tokens."""


def cache_sizes(config: EngineConfig, model: LoadedModel) -> CacheSizes:
    """How large the KV cache is; all ranks have the same number of pages.

    Raises ConfigurationError if not even one block fits, and for settings that want longer contexts than the model has.
    """
    if model.language_model.state_specs:
        raise UnsupportedModelError("the engine does not run models with states of layers (gated delta rule) yet")
    num_ranks = config.tensor_parallel_size
    of_tokens = model.language_model.cache_bytes(config.block_size)
    max_model_len = context_length(config, model.max_position)
    pages = num_pages(
        budget=_cache_budget(config, model, max_model_len),
        of_tokens=of_tokens,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_chunk=config.max_num_batched_tokens,
        passes=2 if config.enable_lora else 1,
    )
    # Evicted blocks are found again by the keys of the prefix cache only.
    offloaded = config.kv_offload_memory // num_ranks if config.enable_prefix_caching else 0
    return CacheSizes(of_tokens, pages, offloaded // of_tokens.page, max_model_len)


def _cache_budget(config: EngineConfig, model: LoadedModel, max_model_len: int) -> int:
    """Bytes that the KV cache may take on each rank: what the settings say, or what is measured."""
    if config.kv_cache_memory:
        return config.kv_cache_memory // config.tensor_parallel_size

    def largest_step() -> None:
        if model.device.decode_sizes(1):
            run_longest_step(
                model, num_seqs=config.max_num_seqs, max_model_len=max_model_len, block_size=config.block_size
            )
        run_largest_encoding(
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

    reserved = 0 if model.vision is None else config.encoder_cache_memory
    budget = model.device.cache_budget(config.memory_fraction, largest_step, reserved)
    if model.ranks is None:
        return budget
    if model.device.torch_device.type == "cpu":
        budget //= model.ranks.size
    least = model.ranks.largest(torch.tensor([-budget], dtype=torch.int64, device=model.device.torch_device))
    return -int(least)

"""Options of `LLM` and `AsyncLLM`: fields of the settings, or vLLM's names for them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict

from vlmserve.engine import check_settings
from vlmserve.errors import ConfigurationError
from vlmserve.garbage import collector_paused
from vlmserve.layer_specs import CacheType
from vlmserve.settings.base import SettingsT, check_names, read_settings
from vlmserve.settings.config import (
    DType,
    EngineConfig,
    MediaConfig,
    ModelImplementation,
    OfflineConfig,
    PoolingChoice,
    ReasoningParser,
    ToolCallParser,
)
from vlmserve.settings.quantization import Quantize, QuantizeMethod
from vlmserve.settings.vllm_flags import VALUES, Entry, Missing, Renamed, Unused, entry_called
from vlmserve.types import SamplingParams

if TYPE_CHECKING:
    import torch

    from vlmserve.frontend.requests import RequestPreparer

logger = logging.getLogger(__name__)

UNBOUNDED_QUEUE = 2**31
"""No limit: offline callers wait for their requests."""
WINDOWS = 4
"""Limits results that wait for an earlier, slow one, as a multiple of the running requests."""
KINDS = (EngineConfig, MediaConfig, OfflineConfig)
"""The settings whose fields are options."""

ByteCount: TypeAlias = int | str
"""Bytes, or text with a unit, like "2GiB"."""


class VLLMOptions(TypedDict, total=False):
    """Common options by vLLM's names; `settings.vllm_flags` has all."""

    gpu_memory_utilization: float
    swap_space: float
    limit_mm_per_prompt: Mapping[str, int | Mapping[str, int]]
    kv_cache_memory_bytes: ByteCount
    mm_processor_cache_gb: float
    disable_mm_preprocessor_cache: bool
    allowed_local_media_path: str
    quantization: str | None
    load_format: str
    tokenizer_mode: str
    task: str
    runner: str
    trust_remote_code: bool
    disable_log_stats: bool
    enable_chunked_prefill: bool
    async_scheduling: bool
    distributed_executor_backend: str
    pipeline_parallel_size: int
    disable_custom_all_reduce: bool
    compilation_config: Any


class LLMOptions(VLLMOptions, total=False):
    """The fields of `EngineConfig`, `MediaConfig` and `OfflineConfig`."""

    # `EngineConfig`
    revision: str | None
    mmproj: str | None
    engine: Literal["real", "mock"]
    load: Literal["eager", "lazy"]
    device: str
    dtype: DType | Literal["half", "float"] | torch.dtype
    model_impl: ModelImplementation | Literal["vllm"]
    chat_template: str | None
    kernels: str
    enforce_eager: bool
    max_warm_up_seconds: float
    speculation: Literal["off", "auto"]
    draft_model: str | None
    quantize: Quantize
    quantize_group_size: Literal[32, 64, 128]
    quantize_symmetric: bool
    quantize_vision: bool
    quantize_method: QuantizeMethod
    quantize_calibration: str | None
    quantize_calibration_tokens: int
    quantize_layers: Sequence[str]
    input_bits: Literal[8, 16] | None
    weight_memory: ByteCount | None
    weights_cache: str | None
    weights_cache_size: ByteCount
    enable_lora: bool
    lora_modules: Sequence[str]
    max_loras: int
    max_cpu_loras: int
    lora_memory: ByteCount
    max_lora_rank: int
    tensor_parallel_size: int
    rank_timeout: float
    max_model_len: int | None
    block_size: int
    kv_cache_memory: ByteCount | None
    kv_cache_dtype: CacheType
    state_cache_memory: ByteCount | None
    kv_offload_memory: ByteCount
    disk_cache: str | None
    disk_cache_memory: ByteCount
    enable_prefix_caching: bool
    memory_fraction: float
    max_num_seqs: int
    max_num_batched_tokens: int
    max_encoded_images: int | None
    encoder_step_share: float
    step_seconds: float
    encoder_cache_memory: ByteCount
    max_waiting: int
    max_logprobs: int
    max_grammar_bytes: ByteCount
    max_grammar_seconds: float
    max_grammar_memory: ByteCount
    json_max_digits: int
    json_max_length: int
    json_max_items: int
    grammar_cache: int
    grammar_cache_memory: ByteCount
    tool_call_parser: ToolCallParser
    reasoning_parser: ReasoningParser
    pooling: PoolingChoice
    seed: int
    num_threads: int | None
    mock_ttft: float
    mock_tpot: float
    # `MediaConfig`
    max_images: int
    max_image_bytes: ByteCount
    max_image_pixels: int
    decode_memory: ByteCount
    decode_timeout: float
    max_videos: int
    max_video_bytes: ByteCount
    max_video_frames: int
    max_video_pixels: int
    max_decoded_frames: int
    max_frame_pixels: int
    video_timeout: float
    video_memory: ByteCount
    max_documents: int
    max_document_bytes: ByteCount
    max_document_pages: int
    max_page_pixels: int
    page_dpi: float
    document_timeout: float
    document_memory: ByteCount
    media_processes: int
    client_media_processes: int
    media_fetches: int
    client_media_fetches: int
    mm_processor_kwargs: Mapping[str, Any]
    image_seconds: float
    video_seconds: float
    fetch_timeout: float
    max_redirects: int
    allowed_media_domains: Sequence[str]
    allowed_media_hosts: Sequence[str]
    allowed_media_path: str | None
    image_cache_memory: ByteCount
    exact_pixels: bool
    num_workers: int | None
    # `OfflineConfig`
    prepare_ahead: int
    prepare_ahead_memory: ByteCount


class Setup(NamedTuple):
    """A model's settings and request preparer. params: the checkpoint's."""

    engine: EngineConfig
    media: MediaConfig
    offline: OfflineConfig
    folder: Path
    params: SamplingParams
    preparer: RequestPreparer

    @property
    def window(self) -> int:
        """Maximum results in flight or waiting for an earlier one."""
        return WINDOWS * (self.engine.max_num_seqs + self.offline.prepare_ahead)


def set_up(model: str, options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Setup:
    """Read the options of `LLM`. Raises CheckpointNotFoundError, and like `check_settings`."""
    from vlmserve.models.hub import resolve_model

    read = _Options(model, options)
    own = {"max_waiting": UNBOUNDED_QUEUE, **(defaults or {}), **read.own, "model": model}

    def section(kind: type[SettingsT]) -> SettingsT:
        named = {name: value for name, value in own.items() if name in kind.model_fields}
        return read_settings(kind, named, read.spelling)

    engine, media, offline = section(EngineConfig), section(MediaConfig), section(OfflineConfig)
    folder = resolve_model(engine.model, engine.revision, engine.mmproj)
    if engine.load == "eager":
        check_settings(engine, folder)
    with collector_paused():
        from vlmserve.frontend.defaults import default_sampling
        from vlmserve.frontend.requests import RequestPreparer

    preparer = RequestPreparer(folder, media, engine.model_impl, engine.chat_template, engine=engine)
    return Setup(engine, media, offline, folder, default_sampling(folder), preparer)


class _Options:
    """Options as settings. None means the default, as in vLLM.

    Raises ConfigurationError for unknown or unsupported options.
    """

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self.own: dict[str, Any] = {}
        self._written: dict[str, str] = {}
        known = {name for kind in KINDS for name in kind.model_fields}
        check_names([name for name in options if entry_called(name) is None], KINDS, VLLMOptions.__annotations__)
        for name, value in options.items():
            entry = entry_called(name)
            if value is None:
                continue
            if name in known:
                self._set(name, name, value)
            elif entry is not None and not (name == "tokenizer" and value == model):
                self._translate(name, value, entry, known)

    def spelling(self, field: str) -> str:
        return self._written.get(field, field)

    def _set(self, field: str, name: str, value: Any) -> None:
        if field in self.own:
            raise ConfigurationError(f"{self.spelling(field)} and {name} set the same; give only one")
        value = str(value).removeprefix("torch.") if field == "dtype" else value
        self.own[field] = VALUES.get(field, {}).get(value, value) if isinstance(value, str) else value
        self._written[field] = name

    def _translate(self, name: str, value: Any, entry: Entry, known: Set[str]) -> None:
        if isinstance(entry, Missing):
            if value:  # vLLM's default is None, 0 or False
                raise ConfigurationError(f"LLM has no option {name}. {_in_python(entry.why)}")
        elif entry.is_switch and not value:
            return
        elif isinstance(entry, Renamed) and known >= set(entry.fields):
            text = value if isinstance(value, str) else json.dumps(value)
            try:
                fields = entry.convert(text) if entry.convert else {entry.fields[0]: value}
            except ConfigurationError as error:
                raise ConfigurationError(_in_python(str(error))) from None
            for field, converted in fields.items():
                self._set(field, name, converted)
        elif isinstance(entry, Unused):
            if entry.values and str(value) not in entry.values:
                raise ConfigurationError(f"{name} {value}: {_in_python(entry.otherwise)}")
            logger.info("%s changes nothing. %s", name, _in_python(entry.why))


def _in_python(text: str) -> str:
    """Replace flags in a sentence by option names."""
    return re.sub(r"--([a-z][a-z0-9-]*)", lambda flag: flag[1].replace("-", "_"), text)

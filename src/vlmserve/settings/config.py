"""All settings, with defaults and limits. Sizes are bytes, times are seconds, lengths are tokens."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from vlmserve.cores import media_threads
from vlmserve.layer_specs import CacheType
from vlmserve.logs import LogFormat, LogLevel
from vlmserve.settings.base import ByteSize, Settings, parse_json, read_settings
from vlmserve.settings.quantization import (
    GroupSize,
    LayerRules,
    QuantizationConfig,
    Quantize,
    QuantizeMethod,
    TokenCount,
    engine_name,
    same_as,
)

BUILT_IN_MODEL = "pixie"
MAX_FPS = 1000
"""Maximum frames per second of a video."""
MAX_STOP_STRINGS = 256
"""Maximum stop strings; the server's limit may be lower."""


def check_cache_type(value: Any) -> Any:
    """Accept vLLM's names of KV cache types. Raises ValueError for vLLM's types that vlmserve lacks."""
    if value == "fp8_e4m3":
        return "fp8"
    if isinstance(value, str) and value.startswith("fp8_"):
        raise ValueError(f"{value} is not supported; use fp8 (e4m3) or int8, which take as many bytes")
    if value in get_args(DType)[1:]:
        raise ValueError("use auto, which takes the model's type (--dtype), int8 or fp8")
    return value


Device = Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Annotated[CacheType, BeforeValidator(check_cache_type)]
ModelImplementation = Literal["auto", "vlmserve", "transformers"]
ToolCallParser = Literal["auto", "hermes", "llama3_json", "mistral", "qwen3_xml", "qwen3_coder", "gemma4"]
PoolingChoice = Literal["auto", "last", "mean", "cls", "all"]
ReasoningParser = Literal["auto", "none", "qwen3", "glm45", "deepseek_r1", "mistral", "gemma4"]
_ORIGIN = re.compile(r"\*|null|file:///?|[a-z][a-z0-9+.-]*://(\*|(\*\.)?[^\s/*?#@]+(:\*)?)/?", re.IGNORECASE)
_SCHEME = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*:/*", re.IGNORECASE)


def check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ValueError unless each is a valid ``Origin`` header."""
    for origin in origins:
        if _SCHEME.fullmatch(origin):
            raise ValueError(f"{origin!r} has no host; write {origin.rstrip('/')}//* for all hosts")
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{origin!r} matches no origin; write https://example.com, https://*.example.com or app://*"
            )
    return origins


class EngineConfig(Settings):
    """The model and its memory."""

    model: str = Field(BUILT_IN_MODEL, description="Short name, local folder or .gguf file, or Hugging Face id.")
    revision: str | None = Field(None, description="Branch, tag or commit of the model's repository.")
    mmproj: str | None = Field(None, description="The .gguf file with the vision tower of a model in a .gguf file.")
    engine: Literal["real", "mock"] = Field("real", description="'mock' answers deterministic text without a model.")
    load: Literal["eager", "lazy"] = Field("eager", description="'lazy' loads the model when the first request comes.")
    device: Device = Field("auto", description="auto, cpu, mps, cuda or cuda:N.")
    dtype: DType = Field("auto", description="auto takes the checkpoint's type if the device computes it well.")
    model_impl: ModelImplementation = Field(
        "auto", description="vlmserve's implementation or Transformers' (slower); auto prefers vlmserve's."
    )
    chat_template: str | None = Field(
        None, description="File with a Jinja template, or the template itself (default: the checkpoint's)."
    )
    kernels: str = Field(
        "auto", description="auto, torch, native or an instruction set; auto chooses the fastest for this machine."
    )
    enforce_eager: bool = Field(
        False, description="GPUs: capture no CUDA graphs, which saves memory but slows small steps."
    )
    max_warm_up_seconds: float = Field(
        120.0,
        ge=0,
        description="Maximum time at start for first steps, compiling and CUDA graphs, in seconds; 0: none.",
    )
    speculation: Literal["off", "auto"] = Field(
        "auto", description="auto: check several known or predicted tokens of a request in one step if that saves time."
    )
    draft_model: str | None = Field(
        None,
        min_length=1,
        description="Gemma 4's assistant, which drafts for the model on CPUs: folder or Hugging Face id.",
    )
    quantize: Quantize = same_as("scheme")
    quantize_group_size: GroupSize = same_as("group_size")
    quantize_symmetric: bool = same_as("symmetric")
    quantize_vision: bool = same_as("vision")
    quantize_method: QuantizeMethod = same_as("method")
    quantize_calibration: str | None = same_as("calibration")
    quantize_calibration_tokens: TokenCount = same_as("calibration_tokens")
    quantize_layers: LayerRules = same_as("layers")
    weight_memory: ByteSize | None = same_as("weight_memory")
    input_bits: Literal[8, 16] | None = Field(
        None,
        description="Bits of inputs to quantized weights of a checkpoint, with the native kernels; 8 makes "
        "prompts faster (default: by format).",
    )
    weights_cache: str | None = Field(
        None, description="Folder for packed weights, which later starts map (default: in vlmserve's cache folder)."
    )
    weights_cache_size: ByteSize = Field(
        32 * 1024**3, description="Maximum size of the folder for packed weights; 0: keep none."
    )
    enable_lora: bool = Field(False, description="Serve LoRA adapters of the model.")
    lora_modules: tuple[str, ...] = Field((), description="Adapters to load at start, as NAME=PATH or JSON.")
    max_loras: int = Field(8, ge=1, le=256, description="Maximum number of adapters in one batch.")
    max_cpu_loras: int = Field(64, ge=1, description="Maximum number of adapters in memory; at least max_loras.")
    lora_memory: ByteSize = Field(2 * 1024**3, description="Memory for adapters, like 4GiB.")
    max_lora_rank: int = Field(64, ge=1, le=4096, description="Maximum rank of an adapter.")
    tensor_parallel_size: int = Field(
        1, ge=1, le=64, description="Processes that share the model, each on its own device or part of the cores."
    )
    rank_timeout: float = Field(
        60.0, ge=0, description="Seconds without a heartbeat of a rank after which the engine fails; 0: never."
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Maximum context length, in tokens (default: the model's)."
    )
    block_size: int = Field(16, ge=1, le=256, description="Tokens in a KV block.")
    kv_cache_memory: ByteSize | None = Field(
        None, description="KV cache memory, like 4GiB (default: by --memory-fraction; CPU: up to half the free memory)."
    )
    kv_cache_dtype: KVCacheDType = Field(
        "auto", description="Type of keys and values: auto takes the model's; int8 and fp8 take 8 bits and scales."
    )
    state_cache_memory: ByteSize | None = Field(
        None, description="Memory for states of hybrid models, like 4GiB; default: at most half of the caches' memory."
    )
    kv_offload_memory: ByteSize = Field(
        0, description="Host memory for evicted KV blocks and states, like 4GiB; 0: none."
    )
    disk_cache: str | None = Field(
        None,
        description="Folder for images, embeddings, KV blocks and states of later starts (default: none).",
    )
    disk_cache_memory: ByteSize = Field(10 * 1024**3, description="Maximum size of the disk cache.")
    enable_prefix_caching: bool = Field(True, description="Reuse the KV blocks of prompts with a common prefix.")
    memory_fraction: float = Field(
        0.9, gt=0, le=1, description="Share of a GPU's memory for weights, activations and caches; no effect on a CPU."
    )
    max_num_seqs: int = Field(256, ge=1, description="Maximum number of requests in a batch.")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Maximum number of tokens in one step.")
    max_encoded_images: int | None = Field(
        None, ge=1, description="Maximum number of images that one step encodes (default: 16 on a GPU, 4 on a CPU)."
    )
    encoder_step_share: float = Field(
        0.8,
        gt=0,
        description="Time for images while requests generate, as a share of the rest of the step, at least 20 ms if "
        "several requests wait for images; inf: only --step-seconds limits it.",
    )
    step_seconds: float = Field(
        0.25,
        gt=0,
        description="Time that one step on a CPU may spend on images, and on prompts, in seconds; inf: no limit.",
    )
    encoder_cache_memory: ByteSize = Field(256 * 1024**2, description="Memory for the cache of image embeddings.")
    max_waiting: int = Field(
        4096, ge=1, description="Maximum queue length; requests beyond it and max_num_seqs get 429."
    )
    max_logprobs: int = Field(20, ge=0, description="Maximum number of top logprobs per token.")
    max_grammar_bytes: ByteSize = Field(
        128 * 1024, description="Maximum size of a schema, regular expression or grammar."
    )
    max_grammar_seconds: float = Field(
        2.0, gt=0, description="Maximum CPU time to compile a schema, regular expression or grammar."
    )
    max_grammar_memory: ByteSize = Field(
        256 * 1024**2, description="Maximum memory to compile a schema, regular expression or grammar."
    )
    json_max_digits: int = Field(
        15,
        ge=0,
        le=15,
        description="Maximum digits before the decimal point if the JSON schema has no bound; 0: any number.",
    )
    json_max_length: int = Field(
        4096,
        ge=0,
        le=5000,
        description="Maximum characters of a string if the JSON schema has no bound; 0: any number.",
    )
    json_max_items: int = Field(
        1000, ge=0, le=100_000, description="Maximum items of an array if the JSON schema has no bound; 0: any number."
    )
    grammar_cache: int = Field(64, ge=1, description="Maximum number of compiled grammars to keep.")
    grammar_cache_memory: ByteSize = Field(512 * 1024**2, description="Maximum memory of compiled grammars to keep.")
    tool_call_parser: ToolCallParser = Field(
        "auto",
        description="Format of tool calls: hermes, llama3_json, mistral, qwen3_xml, qwen3_coder or gemma4; auto reads "
        "it from the chat template.",
    )
    reasoning_parser: ReasoningParser = Field(
        "auto",
        description="Format of reasoning, which is returned separately: qwen3, glm45, deepseek_r1, mistral or gemma4; "
        "none leaves it in the text; auto reads the format from the chat template.",
    )
    pooling: PoolingChoice = Field(
        "auto",
        description="States that become the vector of an embedding: last token, mean, cls (first token), or all "
        "(a vector of each token); auto reads the checkpoint's files, else last.",
    )
    seed: int = Field(0, ge=0, description="Base seed for requests that set none.")
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of the engine, all ranks together (default: by the number of cores)."
    )
    mock_ttft: float = Field(0.0, ge=0, description="Mock engine: seconds until a request's first token.")
    mock_tpot: float = Field(0.0, ge=0, description="Mock engine: seconds per additional token.")

    @model_validator(mode="after")
    def _check_input_bits(self) -> Self:
        if self.input_bits is not None and (self.quantize != "none" or self.quantize_layers or self.weight_memory):
            raise ValueError(
                "input_bits is for checkpoints that are quantized already; to round inputs of others, use quantize w8a8"
            )
        return self

    @property
    def measures_drafts(self) -> bool:
        """True if warm-up may measure steps with drafts. Without measurements, vlmserve makes no drafts."""
        return self.speculation != "off" and self.max_warm_up_seconds > 0

    @property
    def quantization(self) -> QuantizationConfig:
        """Collect the fields about quantization. Raises ConfigurationError if they contradict each other."""
        names = {name: engine_name(name) for name in QuantizationConfig.model_fields}
        values = {name: getattr(self, own) for name, own in names.items() if own in type(self).model_fields}
        return read_settings(QuantizationConfig, values, lambda name: f"--{engine_name(name).replace('_', '-')}")


class ProcessorOverrides(Settings):
    """Overrides of a checkpoint's image processor, by vLLM's and Qwen's names."""

    min_pixels: Annotated[int, Field(ge=1)] | None = None
    """Minimum area of an image or frame after resizing."""
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    """Maximum area of an image or frame after resizing."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum tokens of an image, or of each group of video frames that share embeddings."""
    fps: Annotated[float, Field(gt=0, le=MAX_FPS)] | None = None
    """Frames per second to sample from a video."""


class MediaConfig(Settings):
    """Limits on images, videos and documents."""

    max_images: int = Field(16, ge=0, description="Maximum number of images in a request.")
    max_image_bytes: ByteSize = Field(20 * 1024**2, description="Maximum size of an image file.")
    max_image_pixels: int = Field(64_000_000, ge=1, description="Maximum number of pixels of an image.")
    decode_memory: ByteSize = Field(
        2 * 1024**3,
        description="Memory for images that are decoded at once, and the same again in processes; more wait.",
    )
    decode_timeout: float = Field(30.0, gt=0, description="Maximum time to decode one image, in seconds.")
    max_videos: int = Field(4, ge=0, description="Maximum number of videos in a request.")
    max_video_bytes: ByteSize = Field(
        128 * 1024**2, description="Maximum size of a video file, or of all its frames' files."
    )
    max_video_frames: int = Field(
        768, ge=1, description="Maximum number of frames per video; vlmserve samples longer videos evenly."
    )
    max_video_pixels: int = Field(
        100_000_000, ge=1, description="Maximum number of pixels of a video: all its frames together, after resizing."
    )
    max_decoded_frames: int = Field(20_000, ge=1, description="Maximum number of frames in a video file.")
    max_frame_pixels: int = Field(
        40_000_000, ge=1, description="Maximum number of pixels of a video file's frame; the default is above 8K."
    )
    video_timeout: float = Field(60.0, gt=0, description="Maximum time to read and decode one video file, in seconds.")
    video_memory: ByteSize = Field(
        1024**3, ge=64 * 1024**2, description="Maximum memory of a process that decodes a video."
    )
    max_documents: int = Field(4, ge=0, description="Maximum number of documents in a request.")
    max_document_bytes: ByteSize = Field(64 * 1024**2, description="Maximum size of a document's file.")
    max_document_pages: int = Field(
        32, ge=1, description="Maximum number of pages that a request shows, all its documents together."
    )
    max_page_pixels: int = Field(
        8_000_000, ge=1, description="Maximum number of pixels of a rendered page; larger pages are scaled down."
    )
    page_dpi: float = Field(144.0, gt=0, le=2400, description="Resolution of rendered pages, in dots per inch.")
    document_timeout: float = Field(
        30.0, gt=0, description="Maximum time to open a document and render its pages, in seconds."
    )
    document_memory: ByteSize = Field(
        512 * 1024**2, ge=64 * 1024**2, description="Maximum memory of a process that renders a document."
    )
    media_processes: int = Field(
        8, ge=1, le=1024, description="Maximum number of requests whose documents and videos are decoded at once."
    )
    client_media_processes: int = Field(
        6, ge=1, le=1024, description="The same for the requests of one client: a key, or without keys an address."
    )
    media_fetches: int = Field(
        64, ge=1, le=1024, description="Maximum number of requests whose remote images are fetched at once."
    )
    client_media_fetches: int = Field(
        16, ge=1, le=1024, description="The same for the requests of one client: a key, or without keys an address."
    )
    mm_processor_kwargs: Annotated[ProcessorOverrides, BeforeValidator(parse_json)] = Field(
        ProcessorOverrides(),
        description="Overrides for the checkpoint's processor, as JSON: min_pixels, max_pixels, max_tokens and fps.",
    )
    image_seconds: float = Field(
        5.0, ge=0, description="Maximum time to encode one image, in seconds, which limits its size; 0: no limit."
    )
    video_seconds: float = Field(
        20.0, ge=0, description="The same for all frames of a video, or all pages of a document."
    )
    fetch_timeout: float = Field(
        10.0, gt=0, description="Maximum time to fetch one image, or one video and its frames, in seconds."
    )
    max_redirects: int = Field(3, ge=0, description="Maximum number of redirects for one image or video.")
    allowed_media_domains: tuple[str, ...] = Field(
        (), description="Fetch images only from these hosts and allowed_media_hosts (default: all public hosts)."
    )
    allowed_media_hosts: tuple[str, ...] = Field(
        (), description="Hosts with private addresses that images may be fetched from."
    )
    allowed_media_path: str | None = Field(
        None, description="Folder whose files requests may use as file:// URLs (default: none)."
    )
    image_cache_memory: ByteSize = Field(256 * 1024**2, description="Memory for the cache of preprocessed images.")
    exact_pixels: bool = Field(False, description="Decode large JPEGs at full resolution before resizing.")
    num_workers: int | None = Field(
        None, ge=1, description="Threads for image preprocessing (default: 2 to 8, by the number of cores)."
    )

    @property
    def threads(self) -> int:
        """Threads that decode and resize images."""
        return self.num_workers or media_threads()


class OfflineConfig(Settings):
    """How `LLM` processes a list."""

    prepare_ahead: int = Field(256, ge=1, le=65536)
    """Maximum requests that are prepared and wait for the engine."""
    prepare_ahead_memory: ByteSize = 512 * 1024**2
    """Maximum bytes of their prompts and images."""


class ServerConfig(Settings):
    """How the server listens."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    lora_folder: str | None = Field(
        None, description="Folder whose adapters requests may name and load while the server runs."
    )
    served_model_name: tuple[str, ...] = Field(
        (), description="Model names that clients may use; answers have the first (default: the model's)."
    )
    max_body_bytes: ByteSize = Field(64 * 1024**2, description="Maximum size of a request's body.")
    body_memory: ByteSize = Field(1024**3, description="Memory for request bodies until they are preprocessed.")
    max_body_values: int = Field(1_000_000, ge=1, description="Maximum number of JSON values in a request's body.")
    max_messages: int = Field(
        10_000, ge=1, description="Maximum number of messages, items or tools in a request, with their parts."
    )
    max_vector_memory: ByteSize = Field(
        512 * 1024**2, description="Maximum size of the vectors that a request computes, as float32."
    )
    max_stop_strings: int = Field(
        16, ge=0, le=MAX_STOP_STRINGS, description="Maximum number of stop strings in a request."
    )
    max_stop_length: int = Field(1000, ge=1, description="Maximum length of a stop string, in characters.")
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum answer length if a request sets none, in tokens (default: a fifth of the context).",
    )
    stats_interval: float = Field(10.0, ge=0, description="Seconds between statistics in the log while busy; 0: none.")
    access_log: bool = Field(True, description="Log each request, except those for health, metrics and the live view.")
    log_format: LogFormat = Field("text", description="Log line format: text (date, level), short (time only) or json.")
    log_level: LogLevel = Field("info", description="Lowest level of log lines: debug, info, warning or error.")
    otlp_traces_endpoint: str | None = Field(
        None, description="Send OpenTelemetry traces of requests to this URL, like http://localhost:4318/v1/traces."
    )
    enable_page: bool = Field(True, description="Serve the chat page and the live view at /.")
    enable_debug: bool = Field(False, description="Serve /debug/cache, which shows the contents of the caches.")
    shutdown_grace: float = Field(30.0, ge=0, description="Seconds that running requests get after SIGTERM.")
    sleep_after: float = Field(0.0, ge=0, description="Idle seconds after which the model is unloaded; 0: never.")
    api_key: tuple[str, ...] = Field(
        (), repr=False, description="Accepted API keys, as plain text (default: no key is needed)."
    )
    api_keys_file: str | None = Field(
        None, description="File with API keys from 'vlmserve keys add'; read again when it changes."
    )
    protect_metrics: bool = Field(False, description="Require a key for /metrics and /live as well.")
    cors_origins: tuple[str, ...] = Field(
        (), description="Origins whose web pages may use the server, like https://*.example.com; * allows all."
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Host names that the server accepts, like chat.example.com or *.example.com, in addition to "
        "addresses and local names; * allows all (default: all with keys, none without).",
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        description="Additional origins that the server accepts, like moz-extension://*; * allows all (default: all "
        "with keys, none without).",
    )
    log_prompts: bool = Field(False, description="Log the text of prompts, without images.")
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum answer length, in tokens; higher request limits are lowered (default: context).",
    )
    max_wait: float = Field(600.0, ge=0, description="Seconds after which a waiting request is rejected; 0: never.")
    max_header_bytes: ByteSize = Field(
        64 * 1024, description="Maximum size of a request's headers, and of its trailers and chunk extensions."
    )
    head_timeout: float = Field(20.0, gt=0, description="Seconds within which the headers of a request must arrive.")
    body_timeout: float = Field(30.0, gt=0, description="Seconds that a client may pause while it sends a body.")
    send_timeout: float = Field(120.0, gt=0, description="Seconds that a client may pause while it reads an answer.")
    max_connections: int = Field(
        8192, ge=1, description="Maximum number of open connections; a new one closes the longest idle one."
    )
    stream_ping_interval: float = Field(
        15.0, ge=0, description="Seconds of silence in a stream after which a comment line is sent; 0: never."
    )
    engine_silence: float = Field(
        10.0, gt=0, description="Seconds without a heartbeat of the engine after which /ready answers 503."
    )
    engine_timeout: float = Field(
        60.0, ge=0, description="Seconds without a heartbeat after which the engine is restarted; 0: never."
    )
    step_timeout: float = Field(
        900.0, ge=0, description="Maximum time of one engine step before a restart, in seconds; 0: no limit."
    )
    max_restarts: int = Field(
        5, ge=0, description="Number of consecutive restarts of a crashed engine before the server gives up."
    )
    restart_backoff: float = Field(
        1.0, ge=0, description="Seconds before the first restart of the engine; doubled each time, up to 60."
    )
    restart_window: float = Field(
        300.0, ge=0, description="Seconds that a restarted engine must run to count as healthy."
    )
    storage_url: str | None = Field(
        None,
        repr=False,  # it may contain a password
        description="Database for responses, conversations and files: a SQLAlchemy URL, like "
        "postgresql://user:password@host/name; memory; none (default: an SQLite file).",
    )
    storage_path: str | None = Field(
        None, description="Path of the SQLite file (default: vlmserve/history.db in XDG_DATA_HOME or ~/.local/share)."
    )
    storage_max_age: float = Field(
        30 * 86400.0, ge=0, description="Seconds after its last use until stored data is deleted; 0: never."
    )
    storage_max_bytes: ByteSize = Field(
        8 * 1024**3, description="Maximum size of stored data; the oldest is deleted beyond it; 0: unlimited."
    )
    storage_sweep_interval: float = Field(
        300.0, gt=0, le=86400, description="Seconds between checks of the age and size of stored data."
    )
    max_stored_bytes: ByteSize = Field(
        10 * 1024**3, description="Maximum size of all stored files and images; more are rejected."
    )
    max_file_bytes: ByteSize = Field(
        128 * 1024**2, description="Maximum size of an uploaded file, and of a batch's answers."
    )
    max_batches: int = Field(
        16, ge=0, description="Maximum number of unfinished batches per key, or of a server without keys; 0: run none."
    )
    max_batch_rows: int = Field(50_000, ge=1, description="Maximum number of requests in a batch.")
    batch_concurrency: int = Field(
        32, ge=1, description="Maximum number of batch requests that run at once, all batches together."
    )
    batch_lease: float = Field(
        15.0, gt=0, le=3600, description="Seconds until another server resumes the batches of a server that died."
    )

    _check_origins = field_validator("cors_origins", "allowed_origins")(check_origins)

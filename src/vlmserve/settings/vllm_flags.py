"""vLLM's flags: which ones set our settings, which have no effect, and which are unsupported.

This is data; `vlmserve.cli.spellings` applies it to command lines. Our own flag of the same name takes precedence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from vlmserve.errors import ConfigurationError
from vlmserve.settings.validation import did_you_mean


@dataclass(frozen=True)
class Renamed:
    """A flag that sets fields of ours.

    convert: converts its text to our fields' texts (a switch has "true" or "false"); None: copies it. is_switch: takes
    no value; convert gets "". note: what differs.
    """

    fields: tuple[str, ...]
    convert: Callable[[str], Mapping[str, str]] | None = None
    is_switch: bool = False
    note: str = ""
    elsewhere: str = ""
    """A sentence for commands without these fields; empty: they do not know the flag."""


@dataclass(frozen=True)
class Unused:
    """A flag that is accepted and has no effect.

    values: accepted values; empty: any. is_switch: takes no value. why: a sentence, what vlmserve does instead.
    otherwise: what to do instead of another value.
    """

    why: str
    values: tuple[str, ...] = ()
    is_switch: bool = False
    otherwise: str = ""


@dataclass(frozen=True)
class Missing:
    """A flag for an unsupported feature. why: a sentence, what to do instead."""

    why: str


Entry: TypeAlias = Renamed | Unused | Missing


def entry_called(name: str) -> Entry | None:
    return FLAGS.get("--" + name.replace("_", "-"))


def hint(name: str, known: Collection[str], describe: Callable[[str], str], otherwise: str = "") -> str:
    """Suggest what an unknown `name` means: by vLLM's flags, or by similarity; else `otherwise`.

    describe: writes a known name as the reader types it.
    """
    entry = entry_called(name)
    if isinstance(entry, Renamed):
        return f"; it is called {' and '.join(map(describe, entry.fields))} here"
    if entry is not None:
        return f": {entry.why}"
    return did_you_mean(name.replace("-", "_"), known, describe) or otherwise


def flags_for(field: str) -> list[str]:
    """vLLM's other names for a setting."""
    return [name for name, entry in FLAGS.items() if isinstance(entry, Renamed) and field in entry.fields]


def _gibibytes(field: str) -> Callable[[str], Mapping[str, str]]:
    return lambda text: {field: f"{text}GiB" if text[-1:].isdecimal() else text}


def _always(field: str, value: str) -> Callable[[str], Mapping[str, str]]:
    return lambda _: {field: value}


def _limits(text: str) -> Mapping[str, str]:
    """Parse ``{"image": 4, "video": {"count": 1}}``, or the older ``image=4,video=1``."""
    try:
        is_json = text.lstrip().startswith("{")
        limits = json.loads(text) if is_json else dict(entry.split("=") for entry in text.split(","))
        counts = {
            kind.strip(): int(limit["count"] if isinstance(limit, dict) else limit) for kind, limit in limits.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigurationError(
            f'--limit-mm-per-prompt {text!r}: write it as JSON, like {{"image": 4, "video": 1}}'
        ) from None
    fields = {"image": "max_images", "video": "max_videos"}
    if wrong := [kind for kind, count in counts.items() if kind not in fields and count]:
        raise ConfigurationError(f"--limit-mm-per-prompt: there are limits for image and video, not {', '.join(wrong)}")
    return {fields[kind]: str(count) for kind, count in counts.items() if kind in fields}


def _log_level(text: str) -> Mapping[str, str]:
    """In vLLM, uvicorn's level info means a log line per request."""
    levels = ("trace", "debug", "info", "warning", "error", "critical")
    if text not in levels:
        raise ConfigurationError(f"--uvicorn-log-level {text}: write one of {', '.join(levels)}")
    return {"access_log": "true" if levels.index(text) <= levels.index("info") else "false"}


_METHODS = ("ngram", "[ngram]", "ngram_gpu", "suffix", "mtp")
"""Names of methods in place of a model. Known text and MTP layers always draft."""


def _speculation(text: str) -> Mapping[str, str]:
    try:
        settings = json.loads(text)
        name, method = settings.get("model"), settings.get("method")
        if not isinstance(name, str | None):
            raise TypeError
    except (ValueError, TypeError, AttributeError):
        raise ConfigurationError(
            f'--speculative-config {text!r}: write it as JSON, like {{"model": "google/gemma-4-E2B-it-assistant"}}'
        ) from None
    return {} if name is None or method in _METHODS else _draft_model(name)


def _draft_model(name: str) -> Mapping[str, str]:
    return {} if name in _METHODS else {"draft_model": name}


VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "model_impl": {"vllm": "vlmserve"},
}
"""Values with other names in vLLM, by our field."""

_RENAMED: Mapping[str, Renamed] = {
    "--speculative-config": Renamed(("draft_model",), _speculation, note="its `model`; the rest has no effect"),
    "--speculative-model": Renamed(("draft_model",), _draft_model),
    "--gpu-memory-utilization": Renamed(("memory_fraction",)),
    "-tp": Renamed(("tensor_parallel_size",)),
    "--kv-cache-memory-bytes": Renamed(("kv_cache_memory",)),
    "--swap-space": Renamed(("kv_offload_memory",), _gibibytes("kv_offload_memory"), note="in GiB"),
    "--kv-offloading-size": Renamed(("kv_offload_memory",), _gibibytes("kv_offload_memory"), note="in GiB"),
    "--mm-processor-cache-gb": Renamed(("image_cache_memory",), _gibibytes("image_cache_memory"), note="in GiB"),
    "--disable-mm-preprocessor-cache": Renamed(
        ("image_cache_memory",), _always("image_cache_memory", "0"), is_switch=True, note="the same as 0"
    ),
    "--limit-mm-per-prompt": Renamed(
        ("max_images", "max_videos"), _limits, note='JSON, like `{"image": 4, "video": 1}`'
    ),
    "--disable-log-stats": Renamed(
        ("stats_interval",), _always("stats_interval", "0"), is_switch=True, note="the same as 0"
    ),
    "--allowed-local-media-path": Renamed(("allowed_media_path",)),
    "--h11-max-incomplete-event-size": Renamed(("max_header_bytes",)),
    "--enable-log-requests": Renamed(
        ("log_prompts",), _always("log_prompts", "true"), is_switch=True, note="the same as `--log-prompts`"
    ),
    "--disable-log-requests": Renamed(
        ("log_prompts",), _always("log_prompts", "false"), is_switch=True, note="the same as `--no-log-prompts`"
    ),
    "--no-enable-log-requests": Renamed(
        ("log_prompts",), _always("log_prompts", "false"), is_switch=True, note="the same as `--no-log-prompts`"
    ),
    "--disable-uvicorn-access-log": Renamed(
        ("access_log",), _always("access_log", "false"), is_switch=True, note="the same as `--no-access-log`"
    ),
    "--uvicorn-log-level": Renamed(
        ("access_log",), _log_level, note="above `info` the same as `--no-access-log`; other lines are few and stay"
    ),
}

_DETECTED = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "bitsandbytes", "gguf", "None")
_ONE = "vlmserve runs a model on one machine; start several servers and balance between them."
_UNUSED: Mapping[tuple[str, ...], Unused] = {
    ("--enable-auto-tool-choice", "--exclude-tools-when-tool-choice-none"): Unused(
        "Models may call a request's tools; with tool_choice none the prompt does not describe them.", is_switch=True
    ),
    ("--trust-remote-code",): Unused(
        "Code from a checkpoint is never run; `vlmserve models` lists the supported models.", is_switch=True
    ),
    ("--enable-reasoning",): Unused(
        "Reasoning is returned separately unless --reasoning-parser is none.", is_switch=True
    ),
    ("--quantization", "-q"): Unused(
        "The quantization of a checkpoint is read from its files.",
        _DETECTED,
        otherwise="leave it out for a checkpoint that is quantized; others are quantized by --quantize int8 or int4",
    ),
    ("--pipeline-parallel-size", "-pp"): Unused(
        "Every rank has a part of every layer.", ("1",), otherwise="--tensor-parallel-size divides a model"
    ),
    ("--data-parallel-size", "-dp"): Unused("One engine runs.", ("1",), otherwise=_ONE),
    ("--api-server-count",): Unused("One process serves HTTP.", ("1",), otherwise="there is one process for HTTP"),
    ("--distributed-executor-backend",): Unused("Ranks are processes of one machine.", ("mp", "uni"), otherwise=_ONE),
    ("-O0", "-O1", "-O2", "-O3"): Unused("Nothing is compiled when the server starts.", is_switch=True),
    ("--compilation-config", "--optimization-level"): Unused("Nothing is compiled when the server starts."),
    ("--max-seq-len-to-capture", "--cuda-graph-sizes"): Unused("The sizes are fixed; see --enforce-eager."),
    ("--enable-chunked-prefill",): Unused("Long prompts are always computed in chunks.", is_switch=True),
    ("--async-scheduling", "--no-async-scheduling"): Unused("Scheduling has one mode.", is_switch=True),
    ("--scheduling-policy",): Unused(
        "Requests run in order of arrival; rows of /v1/batches run after them.", ("fcfs",),
        otherwise="requests set no priority; only rows of /v1/batches have a lower priority",
    ),
    ("--max-parallel-loading-workers",): Unused("Weights are mapped into memory, not read by workers."),
    ("--use-tqdm-on-load", "--no-use-tqdm-on-load"): Unused("Loading always shows its progress.", is_switch=True),
    ("--load-format",): Unused(
        "The format of weights is recognized by their files.", ("auto", "safetensors", "pt", "bitsandbytes", "gguf"),
        otherwise="weights are safetensors, PyTorch's files or .gguf, which are recognized by their files",
    ),
    ("--config-format",): Unused(
        "Checkpoints are in Hugging Face layout or .gguf files.", ("auto", "hf"),
        otherwise="checkpoints are in Hugging Face layout or .gguf files",
    ),
    ("--tokenizer-mode",): Unused(
        "The kind of tokenizer is recognized by its files.", ("auto", "hf"),
        otherwise="the kind of tokenizer is recognized by its files",
    ),
    ("--num-speculative-tokens",): Unused("Measured times decide how many tokens are drafted."),
    ("--task", "--runner"): Unused(
        "Models generate text.", ("auto", "generate"), otherwise="only models that generate text are supported"
    ),
    ("--chat-template-content-format",): Unused(
        "The format is read from the template.", ("auto",), otherwise="what a template takes is found out from it"
    ),
    ("--generation-config",): Unused(
        "Defaults of sampling parameters come from the checkpoint's generation_config.json.", ("auto",),
        otherwise="the checkpoint's generation_config.json counts; requests may say otherwise",
    ),
    ("--prefix-caching-hash-algo",): Unused("Blocks have blake3 digests of their content as keys."),
    ("--mm-processor-cache-type",): Unused("Prepared images are kept in the server's memory."),
    ("--skip-mm-profiling",): Unused(
        "Only --kv-cache-memory skips the measurement of a largest step on a GPU.", is_switch=True
    ),
    ("--collect-detailed-traces",): Unused("Traces always have all details."),
    ("--show-hidden-metrics-for-version",): Unused("No metrics are hidden."),
    ("--enable-prompt-tokens-details",): Unused("`usage` always has these details.", is_switch=True),
    ("--enable-request-id-headers",): Unused("Every answer has its X-Request-Id.", is_switch=True),
    ("--disable-frontend-multiprocessing",): Unused("The engine is always a separate process.", is_switch=True),
    ("--disable-custom-all-reduce",): Unused("Ranks exchange by NCCL or gloo.", is_switch=True),
}  # fmt: skip

_LORA = "Adapters are computed in the type of the model, and a request names its own."
_PROXY = "Put a reverse proxy in front of the server, such as nginx or Caddy."
_TOKENIZER = "A tokenizer belongs to its checkpoint; put its files into a copy of the model's folder."
_HUB = "Set HF_HOME for the folder of downloads and HF_TOKEN for the token; --revision names the version."
_CONFIG = "Change config.json in a copy of the model's folder."
_MISSING: Mapping[tuple[str, ...], Missing] = {
    ("--code-revision",): Missing("Code from a checkpoint is never run; --revision names the version of its files."),
    ("--tokenizer", "--tokenizer-revision", "--skip-tokenizer-init"): Missing(_TOKENIZER),
    ("--download-dir", "--hf-token", "--ignore-patterns"): Missing(_HUB),
    ("--hf-config-path", "--hf-overrides", "--rope-scaling", "--rope-theta", "--disable-sliding-window"): Missing(
        _CONFIG
    ),
    ("--override-generation-config",): Missing("Put the parameters into each request."),
    ("--default-chat-template-kwargs", "--trust-request-chat-template"): Missing(
        "--chat-template names a file with another template."
    ),
    ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers", "--enable-ssl-refresh",
     "--uds", "--allow-credentials", "--allowed-methods", "--allowed-headers",
     "--middleware"): Missing(_PROXY),
    ("--root-path",): Missing("Let the proxy in front of the server strip the prefix of the path."),
    ("--h11-max-header-count",): Missing("--max-header-bytes bounds the headers of a request."),
    ("--disable-fastapi-docs",): Missing("--enable-page covers /docs and the web page; /openapi.json is always there."),
    ("--media-io-kwargs",): Missing("--mm-processor-kwargs takes fps, and --max-video-frames bounds the frames."),
    ("--interleave-mm-strings", "--enable-mm-embeds", "--enable-prompt-embeds", "--mm-encoder-tp-mode",
     "--mm-encoder-attn-backend", "--mm-encoder-only", "--video-pruning-rate", "--io-processor-plugin",
     "--limit-mm-data-per-prompt"): Missing("Images and videos have settings of their own: --max-images and others."),
    ("--logprobs-mode",): Missing("Log probabilities are always those of the model, before biases and temperature."),
    ("--return-tokens-as-token-ids",): Missing("Set return_tokens_as_token_ids in each request."),
    ("--num-gpu-blocks-override",): Missing("--kv-cache-memory sets the size of the KV cache."),
    ("--cpu-offload-gb",): Missing("Weights stay on one device; --quantize int8 or int4 reduces their size."),
    ("--no-enable-chunked-prefill",): Missing(
        "Long prompts are always computed in chunks; --max-num-batched-tokens sets their size."
    ),
    ("--max-num-partial-prefills", "--max-long-partial-prefills", "--long-prefill-token-threshold",
     "--scheduler-delay-factor", "--num-scheduler-steps", "--num-lookahead-slots", "--stream-interval",
     "--disable-chunked-mm-input", "--scheduler-cls", "--preemption-mode"): Missing(
        "A step is bounded by --max-num-seqs and --max-num-batched-tokens."
    ),
    ("--lora-dtype", "--lora-extra-vocab-size", "--fully-sharded-loras", "--default-mm-loras",
     "--enable-prompt-adapter"): Missing(_LORA),
    ("--tool-parser-plugin", "--tool-server"): Missing(
        "There is no such setting; --tool-call-parser sets the form of calls."
    ),
    ("--structured-outputs-config", "--guided-decoding-backend"): Missing(
        "Grammars always use llguidance; docs/api.md describes the formats that requests may set."
    ),
    ("--logits-processors", "--logits-processor-pattern"): Missing("Code from outside vlmserve is never run."),
    ("--log-config-file",): Missing("--log-format json writes the log for programs."),
    ("--enable-log-outputs", "--max-log-len"): Missing(
        "--log-prompts logs prompts, and --enable-debug serves /debug/cache, which shows the state of each request."
    ),
    ("--enable-sleep-mode",): Missing("--sleep-after unloads an idle model until the next request."),
    ("--kv-transfer-config", "--kv-events-config", "--enable-expert-parallel", "--data-parallel-rank",
     "--data-parallel-size-local", "--data-parallel-address", "--data-parallel-rpc-port", "--data-parallel-backend",
     "--decode-context-parallel-size", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless",
     "--worker-cls", "--worker-extension-cls", "--ray-workers-use-nsight"): Missing(_ONE),
    ("--attention-backend", "--override-attention-dtype", "--disable-cascade-attn"): Missing(
        "--kernels chooses between the native kernels and torch."
    ),
    ("--pooler-config", "--override-pooler-config", "--convert"): Missing(
        "--pooling says how hidden states become a vector; every model also generates text."
    ),
}  # fmt: skip


def _expand() -> dict[str, Entry]:
    entries: dict[str, Entry] = dict(_RENAMED)
    for group in (_UNUSED, _MISSING):
        entries |= {name: entry for names, entry in group.items() for name in names}
    return entries


FLAGS: Mapping[str, Entry] = _expand()
"""All flags of vLLM with other names here, by name."""

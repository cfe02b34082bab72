"""llama-server's flags: which ones set our settings, and which have no effect.

This is data, like `vlmserve.settings.vllm_flags`; `vlmserve.cli.spellings` applies both to command lines.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlmserve.errors import ConfigurationError
from vlmserve.settings.vllm_flags import Entry, Missing, Renamed, Unused

MODEL_FLAGS = ("--model", "-m", "-hf", "-hfr", "--hf-repo")
"""Flags that name the model, which is an argument of our commands."""

_CACHE_TYPES = {"f32": "auto", "f16": "auto", "bf16": "auto", "q8_0": "int8"}


def _context(text: str) -> Mapping[str, str]:
    """0 means the checkpoint's context length, our default."""
    return {} if text == "0" else {"max_model_len": text}


def _gpu_layers(text: str) -> Mapping[str, str]:
    """0 means no GPU. Other numbers have no effect: all layers run on one device."""
    if not text.isdecimal() and text not in ("all", "auto"):
        raise ConfigurationError(f"the layers on the GPU are a whole number, all or auto, not {text}")
    return {"device": "cpu"} if text == "0" else {}


def _cache_type(text: str) -> Mapping[str, str]:
    if text not in _CACHE_TYPES:
        raise ConfigurationError(f"the KV cache can have the types {', '.join(_CACHE_TYPES)}, not {text}")
    return {"kv_cache_dtype": _CACHE_TYPES[text]}


_SAMPLING = "Requests set it; defaults come from the model's generation_config.json."
_ENTRIES: Mapping[tuple[str, ...], Entry] = {
    ("-c", "--ctx-size"): Renamed(("max_model_len",), _context, note="0: what the model allows"),
    ("-np", "--parallel"): Renamed(("max_num_seqs",)),
    ("-t", "--threads", "-tb", "--threads-batch"): Renamed(("num_threads",)),
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): Renamed(("device",), _gpu_layers, note="0 means `--device cpu`"),
    ("-b", "--batch-size"): Renamed(("max_num_batched_tokens",)),
    ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"): Renamed(
        ("kv_cache_dtype",), _cache_type, note="`q8_0` means `int8`; keys and values have one type"
    ),
    ("-mm",): Renamed(("mmproj",)),
    ("-md", "--model-draft", "-hfd", "--hf-repo-draft"): Renamed(("draft_model",)),
    ("--draft-max", "--draft-min", "--draft", "--draft-n", "--draft-p-min", "--spec-type"): Unused(
        "Measured times decide what is drafted, and how much."
    ),
    ("-a", "--alias"): Renamed(("served_model_name",)),
    ("--chat-template-file",): Renamed(("chat_template",)),
    ("--temp",): Renamed(("temperature",), elsewhere=_SAMPLING),
    ("-n", "--predict", "--n-predict"): Renamed(
        ("max_tokens",), elsewhere="--default-max-tokens is for requests that set no limit."
    ),
    ("-ub", "--ubatch-size"): Unused("--max-num-batched-tokens sets the tokens of a step."),
    ("-fa", "--flash-attn"): Unused(
        "Attention never stores the scores of all tokens.",
        ("on", "off", "auto"),
        otherwise="Write on, off or auto after it.",
    ),
    ("-cb", "--cont-batching", "--jinja", "--mlock", "--no-mmap", "--metrics", "--slots", "--no-warmup"): Unused(
        "vlmserve batches continuously, renders Jinja templates, maps weights, and serves /metrics.", is_switch=True
    ),
    ("--embedding", "--embeddings", "--rerank", "--reranking"): Unused(
        "Every model serves /v1/embeddings and /v1/rerank.", is_switch=True
    ),
    ("--top-k", "--top-p", "--min-p", "--repeat-penalty"): Missing(_SAMPLING),
    ("--image", "-p", "--prompt"): Missing(
        'Images and the question are arguments: vlmserve ask photo.png "What is this?"'
    ),
    ("-mu", "--model-url"): Missing("Give a Hugging Face id like owner/name:Q4_K_M, or a downloaded file."),
    ("-hff", "--hf-file"): Missing("Name the file after the repository: owner/name:Q4_K_M or owner/name/file.gguf."),
    ("-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu"): Missing(
        "--tensor-parallel-size divides a model among GPUs, and --device cuda:1 chooses one."
    ),
}

LLAMA_FLAGS: Mapping[str, Entry] = {name: entry for names, entry in _ENTRIES.items() for name in names}
"""All flags of llama.cpp with other names here, by name."""

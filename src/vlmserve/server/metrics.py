"""The engine's statistics in Prometheus' text format.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from vlmserve.types import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FAMILIES = (
    ("num_running", "gauge", "requests_running", "Requests in the running batch."),
    ("num_waiting", "gauge", "requests_waiting", "Requests that wait for their turn."),
    ("kv_blocks_total", "gauge", "kv_blocks", "Blocks of the KV cache."),
    ("kv_blocks_used", "gauge", "kv_blocks_used", "Blocks that hold running requests."),
    ("prompt_tokens", "counter", "prompt_tokens_total", "Prompt tokens computed."),
    ("prefix_queried_tokens", "counter", "prefix_queried_tokens_total", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cached_tokens", "counter", "prefix_cached_tokens_total", "Prompt tokens found in the prefix cache."),
    ("generation_tokens", "counter", "generation_tokens_total", "Tokens generated."),
    ("preemptions", "counter", "preemptions_total", "Running requests that had to give up their blocks."),
    ("images_encoded", "counter", "images_encoded_total", "Pictures that went through the vision tower."),
    ("steps", "counter", "steps_total", "Batches run."),
)


def exposition(stats: EngineStats) -> str:
    """The page that Prometheus scrapes."""
    return "".join(
        f"# HELP vlmserve_{name} {text}\n# TYPE vlmserve_{name} {kind}\nvlmserve_{name} {getattr(stats, field)}\n"
        for field, kind, name, text in _FAMILIES
    )

"""Which tests `make check` leaves out.

The fast lane is for while one works: it takes about four minutes on two cores. Left out are whole files: those that
start servers and browsers again and again, and those that compare many whole models with transformers. `make test` runs
all.
"""

from __future__ import annotations

from pathlib import Path

_SLOW = {
    ".": "bench gguf",
    "benchmarks": "soak",
    "cli": "help vllm",
    "engine": """blip drafts families gemma3 moondream original_families parity qwen_chat qwen_vl ranks sampling
        static_parity static_qwen_vl static_sampling static_stress stress structured tiles transformers_backend
        transformers_images""",
    "frontend": "beams",
    "kernels": "attention_backends cpu_attention other_processors",
    "kernels/triton": "attention compiled products sampling",
    "loadtest": "command perform",
    "media": "pdf processor",
    "models": "blip families gguf llava published_quantization tiles",
    "sampling": "sampler",
    "scaleout": "faults gateway ray",
    "server": """attacks bad_input batch_faults caching crash debug fuzz guard limits load messages_tools metrics
        openapi ranks reasoning response_tools responses run sampling structured supervision tools tracing""",
    "storage": "store",
    "training/pixie": "train",
    "web": "accessibility chat live_view thoughts",
}
"""Names of files without ``test_`` and ``.py``, by their folder."""

SLOW = frozenset(
    Path(folder, f"test_{name}.py").as_posix() for folder, names in _SLOW.items() for name in names.split()
)
"""The files, as paths within ``tests``."""

MOST_SECONDS = 15
"""A file that takes longer, with the whole machine for it, belongs to `SLOW`."""

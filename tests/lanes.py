"""Which tests `make check` leaves out.

The fast lane is for while one works: it takes about two minutes on two cores. Left out are whole files: those that
start servers and browsers again and again, and those that compare many whole models with transformers. `make test` runs
all.
"""

from __future__ import annotations

from pathlib import Path

_SLOW = {
    ".": "async_llm bench confidence cores examples gguf imports",
    "adapters": "serving xlora xlora_checkpoint xlora_pool",
    "batch": "run",
    "benchmarks": "gpu soak",
    "calibration": "cache quality run",
    "clients": "coding_agents",
    "devices": "cpu",
    "engine": """beams blip captures drafts families gemma3 image_budget moondream ocr original_families parity process
        quantized_cache quantized_images qwen_chat qwen_vl ranks sampling stress structured thoughts tiles
        transformers_backend transformers_images""",
    "frontend": "beams client xml_tools",
    "kernels": "attention_backends cpu_attention cpu_program other_processors",
    "kernels/triton": "attention compiled emulated layers products sampling",
    "loadtest": "command perform",
    "media": "decoding heif pdf processor",
    "models": "blip broken_checkpoints families gguf llava published published_quantization stages tiles",
    "pixie": "skills",
    "prompt": "template_limits",
    "sampling": "sampler",
    "scaleout": "absence engines faults gateway handover limits ray simulated",
    "server": """adapters attacks bad_input batch_faults batches caching conversations crash debug documents files
        fuzz guard hostile_files limits live load media_attacks messages messages_tools metrics openapi ranks reasoning
        response_tools responses run sampling structured supervision tools tracing""",
    "storage": "store",
    "training/pixie": "train",
    "web": "accessibility batches_view chat live_view thoughts",
}
"""Names of files without ``test_`` and ``.py``, by their folder."""

SLOW = frozenset(
    Path(folder, f"test_{name}.py").as_posix() for folder, names in _SLOW.items() for name in names.split()
)
"""The files, as paths within ``tests``."""

LONGEST = """
    kernels/triton/test_emulated.py kernels/test_other_processors.py kernels/triton/test_compiled.py
    scaleout/test_ray.py scaleout/test_faults.py
    models/test_gguf.py kernels/triton/test_layers.py server/test_ranks.py server/test_openapi.py
    kernels/triton/test_attention.py media/test_heif.py models/test_published_quantization.py
    server/test_hostile_files.py server/test_attacks.py pixie/test_skills.py server/test_load.py
    prompt/test_template_limits.py models/test_stages.py models/test_llava.py engine/test_parity.py
""".split()
"""The longest files, with the longest one first: workers begin with them, so that none has one left at the end."""

MOST_SECONDS = 8
"""A file that takes longer, with the whole machine for it, belongs to `SLOW`."""

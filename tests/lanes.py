"""Which tests `make check` leaves out.

The fast lane is for while one works: it takes about two minutes on two cores. Left out are whole files: those that
start servers and browsers again and again, and those that compare many whole models with transformers. `make test` runs
all.
"""

from __future__ import annotations

from pathlib import Path

_SLOW = {
    ".": "cores examples folders forked_workers gguf imports mmproj second_tries",
    "adapters": "captured merge parity serving xlora xlora_checkpoint xlora_pool",
    "batch": "run",
    "benchmarks": """checkouts context gpu gpu_static image_reuse mutations photos restart retrieval sizes soak
        state_reuse""",
    "calibration": "blip cache prompts quality run",
    "cli": "vllm",
    "clients": "coding_agents",
    "devices": "cpu",
    "engine": """beams blip captures contract disk_cache draft_fuzz drafts embeddings families gemma3 gemma4
        image_budget image_families moondream mtp ocr original_families overlap parity preload process
        quantized_cache quantized_images qwen_chat qwen_vl rank_disk ranks sampling slow_grammars state_fuzz states
        states_applied stress structured thoughts tiles transformers_backend transformers_images warm_up""",
    "frontend": "beams client processors tools xml_tools",
    "kernels": "attention_backends cpu_attention cpu_program other_processors quantized_cache",
    "kernels/triton": "attention compiled emulated experts layers products sampling tiles towers",
    "loadtest": "command perform",
    "media": "decoding fork_server heif pdf processor tiles",
    "models": """bitsandbytes blip broken_checkpoints decoder estimate families footprint gemma4_vision gguf
        granite_docling hybrids internvl llava muse_glimmer ocr original_families pixtral published
        published_quantization quantized stages tiles weights weights_cache""",
    "offline": "async_llm confidence llm llm_threads",
    "pixie": "model suggestions",
    "prompt": "detokenize template_limits text_time tokenizer",
    "sampling": "closing dialects grammar sampler",
    "scaleout/ondemand": "serving",
    "scaleout": "absence engines faults gateway handover index limits ray router simulated",
    "server": """adapters attacks bad_input batch_faults batches caching chat conversations crash debug documents
        files fuzz guard hostile_files hostile_grammars hostile_templates limits live load
        media_attacks messages messages_tools metrics openapi ranks reasoning response_tools
        responses run sampling structured supervision tools tracing""",
    "storage": "store",
    "tools": "bench",
    "training/pixie": "adapters skills train",
    "web": "accessibility batches_view chat live_view thoughts",
}
"""Names of files without ``test_`` and ``.py``, by their folder."""

SLOW = frozenset(
    Path(folder, f"test_{name}.py").as_posix() for folder, names in _SLOW.items() for name in names.split()
)
"""The files, as paths within ``tests``."""

LONGEST = """
    kernels/triton/test_emulated.py kernels/test_other_processors.py kernels/triton/test_compiled.py web/test_chat.py
    scaleout/test_ray.py server/test_ranks.py clients/test_coding_agents.py engine/test_tiles.py test_gguf.py
    engine/test_ranks.py server/test_run.py calibration/test_run.py kernels/triton/test_attention.py
    engine/test_transformers_images.py server/test_attacks.py engine/test_families.py engine/test_qwen_vl.py
    models/test_gguf.py server/test_supervision.py server/test_hostile_files.py scaleout/test_faults.py
    engine/test_stress.py engine/test_structured.py server/test_hostile_grammars.py server/test_batch_faults.py
""".split()
"""The longest files, with the longest one first: workers begin with them, so that none has one left at the end."""

MOST_SECONDS = 5
"""A file that takes longer, with the whole machine for it, belongs to `SLOW`."""

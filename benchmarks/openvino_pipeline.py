"""How the benchmarks start OpenVINO GenAI."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def start_pipeline(folder: Path | str, *, cache_gib: int, max_num_seqs: int, prefix_caching: bool) -> Any:
    """An `openvino_genai.ContinuousBatchingPipeline` on the CPU with the same limits as vlmserve.

    ONEDNN_MAX_CPU_ISA holds for OpenVINO's kernels as well, but OpenVINO goes on to choose bfloat16 where the processor
    has it, for which the kernels of a lower instruction set are missing. So float32 is asked for then, which is what
    OpenVINO chooses on a processor without bfloat16.
    """
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = cache_gib
    scheduler.enable_prefix_caching = prefix_caching
    scheduler.max_num_seqs = max_num_seqs
    scheduler.max_num_batched_tokens = 2048
    properties = {"INFERENCE_PRECISION_HINT": "f32"} if "ONEDNN_MAX_CPU_ISA" in os.environ else {}
    return openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)

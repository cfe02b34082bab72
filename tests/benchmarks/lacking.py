"""Starts a model with images on a null GPU and runs requests while a call finds too little memory.

Prints the errors of these requests, and of requests afterwards, as JSON.

FOLDER: a checkpoint of `tests.benchmarks.filled`.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import torch

from benchmarks import null_gpu
from tests.benchmarks.filled import image_request
from vlmserve.engine.engine import Engine
from vlmserve.settings.config import EngineConfig
from vlmserve.types import EngineRequest, Prompt, SamplingParams

CALLS = ("cudaMalloc", "cudaHostAlloc", "attend_rows", "draw_rows", "cublasCreate")
"""Of a step: of torch's allocators, when kernels are loaded at their first launch, and of a library."""
FAILING = {"cudaMalloc", "attend_rows", "draw_rows"}
"""Those that each of these steps needs. Pinned memory and handles are kept from earlier steps."""
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LOGPROBS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)


def errors(engine: Engine, number: int) -> dict[str, str]:
    """Errors of requests: a text, a text with log-probabilities and a text with an image, all uncached."""
    ids = [5 + number, *[7] * 40]
    requests = [EngineRequest("text", Prompt(ids), GREEDY), EngineRequest("logprobs", Prompt([8, *ids]), LOGPROBS)]
    requests.append(image_request("image", number, engine, GREEDY))
    torch.cuda.empty_cache()
    for request in requests:
        engine.add(request)
    found = {}
    while engine.has_work():
        # Kernels compute nothing, so other errors may tell of results that are no numbers.
        found |= {one.request_id: one.error for one in engine.step() if one.error and "memory" in one.error}
    return found


def main(folder: Path) -> None:
    library = ctypes.CDLL(null_gpu.LIBRARY)
    config = EngineConfig(model=str(folder), device="cuda", max_num_seqs=8, max_num_batched_tokens=512)
    library.null_gpu_lack(b"cudaGraphInstantiate")
    engine = Engine(config, folder)
    found = {"cudaGraphInstantiate": [{}, errors(engine, 0)]}
    for number, call in enumerate(CALLS, 1):
        library.null_gpu_lack(call.encode())
        failed = errors(engine, 2 * number)
        library.null_gpu_lack(b"")
        found[call] = [failed, errors(engine, 2 * number + 1)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A process of `benchmarks.image_turns`, with vLLM's packages: PYTHON vllm_process.py CHECKPOINT

Each line of standard input is JSON: messages in which an image is the path of a file. Each is answered by a line with
the seconds until the first token, the tokens of the prompt, and those found in the cache.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def serve(folder: str) -> None:
    # vLLM writes its log to standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, dtype="bfloat16", max_model_len=8192, max_num_seqs=4, enforce_eager=True, enable_prefix_caching=True,
        limit_mm_per_prompt={"image": 8},
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        messages = opened(json.loads(line))
        started = time.perf_counter()
        [result] = llm.chat(messages, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        found = seconds, len(result.prompt_token_ids), result.num_cached_tokens or 0
        print(json.dumps(found), file=answers, flush=True)


def opened(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with images in place of their paths."""
    from PIL import Image

    def part(one: dict[str, Any]) -> dict[str, Any]:
        return (
            {"type": "image_pil", "image_pil": Image.open(one["image"]).convert("RGB")}
            if one["type"] == "image"
            else one
        )

    return [
        {**message, "content": [*map(part, message["content"])]} if isinstance(message["content"], list) else message
        for message in messages
    ]


if __name__ == "__main__":
    serve(sys.argv[1])

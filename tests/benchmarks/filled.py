"""Starts a model on a null GPU, fills its caches and steps, and prints its limit and peak of memory in bytes, as JSON.

FOLDER KIND: a checkpoint, and "text", "lora" or "images".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.checkpoints import make_llava
from vlmserve.engine.engine import Engine
from vlmserve.levels import Levels
from vlmserve.settings.config import EngineConfig
from vlmserve.types import EngineRequest, ImageInput, ImageSpan, Prompt, SamplingParams

WIDTH, INNER, LAYERS, VOCABULARY = 512, 2048, 2, 32000
TEXT = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
TEXT |= {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 4096}
SIDE, PATCH = 224, 14
VISION = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}
IMAGE_TOKENS = (SIDE // PATCH) ** 2
LEVELS = Levels(1 / 255, (0.5,) * 3, (0.25,) * 3)
STREAMS, TOKENS, RANK = 32, 2048, 64
MOST_BLOCKS = STREAMS * TEXT["max_position_embeddings"] // 16
"""Of full contexts; more are of no use."""


def make(folder: Path) -> None:
    """A checkpoint with images."""
    make_llava(folder, text=TEXT, vision=VISION, dtype=torch.bfloat16)


def write_adapter(folder: Path) -> Path:
    """An adapter of all MLPs."""
    folder.mkdir()
    tensors = {}
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("gate_proj", INNER, WIDTH),
            ("up_proj", INNER, WIDTH),
            ("down_proj", WIDTH, INNER),
        ):
            key = f"base_model.model.model.language_model.layers.{layer}.mlp.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, columns)
            tensors[f"{key}.lora_B.weight"] = torch.randn(rows, RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8}))
    return folder


def settings(kind: str) -> dict[str, Any]:
    if kind == "lora":
        return {"enable_lora": True, "lora_memory": "32MiB", "max_cpu_loras": 8, "encoder_cache_memory": "1MiB"}
    if kind == "images":
        return {"encoder_cache_memory": "32MiB"}
    return {"kv_offload_memory": "256MiB", "encoder_cache_memory": "1MiB"}


def image(number: int) -> ImageInput:
    random = np.random.default_rng(number)
    pixels = random.integers(0, 256, (1, 3, SIDE, SIDE), dtype=np.uint8)
    return ImageInput(bytes([number]) * 32, pixels, IMAGE_TOKENS, levels=LEVELS)


def image_request(name: str, number: int, engine: Engine, params: SamplingParams, more: int = 0) -> EngineRequest:
    """Two images, then `more` tokens."""
    token = engine.runner.model.image_token_id
    assert token is not None
    spans = [ImageSpan(image(2 * number + place), 1 + place * IMAGE_TOKENS) for place in range(2)]
    return EngineRequest(name, Prompt([5, *[token] * (2 * IMAGE_TOKENS), *[7] * more], tuple(spans)), params)


def requests(kind: str, engine: Engine) -> list[EngineRequest]:
    """Long prompts, each of other tokens, with log-probabilities and penalties."""
    params = SamplingParams(
        temperature=1, top_p=0.9, max_tokens=40, ignore_eos=True, logprobs=0, repetition_penalty=1.5
    )
    numbers = range(2 * STREAMS)
    if kind == "images":
        return [image_request(str(number), number, engine, params, 500) for number in numbers]
    adapter = "own" if kind == "lora" else ""
    return [EngineRequest(str(one), Prompt([5 + one, *[7] * 1500]), params, adapter=adapter) for one in numbers]


def main(folder: Path, kind: str) -> None:
    torch.cuda.mem_get_info()
    config = EngineConfig(
        model=str(folder), device="cuda", max_num_seqs=STREAMS, max_num_batched_tokens=TOKENS, **settings(kind)
    )
    engine = Engine(config, folder)
    if kind == "lora":
        for number in range(8):
            engine.adapter_store.load(
                "own" if not number else str(number), write_adapter(folder.parent / f"adapter-{number}")
            )
    torch.cuda.reset_peak_memory_stats()
    for request in requests(kind, engine):
        engine.add(request)
    failed = []
    while engine.has_work():
        failed += [str(output.error) for output in engine.step() if output.error]
    limit = int(torch.cuda.mem_get_info()[1] * config.memory_fraction)
    stats = engine.stats()
    found = {
        "limit": limit,
        "peak": torch.cuda.max_memory_allocated(),
        "failed": failed[:2],
        "blocks": stats.kv_blocks_total,
        "preemptions": stats.preemptions,
        "images": stats.images_encoded,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

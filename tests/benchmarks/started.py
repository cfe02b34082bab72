"""Starts a tiny model on a null GPU, runs steps of all kinds, and prints what was captured and compiled, as JSON.

KIND [LAYERS]: one of `CONFIGS`, "lora" or "x-lora". With a number of layers, no steps run after the start.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from triton import knobs

from benchmarks import gpu_decode, gpu_stages, null_gpu
from vlmserve.devices.cuda import TritonDevice
from vlmserve.devices.device import LayerExecutor
from vlmserve.devices.graphs import GraphExecutor
from vlmserve.families.registry import decoder_spec
from vlmserve.families.spec import ArchSpec
from vlmserve.runner.kv import PoolSizes
from vlmserve.runner.runner import ModelRunner
from vlmserve.runner.warm_up import warm_up_steps
from vlmserve.steps import AdapterLoad, CachedRequest, NewRequest, SchedulerOutput
from vlmserve.types import ImagePlacement, SamplingParams

MAX_LEN, BATCH = 1400, 96
GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
BIASED = msgspec.structs.replace(GREEDY, logit_bias={3: 1.0}, frequency_penalty=0.5)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "experts": {"model_type": "qwen3_moe", "head_dim": 16, "mlp_only_layers": [], "decoder_sparse_step": 1, **EXPERTS},
    "gemma": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 512, "query_pre_attn_scalar": 16}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen": {"model_type": "qwen3_vl_text", "head_dim": 16, "rope_scaling": {"mrope_section": [4, 2, 2]}},
}
IMAGE = b"image"


def spec_of(config: dict[str, Any]) -> ArchSpec:
    """The decoder of a model with images."""
    spec = decoder_spec(config)
    return dataclasses.replace(spec, bidirectional="images") if config["model_type"] == "gemma3_text" else spec


class Started:
    """The runner after its start. layers: of the model; None: two."""

    def __init__(self, kind: str, layers: int = 2) -> None:
        self.adapter = gpu_decode.ADAPTER if kind.endswith("lora") else b""
        self.mixes = kind == "x-lora"
        self.has_images = kind in ("gemma", "qwen")
        self.limit = 160 if kind == "experts" else 64
        self._executors: list[LayerExecutor] = []
        config = gpu_stages.TINY.config | {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 128}
        config |= {"num_hidden_layers": layers, **CONFIGS.get(kind, {})}
        gpu_decode.decoder_spec = spec_of
        make = TritonDevice.executor
        TritonDevice.executor = lambda device: self._keep(make(device))  # type: ignore[method-assign]
        sizes = dataclasses.replace(gpu_stages.TINY, config=config)
        model = gpu_decode.random_model(torch.device("cuda"), sizes, "none", eager=False)
        adapters = gpu_decode.random_adapter(model, loaded=False, mixed=self.mixes) if self.adapter else None
        self.runner = ModelRunner(model, PoolSizes(16, 4000), gpu_decode.no_grammars, adapters)
        self.width = model.language_model.image_width * model.dtype.itemsize
        warm_up_steps(
            self.runner, max_num_seqs=BATCH, max_num_batched_tokens=self.limit, max_model_len=MAX_LEN, seconds=600
        )

    def _keep(self, executor: LayerExecutor) -> LayerExecutor:
        self._executors.append(executor)
        return executor

    @property
    def num_captured(self) -> int:
        executor = self._executors[0]
        assert isinstance(executor, GraphExecutor)
        return executor.num_captured

    def request(self, name: str, start: int, rows: int, blocks: Sequence[int], **options: Any) -> NewRequest:
        ids, tables = [0] * (start + rows), [[*blocks]]
        if options.get("adapter") and self.mixes:
            tables *= 2
        settings = {"params": GREEDY, "seed": 0, "max_len": MAX_LEN, "end_token_ids": [], **options}
        return NewRequest(name, start, rows, start + rows, ids, tables, **settings)

    def run(self, requests: list[NewRequest], steps: int = 0, **step: Any) -> None:
        """Requests of a step, and more steps that decode."""
        self.runner.submit(SchedulerOutput(new_requests=requests, **step)).result()
        for number in range(1, steps + 1):
            following = [CachedRequest(one.request_id, one.start + number, 1) for one in requests]
            self.runner.submit(SchedulerOutput(cached_requests=following)).result()
        finished = [one.request_id for one in requests]
        self.runner.submit(SchedulerOutput(finished_request_ids=finished)).result()

    def run_prompts(self) -> None:
        """Whole prompts, and chunks after long prefixes, alone and beside decodes of short and long contexts."""
        for start, rows in ((0, 12), (0, 31), (1300, 2), (1300, 60), (0, self.limit)):
            for beside in ([], [3], [1300]):
                decodes = [self.request("decode", context, 1, [0] * 90) for context in beside]
                options = {"params": BIASED, "adapter": self.adapter}
                prompt = self.request("prompt", start, rows - len(beside), [0] * 90, **options)
                self.run([*decodes, prompt])
                if self.has_images:
                    image = ImagePlacement(IMAGE, start, rows - len(beside), grid=(1, 1, rows - len(beside)))
                    self.run([*decodes, msgspec.structs.replace(prompt, images=(image,))])

    def run_decodes(self, count: int, longest: int) -> None:
        requests = [
            self.request(
                str(number),
                (longest if number == 0 else 3) - 1,
                1,
                range(number * 40, number * 40 + 38),
                adapter=self.adapter if number % 2 == 0 else b"",
            )
            for number in range(count)
        ]
        self.run(requests, steps=3)


def main(kind: str, layers: int | None = None) -> None:
    compiled: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda fn, **rest: compiled.append(fn.name)
    library = ctypes.CDLL(null_gpu.LIBRARY)
    before = null_gpu.counts(library)
    started = Started(kind, layers or 2)
    after = null_gpu.counts(library)
    found = {"captured": started.num_captured, "compiled": len(compiled), "launches": after.launches - before.launches}
    if layers is None:
        compiled.clear()
        captured = []
        loads = [AdapterLoad(0, started.adapter)] if started.adapter else []
        shown = np.zeros(started.limit * started.width, np.uint8)
        started.runner.submit(SchedulerOutput(adapter_loads=loads, embeddings_to_place={IMAGE: shown})).result()
        started.run_prompts()
        for count in (BATCH, 40, 3):
            for longest in (3, 590):
                started.run_decodes(count, longest)
                captured.append(started.num_captured)
        found |= {"compiled later": compiled, "captured later": captured}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

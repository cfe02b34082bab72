"""What LoRA adapters cost: steps with and without them, taking turns in one process.

    python -m benchmarks.adapters --model SmolLM2-135M-Instruct.Q4_1.gguf

Two engines share the machine: one that serves no adapters and one with `--adapters` random ones of rank `--rank` on all
linear layers of the decoder. Measured are decode steps of one stream and of `--streams`, and prompts, each of base
requests in both engines and of adapted ones in the second. Every measurement is made in each turn, so that whatever
else the machine does meets them all alike; ratios are medians of the turns' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from vlmserve.config import EngineConfig
from vlmserve.engine.engine import Engine, load
from vlmserve.models.adaptable import AdaptableModel
from vlmserve.models.hub import resolve_model
from vlmserve.types import EngineRequest, Prompt, SamplingParams


def write_adapter(model: AdaptableModel, folder: Path, *, rank: int, seed: int) -> None:
    """A random adapter of all linear layers of the decoder, as PEFT saves them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, place in model.places.items():
        if not name.startswith("language_model.layers."):
            continue
        key = f"base_model.model.model.{name.removeprefix('language_model.')}"
        down = torch.randn(rank, place.in_features, generator=generator) / place.in_features**0.5
        tensors[f"{key}.lora_A.weight"] = down
        tensors[f"{key}.lora_B.weight"] = torch.randn(place.size, rank, generator=generator) * 0.01
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def decode(engine: Engine, adapters: Sequence[str], *, prompt: int, steps: int) -> float:
    """Median seconds of a step with a stream for each of these adapters; "" is the model itself."""
    params = SamplingParams(temperature=0, max_tokens=steps + 2, ignore_eos=True)
    for number, adapter in enumerate(adapters):
        tokens = [(7 * number + 3 * place) % 1000 + 10 for place in range(prompt)]
        engine.add(EngineRequest(str(number), Prompt(tokens), params, adapter=adapter))
    while any(not request.num_tokens > prompt for request in engine.inspect().requests):
        engine.step()
    taken = []
    while engine.has_work():
        started = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[:steps])


def prefill(engine: Engine, adapter: str, *, prompt: int) -> float:
    """Seconds until the first token of a new prompt."""
    tokens = torch.randint(10, 1000, (prompt,)).tolist()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.add(EngineRequest("prompt", Prompt(tokens), params, adapter=adapter))
    started = time.perf_counter()
    while engine.has_work():
        engine.step()
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pixie")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompts that are measured")
    parser.add_argument("--steps", type=int, default=30, help="decode steps of each measurement")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    settings = {
        "model": options.model, "kv_cache_memory": "256MiB", "enable_prefix_caching": False, "dtype": options.dtype,
        "num_threads": options.threads,
    }  # fmt: skip
    folder = resolve_model(options.model)
    plain = Engine(EngineConfig(**settings), folder)
    config = EngineConfig(**settings, enable_lora=True, max_loras=options.adapters, max_lora_rank=options.rank)
    adapted = Engine.from_model(config, load(config, folder))
    names = [f"adapter-{number}" for number in range(options.adapters)]
    with tempfile.TemporaryDirectory() as place:
        for seed, name in enumerate(names):
            write_adapter(adapted.adapter_store.model, Path(place) / name, rank=options.rank, seed=seed)
            adapted.adapter_store.load(name, Path(place) / name)
    mixed = [names[number % len(names)] for number in range(options.streams)]
    work = {"prompt": 16, "steps": options.steps}
    measurements = {
        "one stream": (lambda: decode(plain, [""], **work), {
            "base, adapters enabled": lambda: decode(adapted, [""], **work),
            "adapter": lambda: decode(adapted, names[:1], **work),
        }),
        f"{options.streams} streams": (lambda: decode(plain, [""] * options.streams, **work), {
            "base, adapters enabled": lambda: decode(adapted, [""] * options.streams, **work),
            f"{len(names)} adapters": lambda: decode(adapted, mixed, **work),
        }),
        f"prompt of {options.prompt}": (lambda: prefill(plain, "", prompt=options.prompt), {
            "base, adapters enabled": lambda: prefill(adapted, "", prompt=options.prompt),
            "adapter": lambda: prefill(adapted, names[0], prompt=options.prompt),
        }),
    }  # fmt: skip
    rows = []
    for work_name, (base, others) in measurements.items():
        for measure in (base, *others.values()):
            measure()
        turns = [[base(), *(measure() for measure in others.values()), base()] for _ in range(options.turns)]
        for number, name in enumerate(others, 1):
            ratio = statistics.median((turn[0] + turn[-1]) / 2 / turn[number] for turn in turns)
            seconds = statistics.median(turn[number] for turn in turns)
            reference = statistics.median((turn[0] + turn[-1]) / 2 for turn in turns)
            row = {"work": work_name, "what": name, "ms": 1e3 * seconds, "base_ms": 1e3 * reference, "speed": ratio}
            rows.append(row)
            print("{work:15} {what:24} {ms:8.2f} ms, base {base_ms:8.2f} ms: {speed:.3f} of base".format(**row))
    if options.json is not None:
        options.json.write_text(json.dumps({"settings": vars(options) | {"json": None}, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()

"""What LoRA adapters and X-LoRA cost: steps with and without them, taking turns in one process.

    python -m benchmarks.adapters --model SmolLM2-135M-Instruct.Q4_1.gguf

Measured are bursts of decode steps, and prompts, in turn, so that whatever else the machine does meets them all alike.
Base requests and those with random adapters of rank `--rank` on all linear layers of the decoder take turns in one
engine, over the same weights in memory. An engine without adapters takes its turns beside it, and so does a second one
like that: how much these two differ is how much it matters where in memory a copy of the weights is. Reported are
medians of the turns, and the median of the ratios of each turn. X-LoRA mixes `--mixed` of the adapters. With `--peft`
PEFT's `generate` takes turns as well, with the same X-LoRA checkpoint over the weights as transformers reads them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vlmserve.engine.engine import Engine
from vlmserve.models.adaptable import AdaptableModel
from vlmserve.models.hub import resolve_model
from vlmserve.settings.config import EngineConfig
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
    names = sorted({name.rpartition(".")[2] for name in model.places if name.startswith("language_model.layers.")})
    content = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(content))


def write_xlora(model: AdaptableModel, folder: Path, *, rank: int, count: int) -> None:
    """Random adapters and a random classifier that mixes them, as PEFT has them."""
    for seed in range(count):
        write_adapter(model, folder / str(seed), rank=rank, seed=seed)
    size = model.places["language_model.embed_tokens"].in_features
    key = "base_model.internal_xlora_classifier.layers.0"
    tensors = {f"{key}.weight": torch.randn(count, size) / size**0.5, f"{key}.bias": torch.zeros(count)}
    save_file(tensors, folder / "adapter_model.safetensors")
    adapters = {str(number): str(number) for number in range(count)}
    content = {"peft_type": "XLORA", "task_type": "CAUSAL_LM", "hidden_size": size, "adapters": adapters}
    (folder / "adapter_config.json").write_text(json.dumps(content))


class PeftStream:
    """PEFT's `generate` with an X-LoRA checkpoint: a request of as many tokens as those of `Streams`."""

    def __init__(self, model: Path, folder: Path, steps: int, dtype: str) -> None:
        from peft import XLoraConfig, get_peft_model
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        where = {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name} if model.is_file() else {
            "pretrained_model_name_or_path": model
        }  # fmt: skip
        base = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
        base.config.use_cache = False
        content = json.loads((folder / "adapter_config.json").read_text())
        content["adapters"] = {name: str(folder / name) for name in content["adapters"]}
        self._model = get_peft_model(base, XLoraConfig(**{k: v for k, v in content.items() if k != "peft_type"})).eval()
        tensors = load_file(folder / "adapter_model.safetensors")
        missing = self._model.load_state_dict(tensors, strict=False)
        assert not missing.unexpected_keys
        self._steps = steps
        self.turn()

    def turn(self) -> float:
        """Mean seconds of a token."""
        tokens = torch.tensor([[3 * place % 1000 + 10 for place in range(16)]])
        started = time.perf_counter()
        with torch.inference_mode():
            answer = self._model.generate(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), min_new_tokens=self._steps,
                max_new_tokens=self._steps, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return (time.perf_counter() - started) / (answer.shape[1] - 16)


class Streams:
    """Requests of an engine that decode, one for each of these adapters; "" is the model itself."""

    def __init__(self, engine: Engine, adapters: Sequence[str], steps: int) -> None:
        self._engine, self._adapters, self._steps = engine, adapters, steps
        self.turn()

    def turn(self) -> float:
        """Median seconds of a step."""
        params = SamplingParams(temperature=0, max_tokens=self._steps + 8, ignore_eos=True)
        for number, adapter in enumerate(self._adapters):
            tokens = [(7 * number + 3 * place) % 1000 + 10 for place in range(16)]
            self._engine.add(EngineRequest(str(number), Prompt(tokens), params, adapter=adapter))
        for _ in range(4):
            self._engine.step()
        taken = []
        for _ in range(self._steps):
            started = time.perf_counter()
            self._engine.step()
            taken.append(time.perf_counter() - started)
        self._engine.abort([str(number) for number in range(len(self._adapters))])
        return statistics.median(taken)


class Prompts:
    """Prompts of an engine, one after another, with an adapter."""

    def __init__(self, engine: Engine, adapter: str, length: int) -> None:
        self._engine, self._adapter, self._length = engine, adapter, length
        self.turn()

    def turn(self) -> float:
        """Seconds until the first token behind a prompt."""
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        tokens = torch.randint(10, 1000, (self._length,)).tolist()
        self._engine.add(EngineRequest("prompt", Prompt(tokens), params, adapter=self._adapter))
        started = time.perf_counter()
        while self._engine.has_work():
            self._engine.step()
        return time.perf_counter() - started


def compare(
    work: str, runs: dict[str, Streams | Prompts | PeftStream], references: dict[str, str], turns: int
) -> Iterator[dict[str, Any]]:
    """A row for each run that has a reference, which it is compared with."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns):
        order = list(runs)
        # Nobody is always the one behind the same other.
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            taken[name].append(runs[name].turn())
    for name, base in references.items():
        ratio = statistics.median(a / b for a, b in zip(taken[base], taken[name], strict=True))
        seconds, reference = (1e3 * statistics.median(taken[one]) for one in (name, base))
        yield {"work": work, "what": name, "of": base, "ms": seconds, "base_ms": reference, "speed": ratio}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pixie")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--mixed", type=int, default=4, help="adapters that X-LoRA mixes")
    parser.add_argument("--peft", metavar="DTYPE", help="compare X-LoRA with PEFT's in this type, like bfloat16")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompts that are measured")
    parser.add_argument("--steps", type=int, default=15, help="decode steps of a turn")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    settings = {
        "model": options.model, "kv_cache_memory": "128MiB", "enable_prefix_caching": False, "dtype": options.dtype,
        "num_threads": options.threads, "speculation": "off",
    }  # fmt: skip
    folder = resolve_model(options.model)
    config = EngineConfig(**settings, enable_lora=True, max_loras=options.adapters + 1, max_lora_rank=options.rank)
    plain, copy = (Engine(EngineConfig(**settings), folder) for _ in range(2))
    adapted = Engine(config, folder)
    names = [f"adapter-{number}" for number in range(options.adapters)]
    with tempfile.TemporaryDirectory() as place:
        for seed, name in enumerate(names):
            write_adapter(adapted.adapter_store.model, Path(place) / name, rank=options.rank, seed=seed)
            adapted.adapter_store.load(name, Path(place) / name)
        write_xlora(adapted.adapter_store.model, Path(place) / "mixed", rank=options.rank, count=options.mixed)
        adapted.adapter_store.load("mixed", Path(place) / "mixed")
        peft = None
        if options.peft:
            peft = PeftStream(folder, Path(place) / "mixed", options.steps, options.peft)
    rows: list[dict[str, Any]] = []
    several = f"{min(len(names), options.streams)} adapters"
    for work, make, different in (
        ("1 stream", lambda engine, names: Streams(engine, names[:1], options.steps), "1 adapter"),
        (f"{options.streams} streams", lambda engine, names: Streams(engine, names, options.steps), several),
        (f"prompt of {options.prompt}", lambda engine, names: Prompts(engine, names[0], options.prompt), "1 adapter"),
    ):
        base, many = [""] * options.streams, [names[number % len(names)] for number in range(options.streams)]
        runs: dict[str, Streams | Prompts | PeftStream] = {
            "base": make(plain, base),
            "base, another copy": make(copy, base),
            "base, adapters enabled": make(adapted, base),
            different: make(adapted, many),
            "X-LoRA": make(adapted, ["mixed"] * options.streams),
        }
        references = {
            "base, another copy": "base",
            "base, adapters enabled": "base",
            different: "base, adapters enabled",
            "X-LoRA": "base, adapters enabled",
        }
        if peft is not None and work == "1 stream":
            runs["PEFT's X-LoRA"], references["PEFT's X-LoRA"] = peft, "X-LoRA"
        rows += compare(work, runs, references, options.turns)
    for row in rows:
        print("{work:14} {what:24} {ms:8.2f} ms, {base_ms:8.2f} ms: {speed:.3f} of {of}".format(**row))
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    main()

"""Prefix hits of a hybrid model: turns of conversations about images, repeats, several answers, and texts that part.

    .venv/bin/python -m benchmarks.state_reuse                  # Qwen3.5's layers beside Qwen3-VL's, random weights
    .venv/bin/python -m benchmarks.state_reuse --size tiny

Both models have the same width, depth and vision tower. The first turn of a conversation shows four images. Earlier
turns are written without reasoning, as Qwen3.5's template does, so an answer is computed again in the next prompt.
Shares are tokens found in the cache, divided by tokens that the prompt shares with the earlier prompt. Times to the
first token are medians, interleaved between the models.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from benchmarks.command import keep, show_rows
from benchmarks.peers import version
from benchmarks.random_models import RANDOM_MODELS
from vlmserve.engine.engine import Engine
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.types import EngineOutput, EngineRequest, Prompt, SamplingParams

LEAST_TEXT = 64
"""Tokens of the shortest shared text."""
TURNS, IMAGES, OTHERS = 8, 4, 16
ANSWER = "There are three red squares and one blue circle in the second image."
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""Turns as Qwen3.5's template writes them, and the beginning of reasoning, which later prompts leave out."""
TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "system", "user", "assistant")
"""Words that are one token of Qwen's vocabulary, and several of pixie's."""


class Size(NamedTuple):
    """Dimensions of both models."""

    hidden: int
    inner: int
    heads: int
    key_heads: int
    layers: int = 8
    head: int = 32
    linear_heads: tuple[int, int] = (4, 8)
    """Heads of keys and of values in linear attention."""
    linear_head: int = 32
    tower: tuple[int, int, int, int] | None = None
    """Layers, width, inner width and heads; None: 4 layers as wide as the decoder."""


SIZES = {
    "tiny": Size(64, 96, 4, 2),
    "small": Size(256, 768, 8, 2),
    "larger heads": Size(256, 768, 8, 2, 8, 64, (4, 8), 128, (4, 256, 512, 4)),
    "0.8b": Size(1024, 3584, 8, 2, 24, 256, (16, 16), 128, (12, 768, 3072, 12)),
}
COLUMNS = (
    "Workload", "Shared tokens", "Found in the cache, %", "First token, ms", "First token of Qwen3-VL, ms", "Ratio",
)  # fmt: skip


def write_model(folder: Path, kind: str, size: Size) -> Path:
    """A random checkpoint in `folder`. kind: "Qwen3_5" or "Qwen3VL"."""
    import torch
    import transformers

    def save(folder: Path, ids: Mapping[str, int]) -> None:
        hybrid = kind == "Qwen3_5"
        turned = size.head // 8 if hybrid else size.head // 2
        sections = [turned - 2 * (turned // 3), turned // 3, turned // 3]
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
        text: dict[str, Any] = {
            "hidden_size": size.hidden, "intermediate_size": size.inner, "num_attention_heads": size.heads,
            "num_key_value_heads": size.key_heads, "num_hidden_layers": size.layers, "head_dim": size.head,
            "vocab_size": max(ids.values()) + 8, "tie_word_embeddings": True, "max_position_embeddings": 16384,
            "rope_parameters": {**rope, "partial_rotary_factor": 0.25} if hybrid else rope,
        }  # fmt: skip
        depth, width, inner, heads = size.tower or (4, size.hidden, 2 * size.hidden, 8)
        vision: dict[str, Any] = {
            "depth": depth, "hidden_size": width, "intermediate_size": inner, "num_heads": heads,
            "out_hidden_size": size.hidden,
        }  # fmt: skip
        if hybrid:
            key_heads, value_heads = size.linear_heads
            text |= {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads}
            text |= {"linear_key_head_dim": size.linear_head, "linear_value_head_dim": size.linear_head}
        else:
            vision["deepstack_visual_indexes"] = [1, 2, 3]
        config = getattr(transformers, f"{kind}Config")(
            text_config=text,
            vision_config=vision,
            tie_word_embeddings=True,
            **{f"{name}_token_id": ids[f"<|{name}|>"] for name in ("vision_start", "vision_end")},
            **{f"{name}_token_id": ids[f"<|{name}_pad|>"] for name in ("image", "video")},
        )
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
        model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids["<|im_end|>"]}))

    folder.mkdir()
    published = RANDOM_MODELS["qwen3-vl"]
    dataclasses.replace(published, save=save, tokens=(*published.tokens, *TOKENS)).write(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Served:
    """A model with its caches."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(
            model=str(folder), device="cpu", kv_cache_memory="512MiB", max_num_seqs=1 + OTHERS, max_model_len=16384
        )
        self.engine = Engine(config, folder)
        self.preparer = RequestPreparer(folder, MediaConfig())
        self._number = 0

    def ask(self, prompts: Sequence[Prompt], answer: int = 8) -> tuple[list[int], float]:
        """Send prompts at once. Return how many tokens of each were found, and the seconds to the first token of the
        first one."""
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        names = [f"{self._number + number}" for number in range(len(prompts))]
        self._number += len(prompts)
        started = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add(EngineRequest(name, prompt, params))
        found: dict[str, int] = {}
        first = 0.0
        while self.engine.has_work():
            for output in self.engine.step():
                self._check(output)
                found.setdefault(output.request_id, output.cached_tokens)
                if output.request_id == names[0]:
                    first = first or time.perf_counter() - started
        return [found[name] for name in names], first

    @staticmethod
    def _check(output: EngineOutput) -> None:
        if output.error is not None:
            raise RuntimeError(output.error)


def messages(person: int, turn: int, side: int) -> list[dict[str, Any]]:
    """A conversation up to the question of a turn, the first being 0. side: of its images, in pixels."""
    found: list[dict[str, Any]] = [{"role": "system", "content": "You are a helpful assistant that looks closely."}]
    for number in range(turn + 1):
        text = f"Question {number} of person {person}: what do the images have in common, and how do they differ?"
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if number == 0:
            parts = [{"type": "image", "image": picture(IMAGES * person + i, side)} for i in range(IMAGES)] + parts
        found.append({"role": "user", "content": parts})
        if number < turn:
            found.append({"role": "assistant", "content": ANSWER})
    return found


@functools.cache
def picture(seed: int, side: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8))


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading tokens two prompts share. Their images are the same."""
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Bench:
    """The same requests to a hybrid model, which is the first one, and to others."""

    def __init__(self, folders: Sequence[Path], side: int, turns: int = TURNS) -> None:
        self._models = [Served(folder) for folder in folders]
        self._side, self._turns = side, turns
        self._people = 0

    def people(self, count: int) -> range:
        """Return people who have not asked anything."""
        self._people += count
        return range(self._people - count, self._people)

    def prompts(self, served: Served, people: Sequence[int], turn: int) -> list[Prompt]:
        """The prompts of a turn of several conversations."""
        told = [messages(person, turn, self._side) for person in people]
        return [served.preparer.chat(one, allow_local=True, add_generation_prompt=True) for one in told]

    def turns(self, others: int) -> list[Any]:
        """A row about later turns of a conversation, with others that run at the same time."""
        people = self.people(1 + others)
        total = hits = 0
        times: list[list[float]] = [[] for _ in self._models]
        earlier: list[int] = []
        for turn in range(self._turns):
            for number, served in enumerate(self._models):
                prompts = self.prompts(served, people, turn)
                found, first = served.ask(prompts)
                if turn:
                    times[number].append(first)
                if number == 0:
                    token_ids = prompts[0].token_ids
                    total += shared(earlier, token_ids) if turn else 0
                    hits += found[0] if turn else 0
                    earlier = token_ids
        name = f"turns 2 to {self._turns}" + f", {others} other conversations" * bool(others)
        return row(name, total, hits, times)

    def repeats(self) -> Iterator[list[Any]]:
        """Rows about the same prompt sent again, and about four answers to a new one."""
        for name, count in (("identical prompt", 1), ("n = 4", 4)):
            people, times = self.people(1), []
            for number, served in enumerate(self._models):
                [prompt] = self.prompts(served, people, 2)
                if count == 1:
                    served.ask([prompt])
                found, first = served.ask([prompt] * count)
                times.append([first])
                if number == 0:
                    again = found[-3:]
                    hits, total = sum(again), len(again) * len(prompt.token_ids)
            yield row(name, total, hits, times)

    def texts(self, lengths: Sequence[int]) -> Iterator[list[Any]]:
        """Rows about the second request that shares a text: it parts from the first one at three places."""
        generator = random.Random(0)
        for length in lengths:
            total = hits = 0
            times: list[list[float]] = [[] for _ in self._models]
            for place in range(length // 4, length, length // 4):
                first, second = ([generator.randrange(300, 1000) for _ in range(length)] for _ in range(2))
                for number, served in enumerate(self._models):
                    served.ask([Prompt(first)])
                    found, seconds = served.ask([Prompt([*first[:place], *second[place:]])])
                    times[number].append(seconds)
                    hits += found[0] if number == 0 else 0
                total += place
            yield row(f"second request of a shared text of {length:,} tokens", total, hits, times)


def row(name: str, total: int, hits: int, times: Sequence[Sequence[float]]) -> list[Any]:
    """Figures of a workload: tokens of the hybrid model, seconds of each model."""
    medians = [1000 * statistics.median(one) for one in times]
    ratios = [round(medians[0] / other, 2) for other in medians[1:]]
    return [name, total, round(100 * hits / total, 2), *(round(one, 1) for one in medians), *ratios]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all workloads and show a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.state_reuse", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--size", choices=SIZES, default="small", help="width of both models (default small)")
    parser.add_argument("--others", type=int, default=OTHERS, help="other conversations (default 16)")
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of a conversation (default 8)")
    parser.add_argument("--texts", type=int, nargs="*", default=[500, 2000, 8000], help="tokens of shared texts")
    parser.add_argument("--image-side", type=int, default=512, help="pixels of an image's side (default 512)")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    if options.turns < 2:
        parser.error("--turns must be 2 or more: the first turn has nothing to find")
    if min(options.texts, default=LEAST_TEXT) < LEAST_TEXT:
        parser.error(f"--texts must be {LEAST_TEXT} or more")
    with tempfile.TemporaryDirectory(prefix="vlmserve-states-") as place:
        size = SIZES[options.size]
        folders = [write_model(Path(place) / kind, kind, size) for kind in ("Qwen3_5", "Qwen3VL")]
        bench = Bench(folders, options.image_side, options.turns)
        rows = [bench.turns(0), bench.turns(options.others), *bench.repeats(), *bench.texts(options.texts)]
    report = {
        "title": "Prefix hits of hybrid models",
        "command": " ".join(["python -m benchmarks.state_reuse", *(sys.argv[1:] if arguments is None else arguments)]),
        "model": f"Qwen3.5 and Qwen3-VL, {options.size}",
        "weights": "random",
        "versions": {package: version(package) for package in ("vlmserve", "torch")},
        "columns": list(COLUMNS),
        "rows": rows,
        "plot": ["Found in the cache, %"],
    }
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()

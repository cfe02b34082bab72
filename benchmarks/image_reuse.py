"""What it is worth to see an image once: the same requests with the caches on and off, in the same run.

    .venv/bin/python -m benchmarks.image_reuse                     # 500 requests, CLIP ViT-L/14-336, random weights
    .venv/bin/python -m benchmarks.image_reuse --model pixie --requests 200

Workloads: a share of the requests asks about the image of the request before it (0%, 30%, 90%); the same requests
sent twice; conversations in which each turn brings one more image. Each request carries its images as files, so
reading them counts. `concurrency` requests are under way at a time. With the caches off every image is a new one to
the engine and no block is found again. The memory of the KV cache has been written to before an engine is measured, as
on a server that has been up for a while: an engine that keeps what it knows would else pay for memory that the system
hands out for the first time, while one that forgets goes on with the same few blocks.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.command import model_parser, run
from benchmarks.engine import save_random_llama
from vlmserve.devices.choice import find_device
from vlmserve.engine.engine import Engine
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.models.hub import resolve_model
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.registry import load_model
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.types import KEY_BYTES, EngineRequest, Prompt, SamplingParams

QUESTIONS = ("What is in the image?", "Describe the image.", "How many objects are there?", "What is this?")


@dataclass
class Conversation:
    """Turns to send one after the other: each an image's file and a question. messages: what was said so far."""

    turns: list[tuple[bytes, str]]
    messages: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """One pass over a workload. Times in seconds; `first_token` of each request, from when its files were there.

    cpu_seconds: of all threads, which other work on the machine disturbs less.
    """

    seconds: float
    cpu_seconds: float
    first_token: list[float]
    images_sent: int
    images_encoded: int
    cached_tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class Row:
    """What is reported of a workload, with the caches on or off: medians over the repeats."""

    workload: str
    caches: str
    requests_per_s: float
    ratio: float
    cpu_ms: float
    ttft_ms: float
    images_sent: int
    images_encoded: int
    cached_share: float


class Bench:
    """A model, its preprocessing, and how many requests are under way at a time."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
        self.model: LoadedModel = load_model(folder, LoadSettings(device=find_device(options.device), dtype=dtype))
        self.folder = folder
        self.options = options

    def engine(self, *, caches: bool) -> tuple[Engine, RequestPreparer]:
        """An engine and a preparer with empty caches, or ones that keep nothing."""
        config = EngineConfig(
            model=str(self.folder),
            kv_cache_memory=self.options.kv_cache_memory,
            enable_prefix_caching=caches,
            speculation="off",
        )
        media = MediaConfig() if caches else MediaConfig(image_cache_memory=0)
        engine = Engine.from_model(config, self.model)
        for layer in engine.runner._kv.layers:
            layer.keys.zero_()
            layer.values.zero_()
        return engine, RequestPreparer(self.folder, media)

    def run(self, engine: Engine, preparer: RequestPreparer, workload: list[Conversation], *, caches: bool) -> Outcome:
        """Send everything, at most `concurrency` conversations at a time, each turn when the one before is answered."""
        params = SamplingParams(temperature=0, max_tokens=self.options.answer_len, ignore_eos=True)
        before = engine.stats()
        waiting = [Conversation(list(conversation.turns)) for conversation in reversed(workload)]
        running: dict[str, tuple[Conversation, float, list[int]]] = {}
        first_token: list[float] = []
        names = iter(range(10**9))
        images = prompt_tokens = 0

        def send(conversation: Conversation) -> None:
            nonlocal images, prompt_tokens
            started = time.perf_counter()
            image, question = conversation.turns.pop(0)
            parts = [{"type": "image", "image": image}, {"type": "text", "text": question}]
            conversation.messages.append({"role": "user", "content": parts})
            prompt = preparer.chat(conversation.messages, allow_local=True)
            name = str(next(names))
            engine.add(EngineRequest(name, prompt if caches else _disguised(prompt), params))
            running[name] = (conversation, started, [])
            images += len(prompt.images)
            prompt_tokens += len(prompt.token_ids)

        started, cpu_started = time.perf_counter(), time.process_time()
        while waiting or running:
            while waiting and len(running) < self.options.concurrency:
                send(waiting.pop())
            for output in engine.step():
                conversation, sent, tokens = running[output.request_id]
                if not tokens:
                    first_token.append(time.perf_counter() - sent)
                tokens += output.token_ids
                if output.finish_reason is None:
                    continue
                del running[output.request_id]
                answer = preparer.tokenizer.decode(tokens)
                conversation.messages.append({"role": "assistant", "content": answer or "."})
                if conversation.turns:
                    send(conversation)
        after = engine.stats()
        return Outcome(
            time.perf_counter() - started,
            time.process_time() - cpu_started,
            first_token,
            images,
            after.images_encoded - before.images_encoded,
            after.prefix_cached_tokens - before.prefix_cached_tokens,
            prompt_tokens,
        )


def _disguised(prompt: Prompt) -> Prompt:
    """The same prompt with images that no cache has seen."""
    spans = tuple(
        msgspec.structs.replace(span, image=msgspec.structs.replace(span.image, key=os.urandom(KEY_BYTES)))
        for span in prompt.images
    )
    return msgspec.structs.replace(prompt, images=spans)


def image_file(number: int, side: int) -> bytes:
    """A PNG of coarse noise, another one for each number."""
    from PIL import Image

    draw = random.Random(number)
    small = Image.frombytes("RGB", (side // 16, side // 16), draw.randbytes(3 * (side // 16) ** 2))
    file = io.BytesIO()
    small.resize((side, side)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def reuse_workload(count: int, share: float, side: int, seed: int = 0) -> list[Conversation]:
    """Single questions; a `share` of them, evenly spread, is about the image of the one before."""
    workload: list[Conversation] = []
    image = b""
    for number in range(count):
        repeats = number > 0 and int((number + 1) * share) > int(number * share)
        image = image if repeats else image_file(seed * 1_000_000 + number, side)
        workload.append(Conversation([(image, QUESTIONS[number % len(QUESTIONS)])]))
    return workload


def turns_workload(count: int, turns: int, side: int, seed: int = 0) -> list[Conversation]:
    """Conversations with one more image in each turn."""
    return [
        Conversation(
            [
                (image_file(seed * 1_000_000 + number * turns + turn, side), QUESTIONS[turn % len(QUESTIONS)])
                for turn in range(turns)
            ]
        )
        for number in range(count)
    ]


def save_random_llava(folder: Path) -> Path:
    """LLaVA with a tower of the shape of CLIP ViT-L/14-336 and a text model of SmolLM2-135M's, with random weights.

    Its tokenizer and chat template are pixie's.
    """
    from transformers import AutoConfig, CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    text_folder = folder / "text"
    text = AutoConfig.from_pretrained(save_random_llama(text_folder))
    shutil.rmtree(text_folder)
    text.max_position_embeddings = 8192
    pixie = resolve_model("pixie")
    for path in pixie.iterdir():
        if path.suffix in (".json", ".jinja") and path.name not in ("config.json", "generation_config.json"):
            shutil.copy(path, folder)
    settings = json.loads((pixie / "config.json").read_text("utf-8"))
    vision = CLIPVisionConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, image_size=336,
        patch_size=14, projection_dim=768,
    )  # fmt: skip
    image_token = settings.get("image_token_index", settings.get("image_token_id"))
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=image_token)
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    size = {"crop_size": {"height": 336, "width": 336}, "size": {"shortest_edge": 336}}
    processor = {"image_processor_type": "CLIPImageProcessor", "do_center_crop": True, "do_resize": True, **size}
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).exists():
            (folder / name).unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def measure(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    bench = Bench(folder, options)
    count, side = options.requests, options.image_side
    kinds: list[tuple[str, Any, int]] = [
        (f"{share:.0%} reuse", lambda seed, share=share: reuse_workload(count, share, side, seed), 1)
        for share in options.reuse
    ]
    kinds.append(("sent twice", lambda seed: reuse_workload(count, 0.3, side, seed), 2))
    conversations = max(1, count // options.turns)
    kinds.append((f"{options.turns} turns", lambda seed: turns_workload(conversations, options.turns, side, seed), 1))
    kinds = [kind for kind in kinds if not options.only or kind[0] in options.only]
    outcomes: dict[tuple[str, bool], list[Outcome]] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Warming up", total=2 * options.repeats * len(kinds))
        engine, preparer = bench.engine(caches=True)
        bench.run(engine, preparer, reuse_workload(min(4, count), 0.0, side, 999), caches=True)
        for (name, make, passes), repeat in ((kind, repeat) for kind in kinds for repeat in range(options.repeats)):
            workload = make(repeat + 1)
            for caches in (True, False) if repeat % 2 else (False, True):
                progress.update(task, description=f"{name}, caches {'on' if caches else 'off'}")
                del engine, preparer  # one cache at a time
                engine, preparer = bench.engine(caches=caches)
                for _ in range(passes if caches else 1):
                    outcome = bench.run(engine, preparer, workload, caches=caches)
                outcomes.setdefault((name, caches), []).append(outcome)
                progress.advance(task)
    rows = [row for name, *_ in kinds for row in summarize(name, outcomes[name, False], outcomes[name, True])]
    return {
        "model": options.model or "random LLaVA, CLIP ViT-L/14-336 and SmolLM2-135M's shape",
        "dtype": str(bench.model.dtype).removeprefix("torch."),
        "device": str(bench.model.device),
        "requests": count,
        "answer_len": options.answer_len,
        "concurrency": options.concurrency,
        "repeats": options.repeats,
        "rows": [asdict(row) for row in rows],
    }


def summarize(name: str, off: Sequence[Outcome], on: Sequence[Outcome]) -> Iterator[Row]:
    """Two rows; ratios are to the caches turned off."""
    rates = {
        caches: statistics.median(len(outcome.first_token) / outcome.seconds for outcome in outcomes)
        for caches, outcomes in (("off", off), ("on", on))
    }
    for caches, outcomes in (("off", off), ("on", on)):
        last = outcomes[-1]
        yield Row(
            workload=name,
            caches=caches,
            requests_per_s=rates[caches],
            ratio=rates[caches] / rates["off"],
            cpu_ms=1e3 * statistics.median(outcome.cpu_seconds / len(outcome.first_token) for outcome in outcomes),
            ttft_ms=1e3 * statistics.median(statistics.median(outcome.first_token) for outcome in outcomes),
            images_sent=last.images_sent,
            images_encoded=last.images_encoded,
            cached_share=last.cached_tokens / last.prompt_tokens,
        )


def show(report: dict[str, Any], console: Console) -> None:
    console.print(
        f"[bold]{report['model']}[/], {report['dtype']}, {report['device']}; {report['requests']} requests, "
        f"{report['concurrency']} at a time, answers of {report['answer_len']} tokens; medians of {report['repeats']}",
        highlight=False,
    )
    columns = ("requests/s", "ratio", "CPU ms", "TTFT ms", "images\nencoded", "prompt tokens\nfound")
    table = Table("workload", "caches", *columns)
    for row in report["rows"]:
        table.add_row(
            row["workload"] if row["caches"] == "off" else "", row["caches"], f"{row['requests_per_s']:.2f}",
            f"{row['ratio']:.2f}", f"{row['cpu_ms']:.0f}", f"{row['ttft_ms']:.0f}",
            f"{row['images_encoded']} of {row['images_sent']}", f"{row['cached_share']:.0%}",
            end_section=row["caches"] == "on",
        )  # fmt: skip
    console.print(table)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = model_parser("benchmarks.image_reuse", __doc__, "a random LLaVA with CLIP ViT-L/14-336")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--reuse", type=float, nargs="*", default=[0.0, 0.3, 0.9], help="shares of repeated images")
    parser.add_argument("--turns", type=int, default=5, help="turns of a conversation")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--answer-len", type=int, default=16)
    parser.add_argument("--image-side", type=int, default=480, help="pixels of an image's side")
    parser.add_argument("--only", nargs="*", help='workloads by name, like "30%% reuse" or "sent twice"')
    parser.add_argument("--repeats", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    run(parse(arguments), save_random_llava, measure, show)


if __name__ == "__main__":
    main()

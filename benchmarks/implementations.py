"""One model by vlmserve's own layers and by transformers', in the same engine, taking turns in one run.

    python -m benchmarks.implementations

The model has the shape of Qwen3-VL-2B with 4 of its 28 layers and 6 of the 24 of its vision tower, and random weights.
Engine, cache and the decoder's attention are vlmserve's both times; `--model-impl` says whose code the rest is.
Questions are about new images of 640 x 480, two at once, with answers of 16 tokens; texts are prompts of 256 random
tokens, two at once, with answers of 32. transformers' processor of Qwen3-VL is loaded without its part for videos,
which needs torchvision.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table
from tokenizers import AddedToken, Tokenizer

from benchmarks.command import keep
from benchmarks.peers import processor, version
from benchmarks.worker import Worker, serve, start_workers
from vlmserve import LLM, SamplingParams
from vlmserve.models.hub import resolve_model

LAYERS, VISION_LAYERS = 4, 6
IMPLEMENTATIONS = ("vlmserve", "transformers")
AT_ONCE, ANSWER_LEN, IMAGE_SIZE = 2, 16, (640, 480)
TEXT_LEN, TEXT_ANSWER_LEN = 256, 32
TOKENS = ("vision_start", "vision_end", "image_pad", "video_pad")
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def save_random_qwen3_vl(folder: Path) -> Path:
    """Qwen3-VL-2B's shape with fewer layers and random weights, before pixie's tokenizer."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = Tokenizer.from_file(str(resolve_model("pixie") / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(f"<|{name}|>") for name in TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        },
        vision_config={
            "depth": VISION_LAYERS, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
            "out_hidden_size": 2048, "deepstack_visual_indexes": [1, 3, 5],
        },
        tie_word_embeddings=True,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def load_processors_without_videos() -> None:
    """Have transformers load Qwen3-VL's processor without torchvision."""
    from transformers import AutoProcessor, AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    class ImagesOnly(Qwen3VLProcessor):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return argument and super().check_argument_for_proper_class(argument_name, argument)

    def load(folder: Path, **_: Any) -> Any:
        images, tokenizer = Qwen2VLImageProcessorPil.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        return ImagesOnly(images, tokenizer, chat_template=tokenizer.chat_template)

    AutoProcessor.from_pretrained = load


def questions(seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    width, height = IMAGE_SIZE
    images = [Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)) for _ in range(AT_ONCE)]
    return [
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]}]
        for image in images
    ]


def texts(seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    return [{"prompt_token_ids": random.integers(10, 1000, TEXT_LEN).tolist()} for _ in range(AT_ONCE)]


def serve_implementation(name: str, folder: Path) -> None:
    """An implementation's own process."""
    if name == "transformers":
        load_processors_without_videos()
    llm = LLM(str(folder), model_impl=name, dtype="bfloat16", device="cpu", kv_cache_memory="1GiB", load="lazy")

    def load() -> None:
        llm.load()
        for kind in KINDS:
            run((kind, KINDS[kind](10**6)))

    def run(work: tuple[str, list[Any]]) -> None:
        kind, requests = work
        length = ANSWER_LEN if kind == "images" else TEXT_ANSWER_LEN
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        answer = llm.chat if kind == "images" else llm.generate
        results = answer(requests, params, use_tqdm=False)
        assert all(len(result.outputs[0].token_ids) == length for result in results)

    serve(load, lambda request: (request["kind"], KINDS[request["kind"]](request["seed"])), run)


KINDS = {"images": questions, "texts": texts}


def measure(workers: Sequence[Worker], turns: int) -> list[dict[str, Any]]:
    """Both implementations in turns: medians of their seconds, and of the turns' ratios."""
    figures = []
    for kind in KINDS:
        seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for turn in range(turns):
            for worker in workers:
                seconds[worker.name].append(worker.run(kind=kind, seed=turn))
        ratios = [theirs / ours for ours, theirs in zip(*seconds.values(), strict=True)]
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        figures.append({"kind": kind, **medians, "ratio": statistics.median(ratios), "ratios": ratios})
    return figures


def show(report: dict[str, Any], console: Console) -> None:
    console.print(f"{report['machine']}; transformers {report['transformers']}; {report['turns']} turns")
    table = Table(f"{AT_ONCE} at once", *(f"{name} s" for name in IMPLEMENTATIONS), "times as fast", "in each turn")
    for row in report["figures"]:
        spread = ", ".join(f"{ratio:.2f}" for ratio in row["ratios"])
        table.add_row(row["kind"], *(f"{row[name]:.2f}" for name in IMPLEMENTATIONS), f"{row['ratio']:.2f}", spread)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.implementations", description=description)
    parser.add_argument("--model", type=Path, help="folder of a Qwen3-VL; default: one with random weights")
    parser.add_argument(
        "--out", type=Path, default=Path("build/implementations"), help="for logs and the default model"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--serve", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve_implementation(options.serve, options.model)
        return
    console = Console()
    folder = options.model or options.out / "qwen3-vl"
    if options.model is None and not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_random_qwen3_vl(folder)
    arguments_of = {name: ["--serve", name, "--model", str(folder)] for name in IMPLEMENTATIONS}
    with start_workers("benchmarks.implementations", arguments_of, options.out, console) as workers:
        if len(workers) < len(IMPLEMENTATIONS):
            raise SystemExit(1)
        figures = measure(workers, options.turns)
    machine, transformers = processor(), version("transformers")
    report = {"machine": machine, "transformers": transformers, "turns": options.turns, "figures": figures}
    show(report, console)
    keep(report, options)


if __name__ == "__main__":
    main()

"""Questions about images: vlmserve beside its peers on the same LLaVA, taking turns in one run.

    python -m benchmarks.image_peers --model DIR --openvino DIR2
    python -m benchmarks.image_peers --gguf DIR --at-a-time 1

20 requests, 4 at a time, each with an image of 480 x 480 as a PNG file and answers of 32 tokens; six of the images
came in the request before. Each set is sent once, which is at first sight, and then the very same again. Without
--model it is CLIP ViT-L/14-336 before SmolLM2-135M's shape, with random weights. OpenVINO reads a form of its own,
which is made in an environment with `optimum-intel` and `openvino-tokenizers`:

    optimum-cli export openvino --task image-text-to-text --model DIR DIR2

With --gguf DIR the model is another one, which lies there in llama.cpp's form (model.gguf and mmproj.gguf), and
vlmserve and llama.cpp both read that. transformers and llama.cpp answer one at a time, and forget. Systems that are not
installed, have no model or do not start are left out.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from benchmarks.command import keep
from benchmarks.image_reuse import reuse_workload, save_random_llava
from benchmarks.openvino_pipeline import start_pipeline
from benchmarks.peers import is_installed, processor, version
from benchmarks.worker import Worker, serve, start_workers

REQUESTS, AT_A_TIME, REPEATED, ANSWER_LEN, SIDE = 20, 4, 0.3, 32, 480


Question = tuple[bytes, str]
"""An image's file and what is asked about it."""


class System(Protocol):
    """A way to answer."""

    package: str

    def load(self, folder: Path, at_a_time: int) -> None:
        """Get ready to answer with the model of a folder, so many questions at a time where it can."""
        ...

    def answer(self, questions: Sequence[Question]) -> None:
        """Answer all of them with so many tokens each, greedily."""
        ...


class Vlmserve:
    package = "vlmserve"

    def __init__(self, quantize: str = "none") -> None:
        self._quantize = quantize

    def load(self, folder: Path, at_a_time: int) -> None:
        from vlmserve import LLM

        self._llm = LLM(
            str(folder), dtype="bfloat16", quantize=self._quantize, quantize_vision=True, max_num_seqs=at_a_time,
            kv_cache_memory="2GiB",
        )  # fmt: skip
        self._llm.load()

    def answer(self, questions: Sequence[Question]) -> None:
        from vlmserve import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=ANSWER_LEN, ignore_eos=True)
        conversations = [
            [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": image}, {"type": "text", "text": text}],
                }
            ]
            for image, text in questions
        ]
        results = self._llm.chat(conversations, params, use_tqdm=False)
        assert all(len(result.outputs[0].token_ids) == ANSWER_LEN for result in results)


class OpenVino:
    package = "openvino-genai"

    def load(self, folder: Path, at_a_time: int) -> None:
        self._pipeline = start_pipeline(folder, cache_gib=2, max_num_seqs=at_a_time, prefix_caching=True)

    def answer(self, questions: Sequence[Question]) -> None:
        import numpy as np
        import openvino
        import openvino_genai
        from PIL import Image

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = ANSWER_LEN
        config.ignore_eos = True
        config.do_sample = False
        images = [Image.open(io.BytesIO(image)).convert("RGB") for image, _ in questions]
        tensors = [[openvino.Tensor(np.asarray(image)[None])] for image in images]
        texts = [text for _, text in questions]
        results = self._pipeline.generate(texts, images=tensors, generation_config=[config] * len(questions))
        # What it counts is the whole batch's.
        assert results[0].perf_metrics.get_num_generated_tokens() == ANSWER_LEN * len(questions)


class Transformers:
    package = "transformers"

    def load(self, folder: Path, at_a_time: int) -> None:
        import torch
        from transformers import AutoModelForImageTextToText

        from vlmserve.frontend.requests import RequestPreparer
        from vlmserve.settings.config import MediaConfig

        # Its own processor needs torchvision, which this machine may lack; the same pixels come from ours.
        self._preparer = RequestPreparer(folder, MediaConfig(image_cache_memory=0))
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def answer(self, questions: Sequence[Question]) -> None:
        import torch

        from vlmserve.devices.pixels import Normalizer

        for image, text in questions:
            parts = [{"type": "image", "image": image}, {"type": "text", "text": text}]
            prompt = self._preparer.chat([{"role": "user", "content": parts}], allow_local=True)
            ids = torch.tensor([prompt.token_ids])
            seen = prompt.images[0].image
            assert seen.levels is not None
            pixels = Normalizer(torch.device("cpu"))(torch.tensor(seen.pixels), seen.levels, torch.bfloat16)
            with torch.inference_mode():
                output = self._model.generate(
                    input_ids=ids, pixel_values=pixels, attention_mask=torch.ones_like(ids), do_sample=False,
                    min_new_tokens=ANSWER_LEN, max_new_tokens=ANSWER_LEN, pad_token_id=0,
                )  # fmt: skip
            assert output.shape[1] == ids.shape[1] + ANSWER_LEN


class LlamaCpp:
    package = "llama-cpp-python"

    def load(self, folder: Path, at_a_time: int) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_chat_format import MTMDChatHandler

        threads = os.cpu_count()
        self._llama = Llama(
            str(folder / "model.gguf"), chat_handler=MTMDChatHandler(str(folder / "mmproj.gguf"), verbose=False),
            n_ctx=4096, n_batch=2048, n_threads=threads, n_threads_batch=threads, verbose=False,
        )  # fmt: skip

    def answer(self, questions: Sequence[Question]) -> None:
        never = {str(self._llama.token_eos()): -1e9}
        for image, text in questions:
            url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
            result: Any = self._llama.create_chat_completion(
                [{"role": "user", "content": parts}], temperature=0.0, max_tokens=ANSWER_LEN, logit_bias=never
            )
            assert result["usage"]["completion_tokens"] == ANSWER_LEN


SYSTEMS: dict[str, Callable[[], System]] = {
    "vlmserve bf16": Vlmserve,
    "vlmserve int8": lambda: Vlmserve("int8"),
    "OpenVINO GenAI f16": OpenVino,
    "transformers bf16": Transformers,
    "llama.cpp": LlamaCpp,
}


def questions_of(seed: int, count: int) -> list[Question]:
    """Questions about images that are new for every seed; a share has the image of the one before."""
    return [conversation.turns[0] for conversation in reuse_workload(count, REPEATED, SIDE, seed)]


def serve_system(name: str, folder: Path, at_a_time: int) -> None:
    """A system's own process."""
    system = SYSTEMS[name]()

    def load() -> None:
        system.load(folder, at_a_time)
        system.answer(questions_of(10**6, 2))

    serve(load, lambda request: questions_of(request["seed"], request["count"]), system.answer)


def measure(
    workers: Sequence[Worker], repeats: int, count: int, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """All systems in turns; requests a second at first sight and of the same set again, medians."""
    seconds: dict[str, list[tuple[float, float]]] = {worker.name: [] for worker in workers}
    for repeat in range(repeats):
        for worker in workers:
            progress(f"{worker.name}, {repeat + 1} of {repeats}")
            seconds[worker.name].append((worker.run(seed=repeat, count=count), worker.run(seed=repeat, count=count)))
    return [
        {
            "system": worker.name,
            "ready": worker.seconds_to_ready,
            "first_sight": count / statistics.median(first for first, _ in seconds[worker.name]),
            "again": count / statistics.median(again for _, again in seconds[worker.name]),
        }
        for worker in workers
    ]


def show(report: dict[str, Any], console: Console) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    console.print(
        f"{report['machine']}; {versions}; medians of {report['repeats']}, {report['at_a_time']} at a time",
        highlight=False,
    )
    table = Table("system", "ready s", "first sight\nrequests/s", "again\nrequests/s")
    for row in report["figures"]:
        table.add_row(row["system"], f"{row['ready']:.1f}", f"{row['first_sight']:.2f}", f"{row['again']:.2f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.image_peers", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--model", type=Path, help="folder of a LLaVA; default: one with random weights")
    parser.add_argument("--openvino", type=Path, help="folder of the same in OpenVINO's form")
    parser.add_argument("--gguf", type=Path, help="folder of a model in llama.cpp's form, in place of --model")
    parser.add_argument("--out", type=Path, default=Path("build/image_peers"), help="for logs and the default model")
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, help="default: all that can run")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--at-a-time", type=int, default=AT_A_TIME)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--serve", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve_system(options.serve, options.model, options.at_a_time)
        return
    console = Console()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.gguf is not None:
        folders = {"vlmserve": options.gguf, "llama-cpp-python": options.gguf}
    else:
        if options.model is None:
            options.model = options.out / "llava"
            if not (options.model / "config.json").exists():
                options.model.mkdir(exist_ok=True)
                save_random_llava(options.model)
        folders = {"vlmserve": options.model, "transformers": options.model, "openvino-genai": options.openvino}
    versions: dict[str, str] = {}
    arguments_of: dict[str, list[str]] = {}
    for name in options.systems or SYSTEMS:
        package = SYSTEMS[name]().package
        folder = folders.get(package)
        if not is_installed(package) or folder is None:
            missing = "no folder with the model in its form (--model, --openvino, --gguf)"
            reason = missing if folder is None else f"{package} is not installed"
            console.print(f"{name}: {reason}", style="yellow")
            continue
        versions[package] = version(package)
        arguments_of[name] = ["--serve", name, "--model", str(folder), "--at-a-time", str(options.at_a_time)]
    with (
        start_workers("benchmarks.image_peers", arguments_of, options.out, console) as workers,
        console.status("") as status,
    ):
        figures = measure(workers, options.repeats, options.requests, status.update)
    report = {
        "machine": processor(), "versions": versions, "repeats": options.repeats, "at_a_time": options.at_a_time,
        "figures": figures,
    }  # fmt: skip
    show(report, console)
    keep(report, options)


if __name__ == "__main__":
    main()

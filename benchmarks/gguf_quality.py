"""What rounding costs in a GGUF file: KL divergence from the file's weights in float32, beside llama.cpp.

    .venv/bin/python -m benchmarks.gguf_quality gemma-3-270m.Q4_K_M.gguf

The text is the project's documentation. llama.cpp runs if llama-cpp-python is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import keep, show_rows
from vlmserve.engine.loading import load
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.kernels.attention import BatchMetadata
from vlmserve.models.hub import resolve_model
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import EngineConfig, MediaConfig

PAGES = Path(__file__).parent.parent / "docs"
BLOCK_SIZE = 16


@torch.inference_mode()
def predictions(path: Path, token_ids: Sequence[int], **options: Any) -> Tensor:
    """Logarithms of the probabilities of each next token, ``[tokens, vocabulary]``, in float32."""
    limits = {"max_model_len": len(token_ids) + BLOCK_SIZE, "weights_cache_size": "0"}
    decoder = load(read_settings(EngineConfig, {"model": str(path), **limits, **options})).language_model
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    caches = decoder.allocate_cache(num_blocks, BLOCK_SIZE)
    positions = torch.arange(len(token_ids))
    metadata = BatchMetadata.of_chunks([(0, len(token_ids))], [range(num_blocks)], BLOCK_SIZE, positions.device)
    hidden = decoder.forward(decoder.embed(torch.tensor(token_ids)), positions, metadata, caches)
    return decoder.logits(hidden).float().log_softmax(-1)


def llama_cpp(path: Path, token_ids: Sequence[int]) -> Tensor:
    """The same by llama.cpp."""
    from llama_cpp import Llama

    model = Llama(str(path), n_ctx=len(token_ids) + BLOCK_SIZE, logits_all=True, verbose=False)
    model.eval(list(token_ids))
    return torch.tensor(model.scores[: len(token_ids)]).float().log_softmax(-1)


def row(name: str, reference: Tensor, own: Tensor) -> list[Any]:
    """Name, mean and 99th percentile of the divergence in nats, percent of equal likeliest tokens."""
    divergence = (reference.exp() * (reference - own)).sum(-1)
    equal = (reference.argmax(-1) == own.argmax(-1)).float().mean()
    return [
        name,
        round(float(divergence.mean()), 5),
        round(float(divergence.quantile(0.99)), 4),
        round(100 * float(equal), 1),
    ]


def measure(path: Path, num_tokens: int) -> dict[str, Any]:
    text = "\n\n".join(page.read_text("utf-8") for page in sorted(PAGES.glob("*.md")))
    preparer = RequestPreparer(resolve_model(str(path)), read_settings(MediaConfig, {}))
    token_ids = preparer.encode(text)[:num_tokens]
    reference = predictions(path, token_ids, kernels="torch", dtype="float32")
    rows = [
        row("vlmserve", reference, predictions(path, token_ids)),
        row("vlmserve, `--input-bits 16`", reference, predictions(path, token_ids, input_bits=16)),
    ]
    if importlib.util.find_spec("llama_cpp"):
        rows.append(row("llama.cpp", reference, llama_cpp(path, token_ids)))
    return {"columns": ["Engine", "Divergence", "Its 99th percentile", "Same likeliest token, percent"], "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gguf_quality", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args()
    report = measure(options.file, options.tokens)
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()

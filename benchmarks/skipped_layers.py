"""Prefill of Gemma 4 with and without skipped layers, interleaved in one process.

    python -m benchmarks.skipped_layers
    python -m benchmarks.skipped_layers --model gemma4:e4b --tokens 1000 --turns 10 --json report.json

Layers that read other layers' keys and values compute the last token of a prompt alone. "Of all rows" divides the time
of a prefill whose layers compute all tokens by the time of one that skips them. Weights are random, in bfloat16, and
the vocabulary is small: neither embeddings nor the output head take part. Figures are medians of the turns' ratios.
Store a report in `benchmarks/results/layers/MACHINE`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import keep, show_rows
from benchmarks.delta import ratios
from benchmarks.peers import version
from vlmserve.devices.choice import open_device
from vlmserve.families.registry import decoder_spec
from vlmserve.kernels.attention import BatchMetadata
from vlmserve.layers.layer import arrange_layers
from vlmserve.models.decoder import Decoder

VOCABULARY = 512
BLOCK_SIZE = 16
_COMMON = {
    "model_type": "gemma4_text",
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_attention_heads": 8,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "gemma4:e2b": {
        **_COMMON,
        "hidden_size": 1536,
        "num_hidden_layers": 35,
        "intermediate_size": 6144,
        "use_double_wide_mlp": True,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    },
    "gemma4:e4b": {
        **_COMMON,
        "hidden_size": 2560,
        "num_hidden_layers": 42,
        "intermediate_size": 10240,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
    },
}
COLUMNS = ("model", "tokens", "ms", "of all rows")
NOTES = "Of all rows: time without skipped layers divided by the time with them. Medians of interleaved turns."


class Prefill:
    """A prompt through the layers of a random model."""

    def __init__(self, config: Mapping[str, Any], tokens: int, kernels: str) -> None:
        device, dtype = open_device(torch.device("cpu"), kernels, torch.bfloat16, automatic=False)
        spec = decoder_spec(config)
        backend = device.attention(spec.attention, dtype)
        self.decoder = Decoder(spec, backend, device.executor(), dtype=dtype, device=torch.device("cpu"))
        for parameter in self.decoder.parameters():
            parameter.data.normal_(std=0.02)
        arrange_layers(self.decoder, device)
        blocks = -(-tokens // BLOCK_SIZE)
        self._caches = self.decoder.allocate_cache(blocks + 1, BLOCK_SIZE)
        self._metadata = BatchMetadata.of_chunks([(0, tokens)], [range(1, blocks + 1)], BLOCK_SIZE)
        self._embeddings = self.decoder.embed(torch.randint(VOCABULARY, (tokens,)))
        self._positions, self._last = torch.arange(tokens), torch.tensor([tokens - 1])

    def run(self, *, skips: bool) -> Tensor:
        """The last token's state. skips: whether the layers that share keys and values compute its row alone."""
        metadata = replace(self._metadata, wanted=[0]) if skips else self._metadata
        return self.decoder.forward(self._embeddings, self._positions, metadata, self._caches, wanted=self._last)


def row(name: str, config: Mapping[str, Any], tokens: int, turns: int, kernels: str) -> list[Any]:
    """Raises RuntimeError if skipped layers change the result."""
    prefill = Prefill(config, tokens, kernels)
    skipped, whole = (prefill.run(skips=skips).float() for skips in (True, False))
    if not torch.allclose(skipped, whole, atol=0.05 * float(whole.abs().max())):
        raise RuntimeError(f"{name}: skipped layers change the result")
    seconds, [relative] = ratios(lambda: prefill.run(skips=True), [lambda: prefill.run(skips=False)], turns)
    return [name, tokens, float(f"{1e3 * seconds:.3g}"), float(f"{relative:.3g}")]


def main(arguments: Sequence[str] | None = None, shapes: Mapping[str, Mapping[str, Any]] = SHAPES) -> None:
    """Measure and show a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.skipped_layers", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--model", nargs="*", choices=list(shapes), default=list(shapes), help="shapes; default: all")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of the prompt (default 1000)")
    parser.add_argument("--kernels", default="auto", help="kernels as of vlmserve serve (default auto)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    with torch.inference_mode():
        rows = [row(name, shapes[name], options.tokens, options.turns, options.kernels) for name in options.model]
    report = {
        "title": "Prefill of Gemma 4 with skipped layers",
        "command": " ".join(["python -m benchmarks.skipped_layers", *(arguments or sys.argv[1:])]),
        "model": "decoders of Gemma 4's shapes",
        "weights": "random, bfloat16",
        "versions": {package: version(package) for package in ("vlmserve", "torch")},
        "columns": list(COLUMNS),
        "rows": rows,
        "notes": f"Kernels: {options.kernels}, {torch.get_num_threads()} threads. {NOTES}",
    }
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()

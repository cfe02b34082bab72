"""What a report of `benchmarks.gpu` says of the targets.

A roofline is the least time that a device needs by the rates that the same report has for it: bytes that have to be
read by the bandwidth of reading, or operations by those of a large product, whichever takes longer (`gpu_work`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu_images import FOUR_BITS, PAGE, PAGES

Report = Mapping[str, Any]
Figures = Mapping[str, Any]


class Row(NamedTuple):
    """share: what was measured beside what it is measured against. met: None where it was not measured."""

    target: str
    measured: str
    share: float | None = None
    met: bool | None = None


class Outcome(NamedTuple):
    """See `Row`."""

    measured: str
    share: float
    met: bool


def rows(report: Report) -> list[Row]:
    """All targets, in their order."""
    found = []
    for target, measure in TARGETS.items():
        try:
            found.append(Row(target, *measure(report)))
        except KeyError:
            # A stage was not run, or ended before it came to this.
            found.append(Row(target, "not measured"))
    return found


def table(found: Sequence[Row]) -> str:
    """One line a target."""
    cells = [("target", "measured", "share", "met")]
    for row in found:
        share = "-" if row.share is None else f"{row.share:.0%}"
        cells.append((row.target, row.measured, share, {None: "-", True: "yes", False: "no"}[row.met]))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "\n".join(line.rstrip() for line in lines)


def roofline(work: Figures, rates: Figures) -> float:
    """Seconds."""
    return max(work["gb"] / rates["read_gb_s"], work["tflop"] / rates["product_tflop_s"])


def _stage(report: Report, name: str) -> Figures:
    figures: Figures = report["stages"][name]
    return figures


def _decodes(scheme: str, streams: int) -> Callable[[Report], Figures]:
    return lambda report: _stage(report, "decode")[f"{scheme}, {streams} streams"]


def _four_bits(report: Report) -> Outcome:
    rate = _decodes("int4", 1)(report)["tokens_s_one_ahead"]
    return Outcome(f"{rate:.0f} tokens/s", rate / 500, rate > 500)


def _plain(report: Report) -> Outcome:
    figures = _decodes("none", 1)(report)
    rate = figures["tokens_s_one_ahead"]
    share = rate * figures["work"]["gb"] / _stage(report, "bandwidth")["copy_gb_s"]
    return Outcome(f"{rate:.0f} tokens/s", share, rate >= 255 if "H200" in report["device"] else share >= 0.85)


def _batch(streams: int) -> Callable[[Report], Outcome]:
    def measure(report: Report) -> Outcome:
        figures = _decodes("none", streams)(report)
        rate = figures["tokens_s_one_ahead"]
        share = roofline(figures["work"], _stage(report, "bandwidth")) * rate / streams
        return Outcome(f"{rate:.0f} tokens/s", share, share >= 0.8)

    return measure


def _first_token(scheme: str) -> Callable[[Report], Outcome]:
    def measure(report: Report) -> Outcome:
        taken = _decodes(scheme, 1)(report)["first_token_ms"]
        return Outcome(f"{taken:.1f} ms", taken / 35, taken <= 35)

    return measure


def _attention(report: Report) -> Outcome:
    rate = _stage(report, "attention")["256 x 1024"]["read_gb_s"]
    share = rate / _stage(report, "bandwidth")["read_gb_s"]
    return Outcome(f"{rate:.0f} GB/s", share, share >= 0.8)


def _host(scheme: str, streams: int) -> Callable[[Report], Outcome]:
    def measure(report: Report) -> Outcome:
        figures = _decodes(scheme, streams)(report)
        wall = streams / figures["tokens_s_one_ahead"] * 1e3
        share = 1 - figures["device_ms"] / wall
        return Outcome(f"{wall:.2f} ms, device {figures['device_ms']:.2f} ms", share, share <= 0.05)

    return measure


def _memory(report: Report) -> Outcome:
    figures = _stage(report, "memory")
    share = figures["paged"] / figures["contiguous"]
    return Outcome(f"{figures['paged'] / 2**20:.1f} of {figures['contiguous'] / 2**20:.1f} MiB", share, share <= 0.7)


def _look(model: str, count: int) -> Callable[[Report], Outcome]:
    def measure(report: Report) -> Outcome:
        figures, rates = _stage(report, "images")[model], _stage(report, "bandwidth")
        least = sum(roofline(work, rates) for work in figures[f"work_{count}"].values())
        taken = count / figures[f"requests_s_{count}"]
        return Outcome(f"{taken * 1e3:.1f} ms", least / taken, least / taken >= 0.8)

    return measure


def _second_look(model: str) -> Callable[[Report], Outcome]:
    def measure(report: Report) -> Outcome:
        figures = _stage(report, "images")[model]
        first, second = figures["first_look_ms"], figures["second_look_ms"]
        return Outcome(f"{first:.1f} ms, then {second:.1f} ms", first / second / 10, first >= 10 * second)

    return measure


TARGETS: dict[str, Callable[[Report], Outcome]] = {
    "Mistral-7B, 4 bits, 1 stream at 1k: > 500 tokens/s": _four_bits,
    "Mistral-7B, bf16, 1 stream at 1k: >= 255 tokens/s on an H200, elsewhere 85% of a copy's bytes/s": _plain,
    **{f"Mistral-7B, bf16, {streams} streams at 1k: >= 80% of the roofline": _batch(streams) for streams in (64, 256)},
    "first token of 1,000, bf16: <= 35 ms": _first_token("none"),
    "first token of 1,000, 4 bits: <= 35 ms": _first_token("int4"),
    "decode attention, 256 sequences at 1k: >= 80% of the bandwidth of reading": _attention,
    **{
        f"host's share of a decode step, {name}, {streams} streams: <= 5%": _host(scheme, streams)
        for scheme, name in (("none", "bf16"), ("int4", "4 bits"))
        for streams in (1, 64, 256)
    },
    "peak of the KV cache, 64 requests of mixed lengths, beside contiguous caches: <= 70%": _memory,
    **{
        f"{model}, {count} {'image' if count == 1 else 'images at once'} and prompt: >= 80% of both rooflines": _look(
            model, count
        )
        for model in ("LLaVA-1.5-7B", "Qwen2.5-VL-7B")
        for count in (1, 8)
    },
    **{
        f"{looks}, second look: >= 10 x as fast as the first": _second_look(looks)
        for model in ("LLaVA-1.5-7B", "Qwen2.5-VL-7B")
        for looks in (model, *([model + PAGE] if model in PAGES else []), model + FOUR_BITS)
    },
}

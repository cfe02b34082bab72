"""Tables of a report for the terminal, Markdown and the HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from vlmserve.loadtest.figures import Summary
from vlmserve.loadtest.machine import ProcessUsage
from vlmserve.loadtest.report import Report
from vlmserve.loadtest.search import best

STATISTICS = ("mean", "std", "median", "p90", "p95", "p99", "max")
NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2el": "Whole request",
    "ttft_from_schedule": "First token from schedule",
    "e2el_from_schedule": "Whole request from schedule",
}
NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """Rows of text. After the first `words` columns come numbers."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    words: int = 1


def tables(report: Report) -> Iterator[Table]:
    """Tables with rows, most important first."""
    makers = (_outcome, _failures, _trials, _latency, _tokens, _cost)
    for table in (make(report) for make in makers):
        if table.rows:
            yield table


def headline(report: Report) -> list[tuple[str, str]]:
    times = report.latency_ms
    ended = report.num_good + report.num_failed
    shown = [
        ("succeeded", percent(report.num_good / ended) if ended else NOTHING),
        ("requests/s", number(report.throughput.requests)),
        ("output tokens/s", number(report.throughput.output_tokens)),
        ("median TTFT", milliseconds(times["ttft"], "median")),
        ("p99 TTFT", milliseconds(times["ttft"], "p99")),
        ("median TPOT", milliseconds(times["tpot"], "median")),
    ]
    if report.trials:
        highest = best(report.trials)
        shown.insert(0, ("highest rate", f"{number(highest.rate)}/s" if highest else "none passed"))
    if report.goodput is not None:
        shown.append(("within objectives", percent(report.goodput.share)))
    return shown


def number(value: float) -> str:
    """Format with three or four digits and commas."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def percent(share: float) -> str:
    """Format a fraction. Only 1 becomes 100%."""
    return "100%" if share == 1 else f"{min(share, 0.9999):.2%}" if share > 0.999 else f"{share:.1%}"


def milliseconds(summary: Summary | None, statistic: str) -> str:
    return NOTHING if summary is None else f"{number(getattr(summary, statistic))} ms"


def _outcome(report: Report) -> Table:
    table = Table("Outcome", ("", "total", "per second"))
    rates = report.throughput
    total = report.num_good + report.num_failed
    table.rows.append(("Requests that succeeded", f"{report.num_good:,} of {total:,}", number(rates.requests)))
    if report.goodput is not None:
        bounds = report.goodput.objectives_ms.items()
        goals = ", ".join(f"{name.upper()} {number(bound)} ms" for name, bound in bounds)
        table.rows.append((f"Within {goals}", f"{report.goodput.count:,}", number(report.goodput.requests)))
    for name, tokens, rate in (
        ("Input tokens", report.input_tokens, rates.input_tokens),
        ("Output tokens", report.output_tokens, rates.output_tokens),
    ):
        if tokens is not None:
            table.rows.append((name, f"{tokens.mean * tokens.count:,.0f}", number(rate)))
    if report.num_images:
        rate = report.num_images / report.seconds if report.seconds else 0.0
        table.rows.append(("Images", f"{report.num_images:,}", number(rate)))
    if report.cached_tokens is not None:
        table.rows.append(("Input tokens found in a cache", f"{report.cached_tokens:,}", ""))
    if (missed := report.missed_tokens) is not None:
        for reason, count in (
            ("never seen before", missed.never_seen),
            ("evicted from the cache", missed.evicted),
            ("cached without a checkpoint", missed.no_checkpoint),
        ):
            if count:
                table.rows.append((f"Input tokens {reason}", f"{count:,}", ""))
    table.rows.append(("Duration", f"{report.seconds:.2f} s", ""))
    running = report.concurrency
    table.rows.append(("Requests at once", f"{running.mean:.1f} on average, {running.peak} at most", ""))
    return table


def _trials(report: Report) -> Table:
    headings = ("", "requests/s", "kept", "requests", "tokens/s", "p99 TTFT", "p99 TPOT", "remarks")
    table = Table("Rates that were tried", headings)
    highest = best(report.trials)
    for trial in report.trials:
        verdict = ("best" if trial is highest else "passed") if trial.passed else "failed"
        times = (NOTHING if time is None else f"{number(time)} ms" for time in (trial.ttft_p99, trial.tpot_p99))
        figures = (
            number(trial.rate),
            percent(trial.share),
            f"{trial.num_requests:,}",
            number(trial.output_tokens_per_s),
        )
        table.rows.append((verdict, *figures, *times, trial.why))
    return table


def _latency(report: Report) -> Table:
    table = Table("Latency in milliseconds", ("", *STATISTICS))
    for name, summary in report.latency_ms.items():
        if summary is not None:
            table.rows.append((NAMES[name], *_statistics(summary)))
    return table


def _tokens(report: Report) -> Table:
    table = Table("Tokens of each request", ("", *STATISTICS))
    for name, summary in (("Input", report.input_tokens), ("Output", report.output_tokens)):
        if summary is not None:
            table.rows.append((name, *_statistics(summary)))
    return table


def _failures(report: Report) -> Table:
    table = Table("Failures", ("reason", "first message", "requests"), words=2)
    table.rows.extend((failure.reason, failure.message, f"{failure.count:,}") for failure in report.failures)
    return table


def _cost(report: Report) -> Table:
    table = Table("Processes", ("", "cores", "cores at most", "memory"))
    for process in (report.client, *report.server):
        of_server = "server" if process.name == "server" else f"server: {process.name}"
        table.rows.append(("client" if process is report.client else of_server, *_process(process)))
    return table


def _process(process: ProcessUsage) -> tuple[str, str, str]:
    cores = (NOTHING if share is None else f"{share:.2f}" for share in (process.cores, process.peak_cores))
    return (*cores, NOTHING if process.memory is None else f"{process.memory / 2**20:,.0f} MiB")  # type: ignore[return-value]


def _statistics(summary: Summary) -> list[str]:
    return [number(getattr(summary, name)) for name in STATISTICS]

"""Routing in a simulated cluster: the real policy beside an oracle, the least loaded worker, and each in turn.

    .venv/bin/python -m benchmarks.cluster_sim                                    # 1,000 workers; about ten minutes
    .venv/bin/python -m benchmarks.cluster_sim --workers 100 --workloads images   # a quick look
    .venv/bin/python -m benchmarks.cluster_sim --plot build/cluster               # also draw what it shows

Requests come at random, so fast that computing every prompt whole would take `--load` of all workers' time. The first
third warms the caches up and is not counted. The oracle knows what every worker has cached and how busy it is at that
moment, and looks at all of them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import keep
from benchmarks.simulated_cluster import Outcome, Setup, SimulatedRequest, Speed, simulate
from benchmarks.simulated_workloads import WORKLOADS, requests
from vlmserve.garbage import freeze_loaded_objects
from vlmserve.scaleout.keys import request_key
from vlmserve.scaleout.messages import Feedback, Load, WorkerInfo
from vlmserve.scaleout.router import Router
from vlmserve.scaleout.settings import PolicyName


@dataclass(frozen=True)
class Variant:
    """A row of the table. policy: None for the oracle."""

    name: str
    policy: PolicyName | None
    gateways: int = 1
    staleness: float = 0.0
    churn: bool = False
    hears_others: bool = True


VARIANTS = (
    Variant("oracle", None),
    Variant("affinity", "affinity"),
    Variant("affinity, 2 gateways", "affinity", 2),
    Variant("affinity, 4 gateways", "affinity", 4),
    Variant("affinity, 8 gateways", "affinity", 8),
    Variant("affinity, 4 gateways, each hears of its own requests", "affinity", 4, hears_others=False),
    Variant("affinity, 1 s late", "affinity", 1, 1.0),
    Variant("affinity, 10 s late", "affinity", 1, 10.0),
    Variant("affinity, 4 gateways, 1 s late", "affinity", 4, 1.0),
    Variant("affinity, 4 gateways, 10 s late", "affinity", 4, 10.0),
    Variant("affinity, restarts", "affinity", churn=True),
    Variant("affinity, 4 gateways, restarts", "affinity", 4, churn=True),
    Variant("oracle, restarts", None, churn=True),
    Variant("least-loaded", "least-loaded"),
    Variant("least-loaded, 4 gateways", "least-loaded", 4),
    Variant("least-loaded, 8 gateways", "least-loaded", 8),
    Variant("round-robin", "round-robin"),
)


def arrivals(workload: str, options: argparse.Namespace) -> Sequence[SimulatedRequest]:
    """Requests at the rate that the load asks for."""
    speed = Speed()
    sample = requests(workload, rate=1.0, count=3000, workers=options.workers)
    whole = statistics.mean(
        request.key.tokens * speed.token_seconds + len(request.key.images) * speed.image_seconds for request in sample
    )
    rate = options.load * options.workers / whole
    return requests(workload, rate=rate, count=options.workers * options.each, workers=options.workers)


def run(variant: Variant, sent: Sequence[SimulatedRequest], options: argparse.Namespace) -> Outcome:
    """One variant on one workload. With restarts, every worker is restarted once on average."""
    churn = sent[-1].at / options.workers if variant.churn else 0.0
    setup = Setup(
        options.workers, variant.gateways, variant.policy, variant.staleness, churn, options.cache_tokens,
        hears_others=variant.hears_others,
    )  # fmt: skip
    return simulate(setup, sent, sent[len(sent) // 3].at)


def figures(outcome: Outcome) -> dict[str, float]:
    """What is shown and kept of an outcome."""
    return {
        "cached_tokens": outcome.hit_rate,
        "cached_images": outcome.cached_images / max(1, outcome.images),
        "ttft_mean": statistics.mean(outcome.first_token),
        "ttft_p90": statistics.quantiles(outcome.first_token, n=10)[8],
        "latency_mean": statistics.mean(outcome.whole),
        "running_mean": statistics.mean(outcome.loads),
        "load_max_over_mean": outcome.load_ratio,
    }


def decision_times(workers: int, count: int = 5000) -> dict[str, float]:
    """Microseconds of routing a request of about 1,000 tokens, and milliseconds of the key of one with an image of
    1 MB, in a process that has its garbage collector set as a gateway has."""
    freeze_loaded_objects()
    router = Router()
    router.set_workers(WorkerInfo(f"w{number}", f"w{number}", "", ("m",)) for number in range(workers))
    source, taken = random.Random(1), []
    for _ in range(count):
        system = {"role": "system", "content": f"tenant {source.randrange(500)} " * 250}
        user = {"role": "user", "content": f"question {source.randrange(10**9)} " * 50}
        key = request_key({"messages": [system, user]}, model="m")
        began = time.perf_counter()
        route = router.route(key)
        taken.append(1e6 * (time.perf_counter() - began))
        assert route is not None
        route.begin(Feedback(Load(), key.tokens, key.tokens // 2))
        if source.random() < 0.9:
            route.finish()
    url = "data:image/png;base64," + "A" * (4 * 2**20 // 3)
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    hashing = []
    for _ in range(1000):
        began = time.perf_counter()
        request_key(image, model="m")
        hashing.append(1e3 * (time.perf_counter() - began))
    cuts = statistics.quantiles(taken, n=100)
    return {
        "route_us_p50": cuts[49],
        "route_us_p99": cuts[98],
        "image_key_ms_p50": statistics.median(hashing),
        "image_key_ms_p99": statistics.quantiles(hashing, n=100)[98],
    }


def show(workload: str, rows: dict[str, dict[str, float]], console: Console) -> None:
    oracle = rows.get("oracle")
    table = Table(
        workload, "cached tokens", "of the oracle's", "cached images", "TTFT mean", "p90", "latency", "running",
        "load max/mean",
    )  # fmt: skip
    for name, row in rows.items():
        share = f"{row['cached_tokens'] / oracle['cached_tokens']:.1%}" if oracle and oracle["cached_tokens"] else ""
        table.add_row(
            name, f"{row['cached_tokens']:.1%}", share, f"{row['cached_images']:.1%}", f"{row['ttft_mean']:.3f} s",
            f"{row['ttft_p90']:.3f} s", f"{row['latency_mean']:.2f} s", f"{row['running_mean']:.1f}",
            f"{row['load_max_over_mean']:.2f}",
        )  # fmt: skip
    console.print(table)


def plot(report: dict[str, Any], folder: Path) -> None:
    """Draw cached tokens and latencies of each variant and workload."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    for figure, title in (
        ("cached_tokens", "Share of prompt tokens that were cached"),
        ("ttft_mean", "Mean time to first token, s"),
        ("load_max_over_mean", "Load of the busiest worker over the mean"),
    ):
        drawing, axes = plt.subplots(figsize=(9, 5))
        names = list(next(iter(report["workloads"].values())))
        for place, (workload, rows) in enumerate(report["workloads"].items()):
            width = 0.8 / len(report["workloads"])
            heights = [rows[name][figure] for name in names]
            axes.barh([row + place * width for row in range(len(names))], heights, width, label=workload)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_title(title)
        axes.legend()
        drawing.tight_layout()
        drawing.savefig(folder / f"{figure}.svg")
        plt.close(drawing)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster_sim", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--each", type=int, default=60, help="requests for each worker")
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--cache-tokens", type=int, default=32_768, help="of each worker")
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--variants", nargs="*", choices=[variant.name for variant in VARIANTS])
    parser.add_argument("--plot", type=Path, help="folder for drawings, made with matplotlib")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args()
    console = Console(width=160)
    report: dict[str, Any] = {"decision": decision_times(options.workers), "speed": asdict(Speed()), "workloads": {}}
    console.print(report["decision"])
    for workload in options.workloads:
        sent = arrivals(workload, options)
        wanted = [variant for variant in VARIANTS if variant.name in (options.variants or (variant.name,))]
        rows = report["workloads"][workload] = {
            variant.name: figures(run(variant, sent, options)) for variant in wanted
        }
        show(workload, rows, console)
    keep(report, options)
    if options.plot:
        plot(report, options.plot)


if __name__ == "__main__":
    main()

"""A process of `benchmarks.checkouts`, with the packages of any checkout: it imports only what all of them have."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.engine import Engine, EngineConfig, Job, make_jobs, noise_image, run_engine


def serve(options: dict[str, Any]) -> None:
    """Answer each line of standard input, a number of requests and a seed, by a line of JSON."""
    folder = Path(options["folder"])
    # Older checkouts lack some settings.
    settings = {name: value for name, value in options["config"].items() if name in EngineConfig.model_fields}
    engine = Engine(EngineConfig(model=str(folder), **settings), folder)
    image = noise_image(folder) if options["images"] else None
    for line in sys.stdin:
        concurrency, seed = map(int, line.split())
        jobs = make_jobs(
            concurrency, vocab_size=engine.info.vocab_size, seed=seed, prompt_lens=tuple(options["prompt_lens"]),
            answer_lens=tuple(options["answer_lens"]), image=image,
        )  # fmt: skip
        if seed < 0:
            jobs = [Job(job.prompt, 2) for job in jobs]
        done = run_engine(engine, jobs)
        found = {
            "tokens/s": sum(map(len, done.tokens)) / done.seconds,
            "TTFT": 1e3 * statistics.median(done.first_token),
            "TPOT": 1e3 * statistics.median(done.per_token) if done.per_token else None,
            "step overhead": 1e3 * statistics.median(done.overheads) if done.overheads else None,
            "tokens": done.tokens,
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))

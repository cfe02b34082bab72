"""A load test that fails if too few requests meet the latency objectives: a check before a new version is deployed.

    python examples/slo.py --requests 20 --rate 4 --slo ttft=2s,tpot=200ms --share 0.9

`vlmserve loadtest --find-rate` searches for the highest rate that meets them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", default="inf", help="requests a second")
    parser.add_argument("--slo", default="ttft=500ms,tpot=50ms")
    parser.add_argument("--share", type=float, default=0.95, help="of requests that must meet the objectives")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pixie")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [
            sys.executable, "-m", "vlmserve", "loadtest", given.url.removesuffix("/v1"), "--model", given.model,
            "--num-prompts", str(given.requests), "--request-rate", given.rate, "--slo", given.slo,
            "--images", "1", "--image-reuse", "0.5", "--random-output-len", "16", "--output", str(file),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report = json.loads(file.read_text("utf-8"))
    share = report["goodput"]["share"]
    print(f"{share:.0%} of {given.requests} requests met {given.slo}")
    if share < given.share:
        sys.exit(1)


if __name__ == "__main__":
    main()

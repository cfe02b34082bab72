from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from vlmserve.cli.answers import status
from vlmserve.tools.doctor import examine


def run_doctor(*, as_json: bool) -> bool:
    """Print findings; False if something needs fixing."""
    with status("Looking at this machine ..."):
        findings = examine()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    else:
        table = Table.grid(padding=(0, 2))
        for finding in findings:
            table.add_row(f"[bold]{finding.topic}", finding.text)
            if finding.problem:
                table.add_row("", f"[yellow]{finding.problem}")
        Console(highlight=False).print(table)
    return not any(finding.problem for finding in findings)

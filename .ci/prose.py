#!/usr/bin/env python3
"""Check the writing of README.md and docs, and of source lines that a commit adds.

.ci/prose.py             # fails if a rule of a page has more hits than .ci/prose.json allows, or an added line has one
.ci/prose.py --accept    # stores lower counts in .ci/prose.json

Each rule is a pattern that one sentence must not match. Pages of results are generated and not checked.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import ratchet

ROOT = Path(__file__).parent.parent
COUNTS = ROOT / ".ci/prose.json"
LONGEST = 30
"""Words of a sentence."""
RULES = {
    "opens with Of, What, Where or That": r"^(Of|What|Where|Beside|Behind|That|Those|Whose|Whether)\b(?!.*\?$)",
    "preposition before which or whose": r"\b(of|by|to|from|with|behind|for) (which|whose|whom)\b",
    "so many, so much, as it is": r"\b(so (many|much|few)\b|as (it|they) (is|are)\b)",
    "that of, those of": r"\b(those (of|that|in|with|which)|that of)\b",
    "bits after the noun": r"\b(of|in|with|to|by) \d+(, \d+)*( and \d+| or \d+)? bits?\b",
    "private word": r"\b(in turns|on (its|their) way|mend(s|ed|ing)?|is nobody's|for nobody)\b",
    "ratio": r"(\btimes (as fast|the)\b|\b0\.\d+ of (the|its|that)\b)",
}
OF_PAGES = {
    "history": r"\b(no longer|until now|came to\b|as before)\b",
    "machine or date in a page": r"(AMD EPYC|Zen \d|\b20\d\d-\d\d-\d\d\b|\d (tokens/s|GB/s|TFLOP/s|GFLOP/s)\b)",
}
GENERATED = re.compile(r"<!-- results: begin -->.*?<!-- results: end -->", re.DOTALL)
EXEMPT = {("README.md", "machine or date in a page")}
"""The README's status table names machines."""


def sentences(markdown: str) -> list[str]:
    """Sentences of a page, without code blocks, tables, headings and generated parts."""
    text = GENERATED.sub("", re.sub(r"^\s*```.*?^\s*```", "", markdown, flags=re.MULTILINE | re.DOTALL))
    paragraphs: list[str] = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith(("|", "#", "<")) or line.startswith("    "):
            paragraphs.append("")
        elif not paragraphs or re.match(r"\s*([-*]|\d+\.) ", line):
            paragraphs.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line))
        else:
            paragraphs[-1] += " " + line.strip()
    return [one for paragraph in paragraphs for one in split(paragraph) if one]


def split(paragraph: str) -> list[str]:
    plain = re.sub(r"``?[^`]*``?", "CODE", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph))
    return re.split(r"(?<=[.!?:;])\s+(?=[A-Z\"'(`])", plain.strip())


def hits(found: list[str], rules: dict[str, str]) -> Counter[str]:
    counted = Counter(rule for one in found for rule, pattern in rules.items() if re.search(pattern, one))
    counted["long sentence"] = sum(len(one.split()) > LONGEST for one in found)
    return +counted


def of_pages() -> dict[str, int]:
    """Hits by page and rule."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    counted = {}
    for path in pages:
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("docs/results/"):
            continue
        for rule, count in hits(sentences(path.read_text("utf-8")), RULES | OF_PAGES).items():
            if (name, rule) not in EXEMPT:
                counted[f"{name}: {rule}"] = count
    return counted


def added_lines() -> list[tuple[str, str]]:
    """Comment and docstring lines that the last commit and the work tree add to src, with their files."""
    shown = subprocess.run(
        ["git", "diff", "--unified=0", "HEAD^", "--", "src/*.py"], cwd=ROOT, capture_output=True, text=True
    ).stdout  # empty in a clone that has one commit
    found, name = [], ""
    for line in shown.splitlines():
        if line.startswith("+++ "):
            name = line.removeprefix("+++ b/")
        elif line.startswith("+") and re.match(r"\+\s*(#|\"\"\"|[A-Z][a-z]+ [a-z].*[.,:]$)", line):
            found.append((name, line[1:].strip(' #"')))
    return found


def of_added_lines() -> list[str]:
    return [
        f"{name}: {rule}: {line}"
        for name, line in added_lines()
        for rule, pattern in RULES.items()
        if re.search(pattern, line)
    ]


if __name__ == "__main__":
    sys.exit(ratchet.check(COUNTS, of_pages(), problems=of_added_lines()))

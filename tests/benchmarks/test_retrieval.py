"""The benchmark of embeddings and decisions relates each to what it is compared with."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.retrieval import main


def test_embeddings_and_decisions_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    sizes = ["--shape", "tiny", "--texts", "2", "--vlm", "pixie", "--questions", "2", "--image-size", "64"]
    main([*sizes, "--turns", "1", "--json", str(path)])
    report = json.loads(path.read_text())
    embeddings, *decided = (dict(zip(report["columns"], row, strict=True)) for row in report["rows"])
    assert (report["model"], report["weights"]) == ("tiny, pixie (published weights)", "random")
    assert (embeddings["work"], embeddings["requests"]) == ("embeddings", 2)
    assert embeddings["of prefill"] > 0
    ways = ("decisions", "decisions, server")
    assert [one["work"] for one in decided] == [f"{way}{image}" for way in ways for image in ("", ", cached image")]
    for decisions in decided:
        assert (decisions["model"], decisions["requests"]) == ("pixie", 2)
        assert decisions["of chats together"] > 0
        assert decisions["of chats in turn"] > 0

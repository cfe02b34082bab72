"""The benchmark of drafts on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.drafts import COLUMNS, main
from vlmserve.engine import drafting


def test_drafts_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    tiny = ["--layers", "1", "--hidden", "64", "--length", "32", "--turns", "1", "--streams", "2", "--crowds", "2"]
    main([*tiny, "--json", str(path)])
    report = json.loads(path.read_text())
    assert report["columns"] == list(COLUMNS)
    assert [row[:2] for row in report["rows"]] == [
        ["repeat", 1],
        ["JSON", 1],
        ["copy", 1],
        ["random", 2],
        ["repeats", 2],
    ]
    assert all(row[2] > 0 and row[3] > 0 for row in report["rows"])


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2"])
def test_states_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    # A busy machine may find that drafts cost more than they save.
    monkeypatch.setattr(drafting, "known_costs", lambda *_: [(1, 1.0), (32, 1.3)])
    path = tmp_path / "report.json"
    tiny = ["--family", family, "--layers", "4", "--hidden", "256", "--length", "32", "--turns", "1"]
    main([*tiny, "--kinds", "repeat", "--streams", "--crowds", "--json", str(path)])
    [row] = json.loads(path.read_text())["rows"]
    assert row[4] > 0, "drafts were accepted"


def test_assistants_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    tiny = ["--family", "gemma4", "--layers", "10", "--hidden", "256", "--length", "32", "--turns", "1", "--mtp", "1"]
    main([*tiny, "--kinds", "--streams", "--crowds", "--json", str(path)])
    [row] = json.loads(path.read_text())["rows"]
    assert row[0] == "MTP"
    assert row[4] is None or row[4] > 0.9


def test_kept_checkpoints_are_used_again(tmp_path: Path) -> None:
    path, kept = tmp_path / "report.json", tmp_path / "model"
    tiny = ["--family", "qwen3.5", "--layers", "4", "--hidden", "256", "--length", "8", "--turns", "1", "--mtp", "0"]
    for _ in range(2):
        main([*tiny, "--kinds", "--streams", "--crowds", "--checkpoint", str(kept), "--json", str(path)])
    assert [row[0] for row in json.loads(path.read_text())["rows"]] == ["MTP"]
    assert sorted(kept.glob("*.safetensors"))


def test_other_models_are_not_measured_instead(tmp_path: Path) -> None:
    tiny = ["--layers", "2", "--hidden", "64", "--length", "4", "--turns", "1", "--kinds", "--streams", "--crowds"]
    kept, other = ["--checkpoint", str(tmp_path / "kept")], tmp_path / "other"
    main([*tiny, *kept])
    with pytest.raises(SystemExit, match="has another model"):
        main([*tiny, *kept, "--hidden", "128"])
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"somebody's weights")
    with pytest.raises(SystemExit, match="is not empty"):
        main([*tiny, "--checkpoint", str(other)])

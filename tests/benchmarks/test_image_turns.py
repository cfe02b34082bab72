"""The benchmark of conversations about images: what it asks, and how it sums up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.image_turns import Asked, converse, rows, with_files
from benchmarks.state_reuse import messages
from benchmarks.vllm_process import opened


def test_systems_get_the_same_turns_and_a_repeat() -> None:
    told: list[list[int]] = [[], []]

    def ask(system: int, conversation: list[dict[str, Any]]) -> Asked:
        told[system].append(len(conversation))
        return Asked(
            0.001 * (1 + system) * len(told[system]), 10 * len(told[system]), 5 if len(told[system]) > 1 else 0
        )

    asks = [lambda one, system=system: ask(system, one) for system in (0, 1)]
    taken = converse(asks, [[{}] * count for count in (2, 4, 6)])
    assert told == [[2, 4, 6, 6]] * 2
    assert rows([taken]) == [
        ["turn 1", 10, 1.0, 2.0, 2.0, "0.0%", "0.0%"],
        ["turns 2 to 3", 25, 2.5, 5.0, 2.0, "20.0%", "20.0%"],
        ["identical prompt", 40, 4.0, 8.0, 2.0, "12.5%", "12.5%"],
    ]


def test_images_reach_the_other_process_unchanged(tmp_path: Path) -> None:
    conversation = messages(0, 1, 32)
    sent = json.loads(json.dumps(with_files(conversation, tmp_path)))
    received = opened(sent)
    for one, other in zip(conversation, received, strict=True):
        assert one["role"] == other["role"]
        if isinstance(one["content"], str):
            assert one["content"] == other["content"]
            continue
        for part, theirs in zip(one["content"], other["content"], strict=True):
            if part["type"] == "image":
                assert part["image"].tobytes() == theirs["image_pil"].tobytes()
            else:
                assert part == theirs

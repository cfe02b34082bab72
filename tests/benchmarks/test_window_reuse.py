"""Long prompts of others leave the prefixes of conversations in the cache."""

from __future__ import annotations

from benchmarks.window_reuse import measure


def test_long_prompts_leave_conversations_cached() -> None:
    (_, total, alone, _), (_, same, beside, whole) = measure([0, 16_000], turns=2)["rows"]
    assert total == same
    assert alone == beside > 99
    assert whole < 50, "a pool that would hide what windows save proves nothing"

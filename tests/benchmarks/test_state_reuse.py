"""The benchmark of prefix hits of hybrid models, on the smallest one: tokens are counted, no times."""

from __future__ import annotations

import pytest

from benchmarks.state_reuse import SIZES, Bench, write_model


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = write_model(tmp_path_factory.mktemp("state reuse") / "model", "Qwen3_5", SIZES["tiny"])
    return Bench([folder], 64, turns=3)


@pytest.mark.parametrize("others", [0, 2])
def test_turns_hit_all_before_generation_prompt(bench: Bench, others: int) -> None:
    _, shared, share, _ = bench.turns(others)
    lacking = shared * (1 - share / 100) / 2
    assert lacking < 4.1, "tokens of a turn: two line breaks, <|im_start|> and the role"


def test_repeats_compute_one_token(bench: Bench) -> None:
    found = {name: (total, share) for name, total, share, _ in bench.repeats()}
    for name, count in (("identical prompt", 1), ("n = 4", 3)):
        total, share = found[name]
        assert total * (1 - share / 100) == pytest.approx(count, abs=0.1)


def test_second_request_hits_shared_text(bench: Bench) -> None:
    [(_, _, share, _)] = bench.texts([500])
    assert share >= 75

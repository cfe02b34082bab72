"""The policy in a small simulated cluster; `python -m benchmarks.cluster_sim` has a large one."""

from __future__ import annotations

import functools
import statistics

import pytest

from benchmarks.simulated_cluster import Outcome, Setup, Speed, simulate
from benchmarks.simulated_workloads import requests

WORKERS = 20


@pytest.fixture(scope="module")
def outcome_of():
    made = {}

    @functools.cache
    def run(workload: str, **setup: object) -> Outcome:
        if workload not in made:
            rate = 0.7 * WORKERS / {"mixed": 0.96, "images": 1.33, "fresh": 0.74}[workload]
            made[workload] = requests(workload, rate=rate, count=60 * WORKERS, workers=WORKERS)
        sent = made[workload]
        return simulate(Setup(WORKERS, speed=Speed(), **setup), sent, sent[len(sent) // 3].at)  # type: ignore[arg-type]

    return run


def test_it_finds_nearly_all_that_an_oracle_finds(outcome_of):
    oracle = outcome_of("mixed", policy=None).hit_rate
    assert outcome_of("mixed", gateways=1).hit_rate >= 0.95 * oracle
    assert outcome_of("mixed", gateways=4).hit_rate >= 0.9 * oracle
    assert outcome_of("mixed", policy="least-loaded").hit_rate < 0.5 * oracle


@pytest.mark.parametrize("gateways", [1, 8])
def test_the_load_stays_even(outcome_of, gateways):
    assert outcome_of("mixed", gateways=gateways).load_ratio <= 1.3
    assert outcome_of("images", gateways=gateways).load_ratio <= 1.3


def test_eight_gateways_find_what_an_oracle_finds(outcome_of):
    oracle = outcome_of("images", policy=None).hit_rate
    assert outcome_of("images", gateways=8).hit_rate >= 0.9 * oracle


@pytest.mark.parametrize("gateways", [1, 8])
def test_without_reuse_it_matches_least_loaded_routing(outcome_of, gateways):
    plain = outcome_of("fresh", policy="least-loaded", gateways=gateways)
    affinity = outcome_of("fresh", gateways=gateways)
    assert statistics.mean(affinity.whole) <= 1.02 * statistics.mean(plain.whole)


def test_restarts_lose_only_what_was_under_way(outcome_of):
    outcome = outcome_of("mixed", churn=2.0)
    assert outcome.retried > 0
    assert outcome.hit_rate > 0.3

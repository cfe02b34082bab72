"""Steps of a GPU are planned ahead, except where drafts probably save time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.checkpoints import make_llama
from tests.engine.test_structured import PERSON, engine_of, run, tokens
from tests.static_device import StaticDevice, replace_cpus
from vlmserve.engine import drafting
from vlmserve.engine.engine import Engine
from vlmserve.types import EngineRequest, Grammar, Prompt, SamplingParams

LENGTH = 60
"""Tokens of an answer."""


def costs(key: str, _: object) -> list[tuple[int, float]]:
    return [(1, 1.0), (16, 1.0)] if " ahead " in key else [(1, 1.2), (2, 1.6), (33, 2.0)]


class Pair(NamedTuple):
    plain: Engine
    drafting: Engine
    device: StaticDevice

    def run(self, *requests: EngineRequest) -> tuple[int, int]:
        """Both give the same answers. Returns steps, and steps that were submitted ahead."""
        expected = run(self.plain, [*requests])
        steps, ahead = self.drafting.stats().steps, self.device.num_ahead
        found = run(self.drafting, [*requests])
        assert {name: tokens(one) for name, one in found.items()} == {
            name: tokens(one) for name, one in expected.items()
        }
        assert self.drafting.stats().kv_blocks_used == 0
        return self.drafting.stats().steps - steps, self.device.num_ahead - ahead


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = make_llama(tmp_path_factory.mktemp("llama"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "known_costs", costs)
        devices = replace_cpus(patch)
        plain, drafter = (engine_of(folder, speculation=mode) for mode in ("off", "auto"))
        yield Pair(plain, drafter, devices[-1])


def request(name: str, number: int, **params: Any) -> EngineRequest:
    """number: of the prompt."""
    prompt = random.Random(number).choices(range(5, 250), k=20)
    params = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, "seed": 3, **params}
    return EngineRequest(name, Prompt(prompt), SamplingParams(**params))


def test_new_text_is_planned_ahead(engines: Pair) -> None:
    drafted = engines.drafting.stats().drafted_tokens
    assert engines.run(request("a", 1, temperature=3.0)) == (LENGTH, LENGTH - 1)
    assert engines.drafting.stats().drafted_tokens == drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_repeats_take_few_steps(engines: Pair, temperature: float) -> None:
    one = request("a", 2, temperature=temperature)
    engines.run(one)
    steps, ahead = engines.run(one)
    assert steps < LENGTH / 8
    assert ahead == 1, "the first decode, before which nothing is known"


def test_wrong_drafts_return_to_planning_ahead(engines: Pair) -> None:
    one = request("a", 3, temperature=1.0)
    answer = tokens(run(engines.plain, [one])["a"])
    prediction = [*answer[:20], *(token + 1 for token in answer[20:])]
    before = engines.drafting.stats()
    _, ahead = engines.run(EngineRequest("a", Prompt(one.prompt.token_ids, prediction=prediction), one.params))
    after = engines.drafting.stats()
    assert after.drafted_tokens - before.drafted_tokens > after.accepted_drafts - before.accepted_drafts
    assert ahead > LENGTH / 2


def test_repeats_of_grammars_take_few_steps(engines: Pair) -> None:
    one = request("a", 4, grammar=Grammar.json(PERSON), ignore_eos=False)
    first, _ = engines.run(one)
    again, ahead = engines.run(one)
    assert (again < first / 2, ahead) == (True, 0)


def test_requests_beside_others_are_the_same(engines: Pair) -> None:
    requests = [request(name, number, temperature=0.7) for name, number in zip("abcd", (5, 6, 5, 7), strict=True)]
    requests.append(request("e", 6, logprobs=2))
    for _ in range(3):
        engines.run(*requests)

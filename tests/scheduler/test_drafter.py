"""What is drafted, from which tokens, and how many of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.made_up import request
from vlmserve.scheduler.drafts.corpus import SEPARATOR, Answers, Corpus
from vlmserve.scheduler.drafts.costs import MAX_DRAFTS, Account, StepCosts
from vlmserve.scheduler.drafts.curve import Curve
from vlmserve.scheduler.drafts.drafter import Drafter
from vlmserve.scheduler.drafts.layer import Layer, LayerCosts, LayerUse
from vlmserve.scheduler.drafts.reader import BACK, Reader, Source
from vlmserve.scheduler.request import Request
from vlmserve.steps import ModelRunnerOutput, SchedulerOutput
from vlmserve.types import Grammar

FLAT = [(1, 1.0), (32, 1.3)]
"""Rows that cost little: weights in 16 bits."""
STEEP = [(1, 1.0), (2, 1.5), (32, 8.0)]


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), min_size=3, max_size=8))
def test_corpus_finds_the_latest_equal_tokens(own: list[int], tail: list[int]) -> None:
    match = Corpus(own).find(tail)
    places = [place for place in range(3, len(own)) if own[place - 3 : place] == tail[-3:]]
    assert (None if match is None else match.place) == (places[-1] if places else None)
    if match is not None:
        assert own[match.place - match.length : match.place] == tail[-match.length :]


def test_corpus_indexes_tokens_that_come_later() -> None:
    own = [1, 2, 3, 4]
    corpus = Corpus(own)
    assert corpus.find([9, 9, 1]) is None
    own += [9, 9, 1, 5]
    match = corpus.find([9, 9, 1])
    assert match is not None
    assert corpus.tokens_from(match.place, 4) == [5]


def test_own_text_goes_round() -> None:
    text = [7, 1, 2, 3, 1, 2, 3]
    reader = Reader("own", Corpus(text), 1)
    reader.read(text)
    assert reader.tokens(5) == [1, 2, 3, 1, 2]


FORM = [token for value in (40, 41, 42, 43) for token in (9, 10, 11, value, 12, 13)]
"""A form with four values."""


def test_values_of_forms_are_rated_low() -> None:
    rates = Corpus([*FORM, SEPARATOR]).rates_from(len(FORM) - 6, FORM[-6:], 0.5)
    name, value, following = rates[1:3], rates[3], rates[4:]
    assert min(name) > 0.8
    assert value < 0.2
    assert following == [0.5, 0.5], "each of these contexts has a value, so it occurs once"
    assert Corpus([1, 2]).rates_from(0, [1, 2], 0.7) == [0.7, 0.7]


@pytest.mark.parametrize(("source", "is_low"), [("own", True), ("schema", True), ("repeat", False), ("image", False)])
def test_repeated_answers_keep_their_values(source: Source, is_low: bool) -> None:
    reader = Reader(source, Corpus([*FORM, SEPARATOR]), 0, 0, 16)
    rates = reader.rates(reader.tokens(6), 0.9)
    assert (rates[3] < 0.9) == is_low


def test_reader_goes_on_after_another_value() -> None:
    earlier = [9, 10, 11, 40, 12, 13, 41, 14, SEPARATOR, 99]
    reader = Reader("schema", Corpus(earlier), 2, 0)
    answer = [5, 5, 9, 10, 11]
    reader.read(answer)
    assert reader.tokens(9) == [40, 12, 13, 41, 14]
    reader.read([*answer, 50])
    assert reader.tokens(2) == [12, 13], "one value stands for another"
    reader.read([*answer, 50, 51, 12])
    assert reader.tokens(9) == [13, 41, 14], "a longer value ends where both go on alike"


def test_reader_looks_back_a_bounded_way() -> None:
    reader = Reader("image", Corpus([9, 1, *[2] * (3 * BACK)]), 0, 1)
    answer = [3] * (2 * BACK)
    reader.read(answer)
    reader.read([*answer, 1])
    assert reader.match_class == 0, "the 1 lies too far back"


def test_longer_matches_are_other_classes() -> None:
    classes = []
    for length in (0, 1, 2, 3, 5, 6, 11, 12, 16):
        classes.append(Reader("own", Corpus([]), 0, 0, length).match_class)
    assert classes == [0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_answers_forget_the_least_recently_used() -> None:
    answers = Answers(max_tokens=20, max_tokens_of_key=12)
    for key in (b"a", b"b"):
        answers.append(key, [1, 2, 3, 4])
        answers.append(key, [1, 2, 3, 4])
    assert answers.num_tokens == 10, "equal answers are kept once"
    answers.append(b"a", [5, 6, 7, 8])
    answers.append(b"b", [9] * 30)
    assert answers.get(b"a") is None
    kept = answers.get(b"b")
    assert kept is not None
    assert kept.token_ids == [9] * 11 + [SEPARATOR]
    assert answers.num_tokens == 12


def test_costs_lie_on_lines_and_never_fall() -> None:
    costs = StepCosts([(1, 1.0), (2, 3.0), (4, 2.0), (8, 8.0)])
    assert [costs.seconds(rows) for rows in (1, 2, 3, 4, 6, 8, 10)] == [1.0, 2.0, 2.0, 2.0, 5.0, 8.0, 11.0]


@pytest.mark.parametrize(
    ("measured", "rate", "least", "most"), [(FLAT, 0.95, 20, 32), (FLAT, 0.5, 2, 8), (STEEP, 0.3, 0, 0)]
)
def test_count_follows_costs_and_rate(measured: list[tuple[int, float]], rate: float, least: int, most: int) -> None:
    account = Account(StepCosts(measured))
    account.begin_step(1, 0)
    assert least <= account.best([rate] * MAX_DRAFTS)[0] <= most


@pytest.mark.parametrize("measured", [FLAT, STEEP])
@pytest.mark.parametrize("num_decodes", [1, 16])
def test_wrong_drafts_cost_two_percent(measured: list[tuple[int, float]], num_decodes: int) -> None:
    costs = StepCosts(measured)
    account = Account(costs)
    plain = spent = 0.0
    for _ in range(200):
        account.begin_step(num_decodes, 0)
        rows = num_decodes
        for _ in range(num_decodes):
            count = account.best([0.99] * MAX_DRAFTS)[0]
            account.pay(count)
            rows += count
        plain += costs.seconds(num_decodes)
        spent += costs.seconds(rows)
    assert spent < 1.02 * plain + 2.5 * costs.seconds(1)
    assert (spent > plain) == (num_decodes == 1 or measured is FLAT)


@pytest.mark.parametrize(("num_decodes", "share"), [(1, 0.02), (16, 0.005)])
def test_searches_are_limited_and_leave_room_for_drafts(num_decodes: int, share: float) -> None:
    costs = StepCosts(FLAT)
    account, searches = Account(costs), 0
    for _ in range(1000):
        account.begin_step(num_decodes, 0)
        for _ in range(num_decodes):
            if account.affords_search:
                account.spend(0.01)
                searches += 1
    steps = 1000 * costs.seconds(num_decodes)
    assert 0.01 * searches < share * steps + 2.5 * costs.seconds(1)
    account.begin_step(num_decodes, 0)
    assert account.best([0.99] * MAX_DRAFTS)[0] > 0


def test_layers_leave_less_for_searches() -> None:
    step = Curve(FLAT).seconds(1)
    layer = Layer(LayerCosts(0.3, Curve([(1, 0.01)])), step)
    account, spent, use = Account(StepCosts(FLAT), layer), {"searches": 0.0, "layer": 0.0}, LayerUse()
    for _ in range(2000):
        account.begin_step(1, 0)
        if account.affords_search:
            account.spend(0.05)
            spent["searches"] += 0.05
        use.runs = layer.affords(use, 1, 0.01)
        if use.runs:
            layer.spend(0.01)
            spent["layer"] += 0.01
    assert 0.015 * 2000 < spent["searches"] < 0.015 * 2000 + 2.5 * step
    assert 0.005 * 2000 < spent["layer"] < 0.005 * 2000 + 2.5 * step


@pytest.mark.parametrize(("num_decodes", "drafted"), [(1, True), (2, False), (16, False)])
def test_drafts_of_several_save_twice_their_cost(num_decodes: int, drafted: bool) -> None:
    # A row costs 1 second, a decode of this step 1 / 0.7.
    fixed = num_decodes / 0.7 - num_decodes
    account = Account(StepCosts([(1, fixed + 1), (40, fixed + 40)]))
    account.begin_step(num_decodes, 0)
    assert bool(account.best([1.0])[0]) == drafted


ALONE = [(1, 1.2), (2, 1.6), (33, 2.0)]
"""Steps of a GPU that the engine waits for."""
AHEAD = [(1, 1.0), (16, 1.1)]


@pytest.mark.parametrize(("is_ahead", "drafted"), [(True, False), (False, True)])
def test_drafts_pay_for_the_lost_overlap(is_ahead: bool, drafted: bool) -> None:
    account = Account(StepCosts(ALONE, AHEAD))
    account.begin_step(1, 0, is_ahead=is_ahead)
    assert bool(account.best([0.5])[0]) == drafted


def test_drafts_beyond_measured_rows_are_none() -> None:
    account = Account(StepCosts(ALONE, AHEAD))
    account.begin_step(20, 0, is_ahead=True)
    assert account.best([1.0] * MAX_DRAFTS)[0] <= 13
    account.begin_step(33, 0, is_ahead=True)
    assert account.best([1.0] * MAX_DRAFTS)[0] == 0


@pytest.mark.parametrize(("rate", "host", "waits"), [(0.95, 0.0, True), (0.5, 0.0, False), (0.95, 9.0, False)])
def test_a_wait_has_to_save_time(rate: float, host: float, waits: bool) -> None:
    account = Account(StepCosts(ALONE, AHEAD))
    account.begin_step(1, 0, is_ahead=True, host=host)
    assert account.pay_wait([rate] * 20, 2) == waits
    assert not account.pay_wait([rate] * 2, 2), "nothing follows the tokens in flight"


@pytest.mark.parametrize("num_decodes", [1, 16])
def test_waits_in_vain_cost_two_percent(num_decodes: int) -> None:
    costs = StepCosts(ALONE, AHEAD)
    account = Account(costs)
    plain = lost = 0.0
    for _ in range(3000):
        account.begin_step(num_decodes, 0, is_ahead=True, host=0.1)
        plain += costs.seconds_without(num_decodes, 0, is_ahead=True)
        if not account.pay_wait([0.99] * MAX_DRAFTS, 2):
            continue
        lost += costs.exposed + 0.1
        plain += costs.seconds_without(num_decodes, 0, is_ahead=True)
        account.begin_step(num_decodes, 0, is_ahead=True, host=0.1)
        if count := account.best([0.99] * MAX_DRAFTS)[0]:
            account.pay(count)
            lost += costs.seconds(num_decodes + count) + 0.1
            lost -= costs.seconds_without(num_decodes, 0, is_ahead=True)
    assert lost < 0.02 * plain + 3
    assert (lost > 0) == (num_decodes == 1), "a crowd's wait costs more than one request's drafts save"


def decoding(name: str, *token_ids: int, prompt: int = 50, **params: Any) -> Request:
    one = request(name, 4, token=prompt, max_tokens=200, **params)
    one.token_ids += token_ids
    one.num_computed = len(one.token_ids) - 1
    return one


def told(drafter: Drafter, one: Request, drafts: Sequence[int], sampled: list[int], forced: list[int]) -> None:
    """Let a step of one request sample tokens, after which a grammar forces others."""
    output = ModelRunnerOutput(token_ids={one.request_id: sampled}, forced={one.request_id: forced})
    step = SchedulerOutput(draft_token_ids={one.request_id: [*drafts]} if drafts else {})
    drafter.ran(step, output, {one.request_id: one})
    one.token_ids += sampled
    one.num_computed += len(sampled)


def proposed(drafter: Drafter, one: Request) -> list[int]:
    drafter.begin_step([one])
    return [*drafter.propose(one)]


def test_forced_tokens_precede_earlier_answers() -> None:
    drafter = Drafter(StepCosts(FLAT))
    grammar = Grammar.json({"type": "string"})
    drafter.learn([decoding("a", 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, grammar=grammar)])
    one = decoding("b", 5, grammar=grammar)
    assert 13 in proposed(drafter, one)
    told(drafter, one, [], [6], forced=[11, 12, 13])
    assert proposed(drafter, one)[:5] == [11, 12, 13, 14, 15]
    told(drafter, one, [11, 12, 13, 14], [11, 12, 13, 20], forced=[])
    assert drafter.num_accepted == 3
    assert 11 not in proposed(drafter, one)


def test_wrong_forced_tokens_are_given_up() -> None:
    drafter = Drafter(StepCosts(STEEP))
    one = decoding("a", 5)
    counts = []
    for number in range(20):
        drafts = proposed(drafter, one)
        counts.append(len(drafts))
        told(drafter, one, drafts, [60 + number], forced=[1, 2, 3])
    assert max(counts) > 0
    assert counts[-5:] == [0] * 5


def test_engine_waits_for_tokens_of_repeats() -> None:
    drafter = Drafter(StepCosts(ALONE, AHEAD))
    answer = [*range(10, 40)]
    drafter.learn([decoding("a", *answer)])
    one = decoding("b", *answer[:5])
    assert drafter.awaits_tokens([one], 0.0)
    drafter.begin_step([one], is_ahead=True)
    assert [*drafter.propose(one)] == answer[5:]
    assert not Drafter(StepCosts(ALONE, AHEAD)).awaits_tokens([decoding("c", 90, 91, 92, 93)], 0.0)


def test_drafts_end_before_values() -> None:
    drafter = Drafter(StepCosts([(1, 1.0), (32, 5.0)]))
    grammar = Grammar.json({"type": "array"})
    drafter.learn([decoding("a", *FORM, grammar=grammar)])
    assert proposed(drafter, decoding("b", 9, prompt=60, grammar=grammar)) == [10, 11]

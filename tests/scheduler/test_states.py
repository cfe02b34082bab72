"""States of requests: where they are found, what checkpoints requests leave, and that each token is applied once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.made_up import (
    BLOCK,
    END,
    FixedLimits,
    add_search,
    extend,
    finish,
    image,
    plan,
    request,
    request_states,
    run,
    sampled,
    scheduler,
)
from vlmserve.layer_specs import NO_SLOT
from vlmserve.runner.requests import ScheduledRequest
from vlmserve.scheduler.ahead import forget_ended
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.states import StateMemory
from vlmserve.steps import ModelRunnerOutput, RequestFailure, SchedulerOutput, StateStep
from vlmserve.types import TokenLogprobs


def stateful(states: int = 20, **options: Any):
    return scheduler(states=states, **{"num_blocks": 400, "prefix_caching": True, "budget": 1000, **options})


def conversation(name: str, *turns: int, question: int = 5, images: int = 0, **params: Any) -> Request:
    """Turns of these lengths, each with an end token, then a question and a generation prompt of three tokens.

    images: of 40 tokens each, at the beginning of the first turn.
    """
    token_ids: list[int] = []
    for number, length in enumerate((*turns, question)):
        token_ids += [*[20 + number] * length, END]
    token_ids += [11, 12, 13]
    spans = [(image(1 + number, 40), 2 + 50 * number) for number in range(images)]
    one = request(name, len(token_ids), images=spans, **params)
    one.token_ids[:] = token_ids
    return one


def cached(s, one: Request) -> int:
    """How many tokens a request finds."""
    s.add(one)
    finish(s)
    assert one.num_cached is not None
    return one.num_cached


def test_repeated_prompt_computes_one_token():
    s = stateful()
    assert cached(s, conversation("a", 150)) == 0
    repeat = conversation("b", 150)
    assert cached(s, repeat) == repeat.num_prompt_tokens - 1


def test_next_turn_begins_before_generation_prompt():
    s = stateful()
    cached(s, conversation("a", 150, question=30))
    following = conversation("b", 150, 30)
    following.token_ids[182] = 99
    assert cached(s, following) == 150 + 1 + 30 + 1


@pytest.mark.parametrize("windows", [(16,), (None, 16)])
def test_checkpoints_keep_windows_before_them(windows):
    s = stateful(windows=windows)
    cached(s, conversation("a", 150, question=30))
    repeat = conversation("b", 150, question=30)
    assert cached(s, repeat) == repeat.num_prompt_tokens - 1


def test_next_turn_begins_after_kept_answer():
    s = stateful()
    first = conversation("a", 30, max_tokens=5)
    cached(s, first)
    second = request("b", len(first.token_ids) + 9)
    second.token_ids[: len(first.token_ids)] = first.token_ids
    assert cached(s, second) == len(first.token_ids) - 1, "the last token was not computed"


def test_other_question_begins_after_images():
    s = stateful()
    cached(s, conversation("a", 120, images=2))
    other = conversation("b", 120, images=2)
    other.token_ids[92:] = [50] * (len(other.token_ids) - 92)
    assert cached(s, other) == 92


@pytest.mark.parametrize("change", [{"salt": "tenant"}, {"images": [(image(9, 40), 2)]}, {"images": []}])
def test_foreign_states_are_not_found(change):
    s = stateful()
    cached(s, request("a", 100, images=[(image(1, 40), 2)]))
    assert cached(s, request("b", 100, **{"images": [(image(1, 40), 2)], **change})) == 0


def test_equal_requests_wait_for_a_checkpoint():
    s = stateful()
    for name in "abcd":
        s.add(conversation(name, 100))
    length = s.waiting[0].num_prompt_tokens
    assert plan(run(s)[0]) == [("a", length)]
    assert plan(run(s)[0]) == [(name, 1) for name in "abcd"]


def parting(name: str, length: int, place: int) -> Request:
    """A prompt of one text that goes on with tokens of its own after `place` tokens."""
    one = request(name, length)
    one.token_ids[place:] = [100 + ord(name[0])] * (length - place)
    return one


@pytest.mark.parametrize(("length", "share"), [(500, 0.8), (2000, 0.9), (8000, 0.9)])
def test_second_request_hits_close_to_parting(length, share):
    """Wherever in a text it parts from the first one."""
    places = range(length // 10, length, length // 5)
    found = 0
    for place in places:
        s = stateful(64, num_blocks=5000, budget=2048)
        cached(s, request("a", length))
        found += cached(s, parting("b", length, place))
    assert found / sum(places) >= share


@pytest.mark.parametrize("windows", [(16,), (None, 16)])
def test_intervals_keep_windows_before_them(windows):
    s = stateful(windows=windows)
    cached(s, request("a", 300))
    assert cached(s, parting("b", 300, 200)) == 192


def test_third_request_hits_at_parting():
    s = stateful(8, num_blocks=2000, budget=2048)
    hits = [cached(s, parting(name, 4000, 2500)) for name in "abc"]
    assert hits == [0, 2048, 2496], "slots for three intervals, then where prompts part"


@pytest.mark.parametrize("windows", [(None,), (None, 16)])
def test_waiting_request_hits_at_parting(windows):
    """Though the first one needs all free blocks, those that windows have passed first."""
    s = stateful(8, num_blocks=1100, budget=256, windows=windows)
    both = [parting(name, 4000, 3300) for name in "ab"]
    s.add(both[0])
    run(s)
    s.add(both[1])
    finish(s)
    assert [one.num_cached for one in both] == [0, 3264], "the first one left a checkpoint for the second one"


def test_texts_spare_checkpoints_of_conversations():
    s = stateful(16, num_blocks=1000)
    following = [conversation(name, 150, 30, salt=name) for name in "ab"]
    for one in following:
        cached(s, conversation(f"first {one.request_id}", 150, question=30, salt=one.request_id))
    for name in "xyz":
        cached(s, request(name, 500, token=ord(name), max_tokens=1))
    assert [cached(s, one) for one in following] == [182, 182]


def test_chunks_end_at_multiples_or_boundaries():
    s = stateful(budget=100)
    s.add(conversation("a", 150, 100))
    steps = []
    while len(s):
        steps += [one for one in run(s)[0].requests if one.num_tokens > 1]
    ends = [one.start + one.num_tokens for one in steps]
    assert ends == [64, 151, 192, 261]
    left = [n for one in steps for use in one.states or () for n, _ in use.checkpoints]
    assert left == [64, 128, 151, 192, 256, 258, 260], "multiples, ends of turns, the prompt without its last token"


def test_chunks_shorter_than_64_end_at_64():
    s = stateful(budget=32)
    s.limits = FixedLimits(tokens=32)
    s.add(request("a", 200))
    assert [plan(run(s)[0])[0][1] for _ in range(4)] == [64, 64, 64, 8]


@pytest.mark.parametrize("windows", [(16,), (None, 16)])
def test_windows_make_room_for_chunks_up_to_64(windows):
    s = stateful(budget=7, windows=windows)
    one = request("a", 500)
    s.add(one)
    for _ in range(20):
        run(s)
    assert one.num_generated == 3


def test_checkpoints_push_no_request_out():
    s = stateful(3)
    for name, token in zip("abc", (1, 2, 3), strict=True):
        s.add(request(name, 100, token=token, max_tokens=5))
    finish(s)
    assert s.num_preemptions == 0


def test_one_slot_serves_hits():
    s = stateful(1)
    assert cached(s, conversation("a", 100, question=9)) == 0
    first = conversation("b", 100, question=9)
    assert cached(s, first) == 0, "there was no slot for a checkpoint, and the answer went on"
    second = request("c", len(first.token_ids) + 9)
    second.token_ids[: len(first.token_ids)] = first.token_ids
    assert cached(s, second) == len(first.token_ids) - 1
    assert s.memory.states.num_used == 0


def test_requests_wait_for_a_slot():
    s = stateful(1)
    for name, token in (("a", 1), ("b", 2)):
        s.add(request(name, 10, token=token, max_tokens=2))
    assert plan(run(s)[0]) == [("a", 10)]
    assert plan(run(s)[0]) == [("a", 1)]
    assert plan(run(s)[0]) == [("b", 10)]


def test_lower_priority_gives_up_its_slot():
    s = stateful(2, prefix_caching=False)
    for name, token in (("row 1", 1), ("row 2", 2)):
        s.add(request(name, 10, token=token, priority=1, max_tokens=9))
    run(s)
    s.add(request("live", 10, token=3))
    assert plan(run(s)[0]) == [("row 1", 1), ("live", 10)]


def test_preempted_requests_resume_from_their_state():
    s = stateful(seqs=1)
    s.add(request("row", 150, priority=1, max_tokens=9))
    for _ in range(3):
        run(s)
    s.add(request("live", 10, token=2))
    computed = 150 + 2 + 10
    while len(s):
        computed += sum(one.num_tokens for one in run(s)[0].requests if one.num_tokens == 1)
    assert s.num_preemptions == 1
    assert computed == 150 + 8 + 10 + 2


def test_failed_requests_leave_no_checkpoints():
    s = stateful()
    s.add(request("a", 100))
    step = s.schedule()
    output = sampled(s, step, 7)
    output.token_ids["a"], output.failures = [], {"a": RequestFailure("not_finite")}
    s.update(step, output)
    assert (s.memory.states.num_cached, s.memory.states.num_used) == (0, 0)


def test_undone_requests_return_to_their_checkpoint():
    s = stateful()
    one = conversation("a", 100, max_tokens=9)
    s.add(one)
    for _ in range(3):
        run(s)
    step = s.schedule()
    assert s.update(step, ModelRunnerOutput(undone=["a"])) == []
    assert list(s.waiting) == [one]
    step, _ = run(s)
    length = one.num_prompt_tokens
    assert [(again.start, again.num_tokens) for again in step.requests] == [(length - 1, 4)]


def test_undone_steps_undo_the_planned_step():
    s = stateful()
    one = request("a", 10, max_tokens=9)
    s.add(one)
    run(s)
    step = s.schedule()
    following = s.schedule_ahead(step)
    assert following is not None
    s.update(step, ModelRunnerOutput(undone=["a"]))
    output = ModelRunnerOutput(token_ids={"a": [7]})
    forget_ended(s.requests, following, output)
    assert s.update(following, output) == []
    assert len(one.token_ids) == 11
    finish(s)


def ended_ahead(s, one: Request, *, failed: bool = False) -> None:
    """Run a request whose second token ends it while the step after that is in flight."""
    s.add(one)
    run(s)
    step = s.schedule()
    following = s.schedule_ahead(step)
    assert following is not None
    s.update(step, sampled(s, step, END))
    name = one.request_id
    output = ModelRunnerOutput(token_ids={name: []}, failures={name: RequestFailure("not_finite")} if failed else {})
    s.memory.lose(forget_ended(s.requests, following, output))
    assert s.update(following, output) == []


@pytest.mark.parametrize("length", [150, 151, 152])
def test_checkpoint_after_answer_has_end_token(length):
    """Whether its last block is full or not."""
    s = stateful()
    one = request("a", length, max_tokens=9)
    ended_ahead(s, one)
    following = request("b", length + 20)
    following.token_ids[length : length + 2] = [7, END]
    assert cached(s, following) == length + 2


@pytest.mark.parametrize(("length", "hit"), [(150, 128), (151, 150), (152, 151)])
def test_failed_steps_in_flight_leave_no_checkpoint(length, hit):
    s = stateful()
    ended_ahead(s, request("a", length, max_tokens=9), failed=True)
    following = request("b", length + 20)
    following.token_ids[length : length + 2] = [7, END]
    s.add(following)
    step, _ = run(s)
    assert len(step.blocks_to_zero) == 1
    assert following.num_cached == hit, "the last block is of no use if the step in flight wrote to it"


def test_beams_copy_states():
    s = stateful(prefix_caching=False)
    add_search(s, "search", 5, 3, 4)
    extend(s, s.schedule())
    step = s.schedule()
    [slot, *others] = [one.states[0].slot for one in step.new_requests]
    assert step.state_copies == [("copy", slot, other) for other in others]
    assert len({slot, *others}) == 3


@pytest.mark.parametrize("places", [0, 1])
def test_drafts_need_a_place(places):
    s = stateful(draft_places=places)
    s.propose_drafts = lambda request: [7, 7]
    for name in "ab":
        s.add(request(name, 10, max_tokens=9))
    run(s)
    assert plan(run(s)[0]) == ([("b", 1), ("a", 3)] if places else [("a", 1), ("b", 1)])


def test_next_step_applies_accepted_drafts():
    s = stateful(draft_places=1)
    s.propose_drafts = lambda request: [7, 7, 9] if len(request.token_ids) == 11 else []
    s.add(request("a", 10, max_tokens=9))
    uses = [run(s)[0].requests[0].states for _ in range(4)]
    assert [use and use[0].num_accepted for use in uses[1:]] == [0, 2, None]


def test_checkpoint_of_an_answer_lacks_unapplied_drafts():
    s = stateful(draft_places=1)
    s.propose_drafts = lambda request: [7] * 5
    first = request("a", 10, max_tokens=7)
    s.add(first)
    finish(s)
    assert s.memory.draft_places == [0], "the place of accepted drafts is free again"
    following = request("b", 30)
    following.token_ids[:17] = first.token_ids
    assert cached(s, following) == 11


MEMORIES = {"save": ("device", "host"), "load": ("host", "device"), "copy": ("device", "device")}
"""From where to where each kind of copy goes."""


class Contents:
    """What slots and blocks would hold if there were a model: all tokens that were applied, in order."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[Any, ...]] = {}
        self.host: dict[int, tuple[Any, ...]] = {}
        self.blocks: dict[int, list[Any]] = {}
        self.host_blocks: dict[int, list[Any]] = {}
        self.drafts: dict[int, list[Any]] = {}

    def run(self, step: SchedulerOutput, batch: list[ScheduledRequest], roots: dict[str, list[bytes]]) -> None:
        """roots: by request, of each pass."""
        for kind, source, target in step.block_copies:
            sources, targets = (self.host_blocks if memory == "host" else self.blocks for memory in MEMORIES[kind])
            targets[target] = list(sources[source])
        for kind, source, target in step.state_copies:
            sources, targets = (self.host if memory == "host" else self.slots for memory in MEMORIES[kind])
            targets[target] = sources[source]
        targets: list[int] = []
        reads: list[set[int]] = []
        passes = [(scheduled, *one) for scheduled in batch for one in enumerate(roots[scheduled.state.request_id])]
        for scheduled, number, root in passes:
            request, uses = scheduled.state, scheduled.state_steps
            use = StateStep(request.slots[number], request.slots[number]) if uses is None else uses[number]
            tokens = [(root, None)]
            for place, token in enumerate(request.token_ids):
                images = [(one.key, place - one.start) for one in request.images_between(place, place + 1)]
                tokens.append((token, *images))
            drafts = [(token,) for token in scheduled.draft_token_ids]
            tokens += drafts
            self._write(request.block_tables[number], tokens, scheduled.start, scheduled.start + scheduled.num_tokens)
            end = scheduled.start + scheduled.num_tokens - len(drafts)
            state = (root,) if use.source == NO_SLOT else self.slots[use.source]
            accepted = self.drafts[use.draft_place][: use.num_accepted] if use.num_accepted else []
            assert (*state, *accepted) == (root, *tokens[1 : scheduled.start + 1])
            if drafts:
                self.drafts[use.draft_place] = drafts
            numbers = [number for number, _ in use.checkpoints]
            assert numbers == sorted({*numbers})
            assert all(scheduled.start < number <= end for number in numbers)
            for number, slot in (*use.checkpoints, (end, use.slot)):
                self.slots[slot] = (root, *tokens[1 : number + 1])
            own = {use.slot, *(slot for _, slot in use.checkpoints)}
            targets += own
            reads.append({use.source} - own - {NO_SLOT})
        assert 0 not in targets
        assert len(targets) == len({*targets}), "a slot is written by one sequence only"
        assert not {*targets} & {slot for one in reads for slot in one}, "and read by no other one in the same step"

    def _write(self, table: Any, tokens: list[Any], start: int, end: int) -> None:
        for place in range(start, end):
            self.blocks.setdefault(table[place // BLOCK], [None] * BLOCK)[place % BLOCK] = tokens[place + 1]
        for place in range(end):
            assert self.blocks[table[place // BLOCK]][place % BLOCK] == tokens[place + 1]


@st.composite
def conversations(draw: st.DrawFn) -> dict[str, Any]:
    """Few kinds of turns, so that prompts share beginnings."""
    turns = draw(st.lists(st.sampled_from([3, 20, 70]), max_size=3))
    images = draw(st.integers(0, 2)) if turns[:1] == [70] else 0
    salt = draw(st.sampled_from(["", "", "tenant"]))
    max_tokens, priority, mixed = draw(st.integers(1, 9)), draw(st.integers(0, 1)), draw(st.booleans())
    params = {"salt": salt, "max_tokens": max_tokens, "priority": priority, "mixed": mixed}
    return {"turns": turns, "images": min(images, 1), **params}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), conversations()),
            st.tuples(st.just("add"), conversations()),
            st.tuples(st.just("search"), st.integers(2, 3)),
            st.tuples(st.just("step"), st.integers(1, 4)),
            st.tuples(st.sampled_from(["fail", "undo", "abort", "end"]), st.integers(0, 9)),
        ),
        max_size=30,
    ),
    st.integers(1, 6),
    st.integers(40, 150),
    st.sampled_from([20, 90, 1000]),
    st.booleans(),
    st.sampled_from([0, 0, 1, 4]),
    st.sampled_from([0, 1, 3]),
    st.lists(st.sampled_from([[], [7], [7, 7, 9, 7], [9], [7] * 8]), min_size=1),
)
def test_states_and_blocks_hold_what_requests_need(
    operations, slots, num_blocks, budget, prefix_caching, on_host, places, drafts
):
    host = {"host_blocks": 30 * on_host, "host_states": on_host}
    s = scheduler(num_blocks, budget, prefix_caching=prefix_caching, states=slots, draft_places=places, **host)
    proposed = itertools.cycle(drafts)
    s.propose_drafts = lambda request: next(proposed)
    memory: StateMemory = s.memory
    states, contents, most_working = request_states(), Contents(), memory.num_places

    def step(kind: str = "step", number: int = 0) -> None:
        planned = s.schedule()
        batch = states.update(planned) if planned.has_work else []
        roots = {one.request_id: [chain.keys[0] for chain in one.chains] for one in s.running}
        contents.run(planned, batch, roots)
        token = END if kind == "end" else 7
        output = sampled(s, planned, token)
        names = [one.state.request_id for one in batch]
        for name in output.token_ids:
            asked = s.requests[name].params.logprobs
            if asked is not None:
                output.token_ids[name] = [7]
                top = tuple((7 + place, -0.1 * (1 + place)) for place in range(asked))
                output.logprobs[name] = [TokenLogprobs(7, -0.1, 1, top)]
        if kind == "fail" and names:
            name = names[number % len(names)]
            output.token_ids[name], output.failures[name] = [], RequestFailure("not_finite")
        if kind == "undo":
            output.undone, output.token_ids = names, {}
            for scheduled in batch:
                checkpoints = [slot for use in scheduled.state_steps or () for _, slot in use.checkpoints]
                for slot in (*scheduled.state.slots, *checkpoints):
                    contents.slots[slot] = ("half of a step",)
        s.update(planned, output)
        for scheduled in batch:
            scheduled.state.token_ids += [
                one for one in output.token_ids.get(scheduled.state.request_id, []) if one != END
            ]
        working = [slot for one in s.running for slot in one.state.slots]
        assert len({*working}) == len(working)
        assert memory.num_places == min(most_working - len(working), memory.states.num_free)
        assert memory.states.num_used >= len(working)

    for place, (operation, value) in enumerate(operations):
        if operation == "add":
            one = conversation(f"request {place}", *value.pop("turns"), **value)
            passes = len(one.chains)
            if passes <= slots and passes * (one.num_prompt_tokens + 10) < num_blocks * BLOCK:
                s.add(one)
        elif operation == "search":
            add_search(s, f"request {place}", 20, value, 4)
        elif operation == "abort":
            s.abort([f"request {value}"])
        elif operation == "step":
            for _ in range(value):
                step()
        else:
            step(operation, value)
    for _ in range(2000):
        if not len(s):
            break
        step()
    assert len(s) == 0
    assert (s.pool.num_used, memory.states.num_used, len(memory.planned)) == (0, 0, 0)
    assert memory.num_places == most_working
    assert len(memory.draft_places) == places


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 90), st.integers(1, 6), st.booleans())
def test_replies_find_states_of_steps_in_flight(length, num_tokens, aborted):
    """Of a request that ends, or is aborted, after the step is planned."""
    s, states, contents = stateful(), request_states(), Contents()

    def compute(step: SchedulerOutput, batch: list[ScheduledRequest], token: int) -> None:
        contents.run(step, batch, {one.request_id: [first.chains[0].keys[0]] for one in step.requests})
        batch[0].state.token_ids.append(token)

    first = request("a", length, max_tokens=20)
    s.add(first)
    for _ in range(num_tokens):
        step = s.schedule()
        compute(step, states.update(step), 7)
        s.update(step, sampled(s, step, 7))
    step = s.schedule()
    batch = states.update(step)
    following = s.schedule_ahead(step)
    assert following is not None
    later = states.update(following)
    token = 7 if aborted else END
    compute(step, batch, token)
    s.update(step, sampled(s, step, token))
    s.abort(["a"] if aborted else [])
    compute(following, later, 7)
    assert s.memory.states.num_used == 0
    said = [*[1] * length, *[7] * num_tokens, token]
    reply = request("b", len(said) + 9)
    reply.token_ids[: len(said)] = said
    s.add(reply)
    step = s.schedule()
    compute(step, states.update(step), 7)
    assert reply.num_cached == len(said)


def chat(person: int, turn: int) -> Request:
    """Turn number `turn` of a conversation about four images, as Qwen3.5's template writes it.

    Answers of earlier turns come without their reasoning, so each begins with other tokens than it was generated with.
    """
    token_ids, spans = [*[500] * 20, END, 501], []
    for number in range(turn + 1):
        token_ids += [502, 503, 501]
        for place in range(4 if number == 0 else 0):
            token_ids += [504]
            spans.append((image(10 * person + place, 256), len(token_ids)))
            token_ids += [505] * 256 + [506]
        token_ids += [*[600 + person + number] * 30, END, 501, 502, 507, 501]
        if number < turn:
            token_ids += [508, *[700 + person + number] * 60, END, 501]
    one = request(f"{person} {turn}", len(token_ids) + 1, images=spans, max_tokens=50)
    one.token_ids[:] = [*token_ids, 509]
    return one


@pytest.mark.parametrize("others", [0, 16])
def test_turns_find_what_both_prompts_share(others):
    """With other conversations in between. Each has four slots."""
    s = stateful(4 * (1 + others), num_blocks=16_000, budget=2048, encoder_bytes=300_000, seqs=32)
    shared = found = 0
    for turn in range(8):
        turns = [chat(person, turn) for person in range(1 + others)]
        for one in turns:
            s.add(one)
        finish(s)
        if turn:
            earlier = chat(0, turn - 1).token_ids
            shared += next(
                n for n, pair in enumerate(zip(earlier, turns[0].token_ids, strict=False)) if len({*pair}) > 1
            )
            found += turns[0].num_cached
    assert s.num_preemptions == 0
    assert found / shared >= 0.995

"""Random requests, steps and aborts: no block leaks or holds what is another's."""

from __future__ import annotations

import itertools
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.made_up import BLOCK, END, FixedLimits, cross_input, image, request, request_states, run, scheduler
from vlmserve.layer_specs import CacheBytes
from vlmserve.runner.requests import ScheduledRequest
from vlmserve.steps import ModelRunnerOutput, RequestFailure, SchedulerOutput


@st.composite
def requests(draw):
    length = draw(st.integers(1, 40))
    images = []
    start = 0
    while draw(st.booleans()):
        size = draw(st.integers(1, 8))
        start += draw(st.integers(0, 6))
        if start + size > length:
            break
        images.append((image(draw(st.integers(0, 3)) * 10 + size, size), start))
        start += size
    cross = None
    if not images and draw(st.booleans()):
        size = draw(st.integers(1, 4))
        cross = cross_input(draw(st.integers(5, 7)) * 10 + size, size, draw(st.integers(0, 4)))
    mixed = cross is None and draw(st.integers(0, 2)) == 2
    return length, draw(st.integers(1, 12)), images, cross, draw(st.sampled_from(["", "", "other"])), mixed


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests()),
        st.tuples(st.just("step"), st.sampled_from([7, 7, 7, END])),
        st.tuples(st.just("fail"), st.integers(0, 3)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
    ),
    max_size=60,
)


class Contents:
    """What the blocks would hold if there were a model: a written slot knows which token of which request it is.

    It knows of requests what a runner knows. roots: the keys that all blocks of a request begin with, in each pass.
    """

    def __init__(self) -> None:
        self.device: dict[int, list] = {}
        self.host: dict[int, list] = {}

    def run(self, step: SchedulerOutput, batch: list[ScheduledRequest], roots: dict[str, list[bytes]], windows) -> None:
        for block in step.blocks_to_zero:
            self.device[block] = [None] * BLOCK
        for kind, source, target in step.block_copies:
            origin = self.host if kind == "load" else self.device
            (self.host if kind == "save" else self.device)[target] = list(origin[source])

        def content(scheduled: ScheduledRequest, position: int, root: bytes, column: int):
            state = scheduled.state
            spans = (span for span in state.bidirectional_spans if span[0] <= position < span[1])
            start, reach = next(spans, (position, position + 1))
            images = [(one.key, position - one.start) for one in state.images_between(start, reach)]
            tokens = (state.token_ids + scheduled.draft_token_ids)[:reach]
            return root, column, state.position_offset, position, tuple(tokens), *images

        columns = [
            (scheduled, table, *place)
            for scheduled in batch
            for table, place in zip(
                scheduled.state.block_tables,
                itertools.product(roots[scheduled.state.request_id], range(len(windows))),
                strict=True,
            )
        ]
        for scheduled, table, *place in columns:
            for position in range(scheduled.start, scheduled.start + scheduled.num_tokens):
                block = self.device.setdefault(table[position // BLOCK], [None] * BLOCK)
                block[position % BLOCK] = content(scheduled, position, *place)
        for scheduled, table, *place in columns:
            window = windows[place[1]]
            seen_from = 0 if window is None else max(0, scheduled.start - window + 1)
            for position in range(seen_from, scheduled.start + scheduled.num_tokens):
                assert self.device[table[position // BLOCK]][position % BLOCK] == content(scheduled, position, *place)


def sample(batch: list[ScheduledRequest], token: int) -> ModelRunnerOutput:
    """Every other request gets the token that comes after the given one."""
    output = ModelRunnerOutput()
    for index, scheduled in enumerate(batch):
        if scheduled.num_sampled:
            own = token + index % 2 if token != END else END
            tokens = output.token_ids[scheduled.state.request_id] = [own]
            for draft in scheduled.draft_token_ids:
                if draft != own or own == END:
                    break
                tokens.append(own)
            for new in tokens:
                if new != END:
                    scheduled.state.append(new)
    return output


@settings(deadline=None)
@given(
    st.tuples(
        st.integers(1, 30),
        st.integers(1, 40),
        st.integers(1, 5),
        st.integers(8, 20),
        st.integers(1, 3),
        st.booleans(),
        st.sampled_from([0, 1, 3, 10]),
        st.sampled_from([(None,), (None,), (1,), (8,), (None, 5), (None, 8, 8), (30, 5), (None, 1, 6)]),
    ),
    OPERATIONS,
    st.sampled_from([None, None, "images", "prefix"]),
    st.sampled_from([None, 3, 9, 20]),
    st.sampled_from([None, [], [7], [7, 7, 7], [8, 8, 7, 8, 8, 8], [7] * 9]),
    st.sampled_from([None, 1, 9, 25, 1000]),
)
def test_no_block_leaks_or_holds_foreign_content(
    sizes, operations, bidirectional, max_short_len, drafts, encoder_budget
):
    num_blocks, budget, seqs, encoder_bytes, max_images, prefix_caching, _, windows = sizes
    s = scheduler(*sizes)
    s.propose_drafts = None if drafts is None else lambda request: drafts[request.num_prompt_tokens % 2 :]
    if encoder_budget is not None:
        s.limits = FixedLimits(encoder_budget, others=7 * encoder_budget, tokens=3)
    states = request_states(bidirectional=bidirectional, max_short_len=max_short_len)
    contents = Contents()
    chunk = budget if bidirectional is None else 100
    fitting = partial(CacheBytes(BLOCK, 1, windows, {}).fitting, max_chunk=chunk, max_tokens=100)
    capacity = fitting(num_blocks)
    open_requests: set[str] = set()
    embeddings: set[bytes] = set()
    unfinished: dict[bytes, int] = {}
    added = 0

    def step(token, failing=None):
        decoding = {running.request_id for running in s.running if running.num_uncomputed == 1}
        preemptions = s.num_preemptions
        planned = s.schedule()
        counts = [scheduled.num_tokens for scheduled in planned.requests]
        assert sum(counts) <= budget or (bidirectional is not None and sum(counts) - max(counts) < budget)
        begun = [one for one in planned.encodings if one.image is not None]
        assert len(planned.images_to_encode) + len(begun) <= max_images
        assert len(s.running) <= seqs
        for key in planned.embeddings_to_evict:
            assert (unfinished.pop(key, None) is None) == (key in embeddings)
            embeddings.discard(key)
        assert not embeddings & {*planned.encoded_keys}
        assert len({*planned.encoded_keys}) == len(planned.encoded_keys)
        embeddings.update(one.key for one in planned.images_to_encode)
        for one in planned.encodings:
            assert (one.image is None) == (one.key in unfinished)
            if one.image is not None:
                unfinished[one.key] = 10 * one.image.num_embeddings
            if one.products is None:
                del unfinished[one.key]
                embeddings.add(one.key)
            else:
                unfinished[one.key] -= one.products
                assert unfinished[one.key] > 0, "what is finished is said to be"
        if encoder_budget is not None and decoding and preemptions == s.num_preemptions:
            whole = sum(10 * one.num_embeddings for one in planned.images_to_encode)
            assert whole + sum(one.products or 0 for one in planned.encodings) <= encoder_budget
        for wanted in planned.cross_states:
            assert wanted.image_key in embeddings
            assert wanted.key not in embeddings
            embeddings.add(wanted.key)
        batch = states.update(planned) if planned.has_work else []
        ones = [scheduled.num_tokens == 1 for scheduled in batch]
        assert ones == sorted(ones, reverse=True)
        for scheduled in batch:
            state, start, guessed = scheduled.state, scheduled.start, scheduled.draft_token_ids
            request, end = s.requests[state.request_id], start + scheduled.num_tokens
            assert state.token_ids == request.token_ids
            assert scheduled.state.block_tables == [table.blocks for table in request.tables]
            assert start == request.num_computed
            assert all(end <= len(table) * BLOCK for table in scheduled.state.block_tables)
            assert end - len(guessed) <= len(state.token_ids)
            assert not guessed or end - len(guessed) == len(state.token_ids)
            assert max_short_len is None or len(state.token_ids) > max_short_len or end <= max_short_len
            assert request.bidirectional_span_at(end) is None, "a bidirectional span is computed in one step"
            assert all(one.key in embeddings for one in state.images_between(start, end))
            assert state.cross_key is None or state.cross_key in embeddings
        roots = {request.request_id: [chain.keys[0] for chain in request.chains] for request in s.running}
        failed = batch[failing % len(batch)] if failing is not None and batch else None
        computed = [scheduled for scheduled in batch if scheduled is not failed]
        contents.run(planned, computed, roots, windows)
        sampled = sample(computed, token)
        if failed is not None:
            sampled.token_ids[failed.state.request_id] = []
            sampled.failures[failed.state.request_id] = RequestFailure("out_of_memory")
        for output in s.update(planned, sampled):
            if output.finish_reason is not None:
                open_requests.remove(output.request_id)
        if planned.has_work:
            assert len(states) <= len(s) + len(batch), "the runner forgets requests that are finished"
        tables = [(running, table) for running in s.running for table in running.tables]
        held = [block for _, table in tables for block in table.held]
        assert len(set(held)) == s.pool.num_used
        assert all(s.pool.ref_count(block) == held.count(block) for block in set(held))
        assert prefix_caching or len(held) == len(set(held))
        assert s.memory.cache.host is None or s.memory.cache.host.num_used == 0
        for running, table in tables:
            assert len(table.blocks) <= len(running.tables[0].blocks), "see `CacheLayout.windows`"
            for block in set(table.blocks[running.num_computed // BLOCK :]):
                assert s.pool.ref_count(block) == 1, "a block that is still written to is in one hand only"
        assert s.images.cache.used_bytes <= encoder_bytes
        return planned

    for operation, argument in operations:
        if operation == "add":
            length, max_tokens, images, cross, salt, mixed = argument
            most = fitting(num_blocks // 2) if mixed else capacity
            if length < most:
                name = f"request {added}"
                given = {"images": images, "cross": cross, "salt": salt, "bidirectional": bidirectional}
                given |= {"max_tokens": max_tokens, "max_short_len": max_short_len, "mixed": mixed}
                s.add(request(name, length, capacity=most, **given))
                open_requests.add(name)
                added += 1
        elif operation == "abort":
            s.abort([f"request {argument}"])
            open_requests.discard(f"request {argument}")
        elif operation == "fail":
            step(7, failing=argument)
        else:
            step(argument)
    for _ in range(10_000):
        if not open_requests:
            break
        planned = step(7)
        assert planned.makes_progress, "an engine with work must always make progress"
    assert not open_requests
    assert (s.pool.num_used, s.images.cache.num_pinned, len(s)) == (0, 0, 0)
    assert not s.memory.computing
    assert {*unfinished} <= {*s.images.dropped} <= {*unfinished} | embeddings
    assert not s.images.unfinished
    assert not s.images.awaiting_image


def test_tables_without_new_blocks_are_not_sent():
    s = scheduler(num_blocks=3)
    s.add(request("a", 12))
    run(s)
    [running] = s.running
    assert s.memory.grow(running, 1) == 0
    assert not running.unsent

"""The scheduler without a model: tokens are made up here, so that only its bookkeeping is on trial."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmserve.cache.blocks import BlockPool
from vlmserve.cache.encoder import EncoderCache
from vlmserve.cache.keys import block_key, root_key
from vlmserve.cache.prefix import PrefixCache
from vlmserve.scheduler.scheduler import Scheduler, Step
from vlmserve.scheduler.sequence import Sequence
from vlmserve.types import EngineRequest, ImageInput, ImageSpan, Prompt, RequestOutput, SamplingParams

BLOCK = 4
END = 999


def image(number: int, num_tokens: int) -> ImageInput:
    return ImageInput(bytes([number]) * 32, np.zeros((1, 3, 2, 2), np.float32), num_tokens)


def sequence(name, length, *, token=1, salt="", max_tokens=3, capacity=10_000, images=(), **params) -> Sequence:
    spans = tuple(ImageSpan(picture, start) for picture, start in images)
    request = EngineRequest(name, Prompt([token] * length, spans), SamplingParams(max_tokens=max_tokens, **params))
    return Sequence(
        request, root_key=root_key(b"", salt=salt), seed=0, max_len=capacity, end_token_ids=frozenset({END})
    )


def scheduler(
    num_blocks=100, budget=64, seqs=16, encoder_bytes=1000, max_encoded_images=4, prefix_caching=False,
    host_blocks=0, window=None,
) -> Scheduler:  # fmt: skip
    return Scheduler(
        cache=PrefixCache(BlockPool(num_blocks), BlockPool(host_blocks) if host_blocks else None),
        encoder_cache=EncoderCache(encoder_bytes),
        block_size=BLOCK,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_encoded_images=max_encoded_images,
        image_token_bytes=1,
        prefix_caching=prefix_caching,
        window=window,
    )


def run(scheduler: Scheduler, token: int = 7) -> tuple[Step, list[RequestOutput]]:
    step = scheduler.schedule()
    return step, scheduler.update(step, [token for chunk in step.chunks if chunk.samples])


def plan(step: Step) -> list[tuple[str, int]]:
    return [(chunk.sequence.request_id, chunk.num_tokens) for chunk in step.chunks]


def test_decodes_go_first_and_prompt_chunks_fill_the_budget():
    s = scheduler(budget=10)
    s.add(sequence("a", 8))
    run(s)
    s.add(sequence("b", 20))
    assert plan(run(s)[0]) == [("a", 1), ("b", 9)]
    assert plan(run(s)[0]) == [("a", 1), ("b", 9)]
    assert plan(run(s)[0]) == [("b", 2)]


def test_requests_are_served_in_order_of_arrival():
    s = scheduler(num_blocks=4, budget=100)
    s.add(sequence("big", 12))
    s.add(sequence("bigger", 16))
    s.add(sequence("small", 1))
    assert plan(run(s)[0]) == [("big", 12)], "a small one must not overtake a big one that waits for blocks"


def test_who_was_admitted_last_is_preempted_and_computed_again():
    s = scheduler(num_blocks=5, budget=100)
    first, second = sequence("first", 4, max_tokens=9), sequence("second", 4, max_tokens=9)
    s.add(first)
    s.add(second)
    run(s)
    while s.num_preemptions == 0:
        run(s)
    assert second.num_computed == 0
    assert not second.block_table
    assert list(s.waiting) == [second]
    generated = list(second.token_ids)
    while first.num_generated < 9:
        run(s)
    step, _ = run(s)
    assert step.chunks[0].sequence is second
    assert step.chunks[0].num_tokens == len(generated)


def test_an_end_token_ends_and_frees_everything():
    s = scheduler()
    s.add(sequence("a", 5))
    _, (output,) = run(s, token=END)
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([], "stop", END)
    assert s.pool.num_used == 0
    assert len(s) == 0


def test_ignore_eos_keeps_the_end_token_but_stop_token_ids_still_stop():
    s = scheduler()
    s.add(sequence("a", 5, ignore_eos=True, stop_token_ids=(5,)))
    assert run(s, token=END)[1][0].token_ids == [END]
    assert run(s, token=5)[1][0].finish_reason == "stop"


def test_a_chunk_ends_before_a_picture_that_cannot_be_encoded_yet():
    s = scheduler(max_encoded_images=1)
    s.add(sequence("a", 20, images=[(image(1, 4), 2), (image(2, 4), 10)]))
    step, _ = run(s)
    assert plan(step) == [("a", 10)]
    assert [picture.key[0] for picture in step.encode] == [1]
    step, _ = run(s)
    assert plan(step) == [("a", 10)]
    assert [picture.key[0] for picture in step.encode] == [2]


def test_equal_pictures_of_several_requests_are_encoded_once():
    s = scheduler()
    s.add(sequence("a", 10, images=[(image(1, 4), 2)]))
    s.add(sequence("b", 10, images=[(image(1, 4), 4)]))
    step, _ = run(s)
    assert len(step.encode) == 1


def test_a_picture_cut_by_a_chunk_stays_pinned_until_its_last_token():
    s = scheduler(budget=7)
    s.add(sequence("a", 14, images=[(image(1, 6), 5)]))
    run(s)
    assert s.encoder_cache.num_pinned == 1
    run(s)
    assert s.encoder_cache.num_pinned == 0


def test_a_picture_that_comes_twice_is_encoded_once_if_it_is_still_there():
    s = scheduler(budget=7)
    s.add(sequence("a", 20, images=[(image(1, 4), 1), (image(1, 4), 12)]))
    run(s)
    step, _ = run(s)
    assert step.encode == []


def test_a_picture_that_comes_twice_does_not_keep_out_the_one_between():
    s = scheduler(encoder_bytes=8)
    s.add(sequence("a", 13, images=[(image(1, 4), 0), (image(2, 5), 4), (image(1, 4), 9)]))
    encoded = []
    for _ in range(3):
        encoded += [picture.key[0] for picture in run(s)[0].encode]
    assert encoded == [1, 2, 1]


def test_aborting_frees_everything_at_once():
    s = scheduler(budget=7)
    s.add(sequence("a", 14, images=[(image(1, 6), 5)]))
    s.add(sequence("b", 14))
    run(s)
    s.abort(["a", "b", "nobody"])
    assert (s.pool.num_used, s.encoder_cache.num_pinned, len(s)) == (0, 0, 0)
    assert s.schedule().chunks == []


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
    return length, draw(st.integers(1, 12)), images, draw(st.sampled_from(["", "", "other"]))


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests()),
        st.tuples(st.just("step"), st.sampled_from([7, 7, 7, END])),
        st.tuples(st.just("abort"), st.integers(0, 30)),
    ),
    max_size=60,
)


class Contents:
    """What the blocks would hold if there were a model: a written slot knows which token of whom it is."""

    def __init__(self) -> None:
        self.device: dict[int, list] = {}
        self.host: dict[int, list] = {}

    @staticmethod
    def of(sequence: Sequence, position: int):
        pictures = [(span.image.key, position - span.start) for span in sequence.spans_between(position, position + 1)]
        return sequence.block_keys[0], position, tuple(sequence.token_ids[: position + 1]), *pictures

    def run(self, step: Step, window: int | None) -> None:
        for block in step.clear:
            self.device[block] = [None] * BLOCK
        for kind, source, target in step.transfers:
            origin = self.host if kind == "load" else self.device
            (self.host if kind == "save" else self.device)[target] = list(origin[source])
        for chunk in step.chunks:
            sequence, end = chunk.sequence, chunk.sequence.num_computed + chunk.num_tokens
            for position in range(sequence.num_computed, end):
                block = sequence.block_table[position // BLOCK]
                self.device.setdefault(block, [None] * BLOCK)[position % BLOCK] = self.of(sequence, position)
        for chunk in step.chunks:
            sequence, end = chunk.sequence, chunk.sequence.num_computed + chunk.num_tokens
            seen_from = 0 if window is None else max(0, sequence.num_computed - window + 1)
            for position in range(seen_from, end):
                block = sequence.block_table[position // BLOCK]
                assert self.device[block][position % BLOCK] == self.of(sequence, position)


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
        st.sampled_from([None, None, 1, 5, 8, 30]),
    ),
    OPERATIONS,
)
def test_no_block_leaks_or_holds_another_requests_content_and_every_request_ends(sizes, operations):
    num_blocks, budget, seqs, encoder_bytes, max_images, prefix_caching, _, window = sizes
    s = scheduler(*sizes)
    contents = Contents()
    capacity = num_blocks * BLOCK
    open_requests: set[str] = set()
    embeddings: set[bytes] = set()
    added = 0

    def step(token):
        planned = s.schedule()
        assert sum(chunk.num_tokens for chunk in planned.chunks) <= budget
        assert len(planned.encode) <= max_images
        assert len(s.running) <= seqs
        ones = [chunk.num_tokens == 1 for chunk in planned.chunks]
        assert ones == sorted(ones, reverse=True)
        embeddings.difference_update(planned.evict)
        assert not embeddings & {picture.key for picture in planned.encode}
        embeddings.update(picture.key for picture in planned.encode)
        for chunk in planned.chunks:
            start, end = chunk.sequence.num_computed, chunk.sequence.num_computed + chunk.num_tokens
            assert end <= len(chunk.sequence.block_table) * BLOCK
            assert all(span.image.key in embeddings for span in chunk.sequence.spans_between(start, end))
        contents.run(planned, window)
        sampled = [token + index % 2 if token != END else END for index, _ in enumerate(planned.chunks)]
        for output in s.update(planned, [t for t, c in zip(sampled, planned.chunks, strict=True) if c.samples]):
            if output.finish_reason is not None:
                open_requests.remove(output.request_id)
        held = [block for running in s.running for block in running.block_table[running.first_block :]]
        assert len(set(held)) == s.pool.num_used
        assert all(s.pool.ref_count(block) == held.count(block) for block in set(held))
        assert prefix_caching or len(held) == len(set(held))
        assert s.cache.host is None or s.cache.host.num_used == 0
        for running in s.running:
            for block in set(running.block_table[running.num_computed // BLOCK :]):
                assert s.pool.ref_count(block) == 1, "a block that is still written to is in one hand only"
        assert s.encoder_cache.used_bytes <= encoder_bytes
        return planned

    for operation, argument in operations:
        if operation == "add":
            length, max_tokens, images, salt = argument
            if length < capacity:
                name = f"request {added}"
                s.add(sequence(name, length, max_tokens=max_tokens, capacity=capacity, images=images, salt=salt))
                open_requests.add(name)
                added += 1
        elif operation == "abort":
            s.abort([f"request {argument}"])
            open_requests.discard(f"request {argument}")
        else:
            step(argument)
    for _ in range(10_000):
        if not open_requests:
            break
        assert step(7).chunks, "an engine with work must always make progress"
    assert not open_requests
    assert (s.pool.num_used, s.encoder_cache.num_pinned, len(s)) == (0, 0, 0)
    assert not s._computing


def test_the_running_list_stays_in_order_of_arrival_through_preemptions():
    s = scheduler(num_blocks=6, budget=100)
    names = [f"{number}" for number in range(6)]
    for name in names:
        s.add(sequence(name, 4, max_tokens=9))
    finished = []
    while len(s):
        running = [sequence.request_id for sequence in s.running]
        assert running == sorted(running)
        finished += [output.request_id for output in run(s)[1] if output.finish_reason]
    assert finished == names
    assert s.num_preemptions > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_is_exact(max_tokens):
    s = scheduler()
    s.add(sequence("a", 3, max_tokens=max_tokens))
    tokens = []
    while len(s):
        tokens += run(s)[1][0].token_ids
    assert len(tokens) == max_tokens


def finish(s: Scheduler) -> list[RequestOutput]:
    outputs = []
    while len(s):
        outputs += run(s)[1]
    return outputs


def test_a_prompt_that_was_computed_before_is_found_but_for_its_last_token():
    s = scheduler(prefix_caching=True)
    s.add(sequence("a", 8))
    finish(s)
    s.add(sequence("b", 8))
    step, (output,) = run(s)
    assert plan(step) == [("b", 1)], "the last token is computed again, for its logits"
    assert output.cached_tokens == 7
    assert (s.prefix_cached_tokens, s.prefix_queried_tokens) == (7, 16)


def test_generated_tokens_are_found_in_the_next_turn():
    s = scheduler(prefix_caching=True)
    s.add(sequence("a", 6, token=7, max_tokens=7))
    finish(s)
    s.add(sequence("b", 20, token=7))
    run(s)
    assert s.running[0].num_cached == 12, "13 tokens were known, the last one never had its keys computed"


def test_aborted_requests_leave_blocks_to_be_found():
    s = scheduler(prefix_caching=True, budget=8)
    s.add(sequence("a", 20))
    run(s)
    s.abort(["a"])
    s.add(sequence("b", 20))
    run(s)
    assert s.running[0].num_cached == 8


def test_a_running_request_shares_its_full_blocks_and_its_last_one_is_copied():
    s = scheduler(prefix_caching=True)
    s.add(sequence("a", 11))
    run(s)
    s.add(sequence("b", 11))
    step, _ = run(s)
    a, b = s.running
    assert a.block_table[:2] == b.block_table[:2]
    assert step.transfers == [("copy", a.block_table[2], b.block_table[2])]
    assert plan(step) == [("a", 1), ("b", 1)]


def test_equal_requests_at_once_wait_for_the_first_and_share_its_prompt():
    s = scheduler(prefix_caching=True)
    for name in "abc":
        s.add(sequence(name, 11, images=[(image(1, 4), 2)]))
    step, _ = run(s)
    assert plan(step) == [("a", 11)]
    assert len(step.encode) == 1
    step, _ = run(s)
    assert sorted(plan(step)) == [("a", 1), ("b", 1), ("c", 1)]
    assert step.encode == []
    assert s.pool.num_used == 2 + 3


def test_a_request_does_not_wait_for_a_small_common_beginning():
    s = scheduler(prefix_caching=True)
    s.add(sequence("a", 6))
    longer = sequence("b", 30)
    longer.token_ids[4:] = [2] * 26
    s.add(longer)
    assert plan(run(s)[0]) == [("a", 6), ("b", 30)]


def test_who_waits_for_an_aborted_request_computes_for_itself():
    s = scheduler(prefix_caching=True, budget=8)
    s.add(sequence("a", 30))
    s.add(sequence("b", 30))
    run(s)
    s.abort(["a"])
    assert plan(run(s)[0]) == [("b", 8)]
    assert s.running[0].num_cached == 8


def test_later_requests_pass_one_that_waits_for_its_beginning():
    s = scheduler(prefix_caching=True)
    for name, token in (("a", 1), ("b", 1), ("c", 2)):
        s.add(sequence(name, 20, token=token))
    assert plan(run(s)[0]) == [("a", 20), ("c", 20)]
    assert ("b", 1) in plan(run(s)[0])


def test_evicted_blocks_fall_to_the_host_and_come_back_on_a_hit():
    s = scheduler(num_blocks=4, host_blocks=10, prefix_caching=True)
    s.add(sequence("a", 11, max_tokens=1))
    finish(s)
    s.add(sequence("b", 15, token=2, max_tokens=1))
    step, _ = run(s)
    assert [transfer.kind for transfer in step.transfers] == ["save"] * 3
    s.add(sequence("c", 11, max_tokens=1))
    step, (output,) = run(s)
    assert [transfer.kind for transfer in step.transfers] == ["save"] * 3 + ["load"] * 3
    assert output.cached_tokens == 10
    assert plan(step) == [("c", 1)]


def test_a_preempted_request_comes_back_from_the_host_without_computing_again():
    s = scheduler(num_blocks=6, host_blocks=20, prefix_caching=True)
    s.add(sequence("a", 4, max_tokens=16))
    s.add(sequence("b", 4, token=2, max_tokens=16))
    computed = 0
    while len(s):
        step, _ = run(s)
        computed += sum(chunk.num_tokens for chunk in step.chunks)
    assert s.num_preemptions > 0
    assert s.cache.num_loaded > 0
    assert computed == 2 * (4 + 15), "every token was computed once"


def test_blocks_behind_the_window_are_free_again():
    s = scheduler(window=8, prefix_caching=True)
    s.add(sequence("a", 40, max_tokens=9))
    run(s)
    assert s.pool.num_used == 2, "33 of 40 computed positions are out of sight of the next one"
    while len(s):
        assert s.pool.num_used <= 3
        run(s)


def test_a_waiting_requests_keys_are_computed_once(monkeypatch):
    lengths = []

    def counting(parent, token_ids, images):
        lengths.append(len(token_ids))
        return block_key(parent, token_ids, images)

    monkeypatch.setattr("vlmserve.scheduler.sequence.block_key", counting)
    s = scheduler(num_blocks=6, prefix_caching=True)
    s.add(sequence("a", 16, max_tokens=5))
    s.add(sequence("waits", 15, token=2))
    run(s)
    lengths.clear()
    for _ in range(3):
        run(s)
    assert [one.request_id for one in s.waiting] == ["waits"]
    assert lengths == []


def test_with_a_window_a_prompt_never_holds_more_than_the_window_and_a_chunk():
    s = scheduler(num_blocks=12, budget=8, window=8)
    s.add(sequence("a", 4, max_tokens=20))
    run(s)
    s.add(sequence("b", 40))
    held = []
    while "b" in s:
        assert [chunk.sequence.request_id for chunk in run(s)[0].chunks] == ["a", "b"]
        held.append(s.pool.num_used)
    assert max(held) <= 3 + 5, "ten for the whole prompt would not fit beside the first request"


def test_of_prompts_with_a_window_that_all_lack_blocks_the_last_gives_way():
    s = scheduler(budget=8, window=8, max_encoded_images=1)
    s.add(sequence("a", 41, images=[(image(number, 1), 4 * number) for number in range(10)]))
    s.add(sequence("b", 41, token=2))
    assert plan(run(s)[0]) == [("a", 4), ("b", 4)]
    taken = []
    while s.num_preemptions == 0:
        taken += s.pool.allocate(s.pool.num_free)
        before = [running.num_computed for running in s.running]
        step, _ = run(s)
        assert step.chunks
    assert before == [16, 16], "all blocks were full"
    assert plan(step) == [("a", 4)]
    assert [waiting.request_id for waiting in s.waiting] == ["b"]
    s.pool.release(taken)
    assert {output.request_id for output in finish(s) if output.finish_reason} == {"a", "b"}


def test_with_a_window_the_blocks_in_sight_are_enough_for_a_hit():
    s = scheduler(num_blocks=12, window=8, prefix_caching=True)
    s.add(sequence("a", 40, max_tokens=1))
    finish(s)
    s.add(sequence("b", 30, token=2, max_tokens=1))
    finish(s)
    s.add(sequence("a again", 41, max_tokens=1))
    _, (output,) = run(s)
    assert output.cached_tokens >= 36, "the beginning was evicted, what the last token sees was not"


@pytest.mark.parametrize(
    "other",
    [
        {"salt": "tenant"},
        {"token": 2},
        {"images": [(image(2, 4), 2)]},
        {"images": [(image(1, 4), 3)]},
        {"images": []},
    ],
)
def test_other_salts_tokens_pictures_and_offsets_share_nothing(other):
    s = scheduler(prefix_caching=True)
    s.add(sequence("a", 12, images=[(image(1, 4), 2)]))
    finish(s)
    s.add(sequence("b", 12, **{"images": [(image(1, 4), 2)], **other}))
    run(s)
    assert s.running[0].num_cached == 0


def test_a_picture_behind_cached_blocks_is_not_encoded():
    s = scheduler(prefix_caching=True, encoder_bytes=4)
    s.add(sequence("a", 12, images=[(image(1, 4), 2)]))
    finish(s)
    s.add(sequence("evicts", 8, token=3, images=[(image(2, 4), 0)]))
    finish(s)
    s.add(sequence("b", 12, images=[(image(1, 4), 2)]))
    step, _ = run(s)
    assert step.encode == []


def test_the_deepest_blocks_of_a_chain_are_evicted_first():
    s = scheduler(num_blocks=4, prefix_caching=True)
    s.add(sequence("a", 13, max_tokens=1))
    finish(s)
    s.add(sequence("b", 7, token=2, max_tokens=1))
    finish(s)
    s.add(sequence("c", 13, max_tokens=1))
    run(s)
    assert s.prefix_cached_tokens == 8

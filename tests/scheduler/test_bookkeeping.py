"""Random requests, steps and aborts: no block leaks or holds what is another's."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.made_up import BLOCK, END, image, looking, scheduler, sequence
from vlmserve.scheduler.scheduler import Step
from vlmserve.scheduler.sequence import Sequence


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
        cross = looking(draw(st.integers(5, 7)) * 10 + size, size, draw(st.integers(0, 4)))
    return length, draw(st.integers(1, 12)), images, cross, draw(st.sampled_from(["", "", "other"]))


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
        ranges = (whole for whole in sequence.whole_ranges if whole[0] <= position < whole[1])
        start, reach = next(ranges, (position, position + 1))
        pictures = [(span.image.key, position - span.start) for span in sequence.spans_between(start, reach)]
        return sequence.block_keys[0], position, tuple(sequence.token_ids[:reach]), *pictures

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
    st.sampled_from([None, None, "pictures", "prefix"]),
)
def test_no_block_leaks_or_holds_another_requests_content_and_every_request_ends(sizes, operations, sees_ahead):
    if sees_ahead is not None:
        sizes = (*sizes[:-1], None)
    num_blocks, budget, seqs, encoder_bytes, max_images, prefix_caching, _, window = sizes
    s = scheduler(*sizes)
    contents = Contents()
    capacity = num_blocks * BLOCK
    open_requests: set[str] = set()
    embeddings: set[bytes] = set()
    added = 0

    def step(token):
        planned = s.schedule()
        counts = [chunk.num_tokens for chunk in planned.chunks]
        assert sum(counts) <= budget or (sees_ahead is not None and sum(counts) - max(counts) < budget)
        assert len(planned.encode) <= max_images
        assert len(s.running) <= seqs
        ones = [chunk.num_tokens == 1 for chunk in planned.chunks]
        assert ones == sorted(ones, reverse=True)
        embeddings.difference_update(planned.evict)
        assert not embeddings & {picture.key for picture in planned.encode}
        embeddings.update(picture.key for picture in planned.encode)
        for look in planned.look:
            assert look.cross.image.key in embeddings
            assert look.key not in embeddings
            embeddings.add(look.key)
        for chunk in planned.chunks:
            start, end = chunk.sequence.num_computed, chunk.sequence.num_computed + chunk.num_tokens
            assert end <= len(chunk.sequence.block_table) * BLOCK
            assert chunk.sequence.whole_range_at(end) is None, "tokens that see each other are computed in one go"
            assert all(span.image.key in embeddings for span in chunk.sequence.spans_between(start, end))
            assert chunk.sequence.cross is None or chunk.sequence.cross_key in embeddings
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
            length, max_tokens, images, cross, salt = argument
            if length < capacity:
                name = f"request {added}"
                given = {"images": images, "cross": cross, "salt": salt, "sees_ahead": sees_ahead}
                s.add(sequence(name, length, max_tokens=max_tokens, capacity=capacity, **given))
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

"""Plans where running requests leave checkpoints of their states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from vlmserve.cache.states import StatePool, stored_key
from vlmserve.layer_specs import CHUNK
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.memory import boundaries_of, num_reusable, turn_ends

NEAR = 16
"""Boundaries closer than this many tokens share a checkpoint, because prompts seldom part between them."""
MAX_STORED_PLACES = 32
"""Maximum checkpoints of a prompt that are looked for on disk."""


class PlannedCheckpoints:
    """By prefix key."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._requests: dict[bytes, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request, places: Iterable[int]) -> None:
        state = request.state
        assert state is not None
        for num_tokens in places:
            key = state.leaving[num_tokens] = prefix_key(request, num_tokens, self._size)
            self._requests.setdefault(key, request)
        state.cuts = sorted({*state.cuts, *state.leaving})

    def __contains__(self, key: bytes) -> bool:
        return key in self._requests

    def drop(self, request: Request, num_computed: int | None = None) -> None:
        """Up to `num_computed`, or all."""
        leaving = {} if request.state is None else request.state.leaving
        for num_tokens in [number for number in leaving if num_computed is None or number <= num_computed]:
            key = leaving.pop(num_tokens)
            if self._requests.get(key) is request:
                del self._requests[key]


def prefix_key(request: Request, num_tokens: int, block_size: int, of_pass: int = 0) -> bytes:
    chain = request.chains[of_pass]
    if (tail := request.tail_key(chain, num_tokens, block_size)) is not None:
        return tail
    num_blocks = num_tokens // block_size
    if num_blocks >= len(chain.keys):  # the keys of a long prompt are slow to copy
        request.keys_of_full_blocks(chain, num_blocks, block_size)
    return chain.keys[num_blocks]


def prefix_keys(request: Request, num_tokens: int, block_size: int) -> list[bytes]:
    return [prefix_key(request, num_tokens, block_size, number) for number in range(len(request.chains))]


def cached_checkpoints(request: Request, reach: int, states: StatePool, block_size: int) -> Iterator[int]:
    """Yield leading tokens, descending. reach: cached full blocks, or -1."""
    places: Iterable[int] = _indexed(request, reach, states, block_size)
    if states.stored:
        stored = [number for number in stored_places(request) if number // block_size <= reach]
        places = sorted({*places, *stored}, reverse=True)
    for num_tokens in places:
        if not 0 < num_tokens <= num_reusable(request):
            continue
        keys = prefix_keys(request, num_tokens, block_size)
        if all(key in states.checkpoints or stored_key(key) in states.stored for key in keys):
            yield num_tokens


def _indexed(request: Request, reach: int, states: StatePool, block_size: int) -> Iterator[int]:
    chain = request.chains[0]
    for full in range(min(reach, len(chain.keys) - 1), -1, -1):
        for extra in states.checkpoints.after(chain.keys[full]):
            yield full * block_size + extra


def stored_places(request: Request) -> list[int]:
    """Return numbers of tokens that requests with this beginning may have stored on disk, descending."""
    places = {*turn_ends(request), *(span.end for span in request.image_spans), request.num_prompt_tokens - 1}
    return sorted(places, reverse=True)[:MAX_STORED_PLACES]


def places_to_store(request: Request) -> set[int]:
    """The ends of the first turn, the last turn, or else the prompt, and the last image. States are large."""
    images = [span.end for span in request.image_spans]
    return {*turn_ends(request)[:1], *ranked_boundaries(request)[:1], *images[-1:]}


def leader_of(
    request: Request, reach: int, computing: Mapping[bytes, Request], block_size: int
) -> tuple[Request | None, int]:
    """Return the running request that computes tokens of a waiting one, and their number.

    reach: cached full blocks. computing: by block key.
    """
    keys = request.keys_of_full_blocks(request.chains[0], num_reusable(request) // block_size, block_size)
    end = reach
    while end < len(keys) and keys[end] in computing:
        end += 1
    return (computing[keys[end - 1]], end * block_size) if end > reach else (None, 0)


def ranked_boundaries(request: Request) -> list[int]:
    """First the end of the last turn, for the next turn, then what a repeat of the prompt reuses."""
    last = request.num_prompt_tokens - 1
    images = sorted((span.end for span in request.image_spans), reverse=True)
    turns = sorted(boundaries_of(request) - {last, *images})
    images = [end for end in images if not any(0 <= turn - end < NEAR for turn in turns)]
    ranked = [*turns[-1:], last, *images[:1], *turns[:1], *images[1:], *turns]
    return [number for number in dict.fromkeys(ranked) if 0 < number <= last]


def intervals(request: Request, start: int, room: int, least: int = CHUNK) -> list[int]:
    """Return at most `room` evenly spaced numbers of tokens, none inside an image.

    Multiples of the distance, so that prompts with the same beginning share them. least: minimum distance.
    """
    end = request.num_prompt_tokens
    inside = {place for span in request.image_spans for place in _multiples(span.start + 1, span.end)}
    places = [place for place in _multiples(start + 1, end) if place not in inside]
    distance = CHUNK
    while places and (len(places) > room or distance < least):
        distance *= 2
        places = [place for place in places if place % distance == 0]
    return places


def _multiples(start: int, end: int) -> range:
    return range(-(-start // CHUNK) * CHUNK, end, CHUNK)

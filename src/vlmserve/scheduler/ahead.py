"""The step after one whose tokens are not known yet."""

from __future__ import annotations

from collections.abc import Sequence

from vlmserve.cache.blocks import BlockPool
from vlmserve.scheduler.request import Request
from vlmserve.steps import CachedRequest, NewRequest


def plan_ahead(
    step: Sequence[tuple[CachedRequest | NewRequest, Request]], pool: BlockPool, block_size: int
) -> list[CachedRequest] | None:
    """One more token for each request of a step that goes on if the step gives it no end token. None: its tokens decide
    on what follows, too few blocks are free, or no request goes on.

    Takes the blocks that the tokens need.
    """
    for scheduled, request in step:
        whole = scheduled.start + scheduled.num_tokens == len(request.token_ids)
        if not whole or _depends_on_tokens(request):
            return None
    going = [request for _, request in step if len(request.token_ids) + 1 < request.max_len]
    growing = [one for one in going if len(one.token_ids) >= len(one.block_table) * block_size]
    if not going or sum(len(one.tables) for one in growing) > pool.num_free:
        return None
    for request in growing:
        request.grow(1, pool)
    return [request.next_token() for request in going]


def _depends_on_tokens(request: Request) -> bool:
    """Whether the next token has to be known to compute the one after it, or asked for as it is computed."""
    params = request.params
    depends = params.grammar is not None or params.penalizes or params.logprobs is not None
    depends = depends or params.no_repeat_ngram_size > 0 or any(len(word) > 1 for word in params.bad_token_ids)
    depends = depends or (params.thinking_token_budget is not None and request.thoughts is not None)
    return depends or request.max_short_len is not None or request.prompt_logprobs is not None

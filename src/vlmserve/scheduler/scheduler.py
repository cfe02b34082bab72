"""Plans each step: which requests run, with how many tokens, which images are encoded, which requests are preempted.

Requests of the same priority are admitted in order of arrival, but a request waits while another one computes its
prefix. Decodes go first; prompts fill the rest of the token budget in order of admission. A long prompt or image leaves
half of a step to much shorter ones. When blocks run out, the request admitted last is preempted. It computes again only
what has left memory, and its answer stays the same.

Requests of lower priority (a larger number) are admitted and get tokens after all others, and are preempted for them.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from vlmserve.cache.blocks import BlockPool
from vlmserve.cache.prefix import PrefixCache
from vlmserve.scheduler.adapters import AdapterScheduler
from vlmserve.scheduler.ahead import plan_ahead
from vlmserve.scheduler.answers import extend_answer
from vlmserve.scheduler.beams import Beams
from vlmserve.scheduler.blocks import Found, RequestBlocks
from vlmserve.scheduler.images import ImageScheduler
from vlmserve.scheduler.priority import enter_first, enter_last
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.searches import Search
from vlmserve.scheduler.shares import reserved
from vlmserve.scheduler.step_limits import StepLimits
from vlmserve.steps import ModelRunnerOutput, SchedulerOutput
from vlmserve.types import EngineOutput

ProposeDrafts = Callable[[Request], Sequence[int]]
"""Proposes draft tokens, ids of the vocabulary, that may follow a request's newest token; none without a proposal."""


class Scheduler:
    """Owns the requests, their `blocks` and their `images`."""

    def __init__(
        self,
        *,
        cache: PrefixCache,
        images: ImageScheduler,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool,
        window: int | None = None,
        adapters: AdapterScheduler | None = None,
    ) -> None:
        """window: of positions that a token attends to in every layer, itself included; None: all. adapters: the slots
        for them; None: no request has one."""
        self.pool: BlockPool = cache.pool
        self.images = images
        self.adapters = adapters
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.propose_drafts: ProposeDrafts | None = None
        self.limits: StepLimits | None = None
        """Limits of each step; None: only `max_num_batched_tokens`."""
        self.num_preemptions = 0
        self.prefix_queried_tokens = 0
        self.prefix_cached_tokens = 0
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.blocks = RequestBlocks(
            cache, block_size, prefix_caching=prefix_caching, window=window, max_chunk=max_num_batched_tokens
        )
        self._requests: dict[str, Request] = {}
        self._searches: dict[str, Search] = {}
        # Finished requests that the runner has not dropped yet.
        self._finished: list[str] = []

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests or request_id in self._searches

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Mapping[str, Request]:
        """The unfinished requests, by their ids."""
        return self._requests

    def needs_adapter(self, digest: bytes) -> bool:
        """Whether an unfinished request has the adapter of that digest."""
        return any(request.adapter == digest for request in self._requests.values())

    def add(self, request: Request, beams: Beams | None = None) -> None:
        """Queue a request whose prompt fits into the pool. beams: what is searched for from its prompt on."""
        if beams is not None:
            self._searches[request.request_id] = Search(request, beams)
        self._requests[request.request_id] = request
        enter_last(self.waiting, request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests and free what they hold; unknown ids are ignored."""
        for request_id in request_ids:
            if (search := self._searches.get(request_id)) is not None:
                self._end_search(search)
            elif (request := self._requests.get(request_id)) is not None:
                self._remove(request)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step and take the blocks that it writes to."""
        step = SchedulerOutput()
        if self.adapters is not None:
            self.adapters.begin_step()
        self._give_way()
        budget = self._schedule_running(step)
        while not step.makes_progress and len(self.running) > 1 and self._is_stuck:
            # Each needs what another one holds: KV blocks, or memory of the encoder cache.
            self._preempt(self.running.pop())
            budget = self._schedule_running(step)
        self._schedule_waiting(step, budget)
        while not step.makes_progress and self.waiting and self._only_beams_run:
            # All that run are beams that wait for others, which need the blocks.
            self._preempt(self.running.pop())
            if self.adapters is not None:
                self.adapters.begin_step()
            self._schedule_waiting(step, budget)
        step.block_copies, step.blocks_to_zero = self.blocks.take_changes()
        if step.has_work:
            self.images.end_step(step)
            step.finished_request_ids, self._finished = self._finished, []
            if self.adapters is not None:
                step.adapter_loads = self.adapters.take_loads()
        return step

    def schedule_ahead(self, step: SchedulerOutput) -> SchedulerOutput | None:
        """Plan what follows on a step whose tokens are not known yet: one more token for each of its requests that ends
        with none but an end token. None: that depends on the tokens, or something else is to be done first.

        An answer that ends with a token of `step` is in the plan in vain: `forget_ended` drops what comes of it.
        """
        if self._searches or self.propose_drafts is not None or step.draft_token_ids:
            return None
        if self.waiting and (len(self.running) < self._max_num_seqs or self._has_to_give_way(self.waiting[0])):
            return None
        pairs = [(one, request) for one in step.requests if (request := self._known(one.request_id)) is not None]
        if len(pairs) != len(self.running):
            return None
        messages = plan_ahead(pairs, self.pool, self._block_size)
        if messages is None:
            return None
        following = SchedulerOutput(cached_requests=messages)
        following.block_copies, following.blocks_to_zero = self.blocks.take_changes()
        following.finished_request_ids, self._finished = self._finished, []
        return following

    def forget_ended(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Drop what concerns requests that ended after the step was planned."""
        ended = {one.request_id for one in step.requests if self._known(one.request_id) is None}
        if ended:
            step.cached_requests = [one for one in step.cached_requests if one.request_id not in ended]
            step.new_requests = [one for one in step.new_requests if one.request_id not in ended]
            for results in (
                output.token_ids, output.logprobs, output.prompt_logprobs, output.failures, output.scalings,
            ):  # fmt: skip
                for request_id in ended:
                    results.pop(request_id, None)

    def _known(self, request_id: str) -> Request | None:
        """An unfinished request that was part of a step. Another one may have the id of one that has ended."""
        request = self._requests.get(request_id)
        return request if request is not None and request.known_to_runner else None

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineOutput]:
        """Apply the output of a step. Finished requests free all they hold.

        Returns one output for each request whose newest token was computed.
        """
        for request_id, logprobs in output.prompt_logprobs.items():
            known = self._requests[request_id].prompt_logprobs
            assert known is not None
            known += logprobs
        for request_id, sums in output.scalings.items():
            if (mixing := self._requests.get(request_id)) is not None:
                mixing.add_scalings(sums)
        outputs = []
        late = output.token_ids.keys() - {scheduled.request_id for scheduled in step.requests}
        for scheduled in step.requests:
            request = self._requests.get(scheduled.request_id)
            if request is None:
                continue  # a beam of a search that has failed
            end = scheduled.start + scheduled.num_tokens
            drafts = step.draft_token_ids.get(request.request_id, ())
            sampled = output.token_ids.get(request.request_id)
            # Accepted drafts are those after which another token was sampled.
            end -= len(drafts) - max(0, len(sampled or ()) - 1)
            if sampled is not None and request.answer_id not in self._searches:
                outputs.append(self._extend(request, output, end))
                continue
            self._set_computed(request, end)
            if sampled is not None:
                outputs += self._extend_search(request, self._searches[request.answer_id], output)
        for request_id in late:
            if (late_request := self._known(request_id)) is not None:
                outputs.append(self._extend(late_request, output, late_request.num_computed))
        return outputs

    def _extend(self, request: Request, output: ModelRunnerOutput, num_computed: int) -> EngineOutput:
        """Append sampled tokens to a request. It may end with them, or become long."""
        length = len(request.token_ids)
        answer = extend_answer(request, output)
        self._set_computed(request, num_computed)
        if answer.finish_reason is not None:
            failure = output.failures.get(request.request_id)
            if failure is not None and failure.kind != "grammar":
                self.blocks.discard_contents(request)
            self._remove(request)
            if failure is not None and failure.kind == "out_of_memory":
                self.images.forget(request)
        elif request.max_short_len is not None and length <= request.max_short_len < len(request.token_ids):
            self._recompute_as_long(request)
        return answer

    def _extend_search(self, request: Request, search: Search, output: ModelRunnerOutput) -> list[EngineOutput]:
        """Enter the choices that follow on a beam. Returns the search's output if it has ended."""
        if request.request_id in output.failures:
            answer = extend_answer(request, output)
            self.blocks.discard_contents(request)
            self._end_search(search)
            return [msgspec.structs.replace(answer, request_id=search.request_id)]
        if not search.enter(request, output.logprobs[request.request_id][0].top):
            return []
        if search.done:
            self._end_search(search)
            return [search.output()]
        for parent, children in search.fork():
            self._fork(parent, children)
        return []

    def _fork(self, parent: Request, children: list[Request]) -> None:
        """Let requests that extend a beam take its place. The first gets its KV blocks, the others share the full ones
        and get a copy of the last one if it is partly filled; those that there is no room for wait."""
        full, filled = divmod(parent.num_computed, self._block_size)
        place = self.running.index(parent) if parent in self.running else None
        for number, child in enumerate(children):
            self._requests[child.request_id] = child
            needs_copy = number > 0 and filled > 0
            is_full = number > 0 and len(self.running) > self._max_num_seqs
            if place is None or is_full or (needs_copy and self.pool.num_free < len(parent.tables)):
                enter_first(self.waiting, child)
                continue
            self.blocks.share(parent, child, full, "copy" if needs_copy else "share" if filled else "none")
            self.images.fork(parent, child)
            if self.adapters is not None:
                self.adapters.acquire(child)
            self.running.insert(place + number, child)
            if child.max_short_len is not None and len(parent.token_ids) <= child.max_short_len < len(child.token_ids):
                self._recompute_as_long(child)
        if place is not None and any(not child.block_table for child in children):
            self.blocks.register_tail(parent, parent.num_computed)
        self._remove(parent)

    def _end_search(self, search: Search) -> None:
        for member in search.members:
            self._remove(member)
        del self._searches[search.request_id]

    @property
    def _is_stuck(self) -> bool:
        """Whether a running request has tokens to compute, as those have that cannot run for want of room."""
        return any(request.num_uncomputed for request in self.running)

    @property
    def _only_beams_run(self) -> bool:
        """True if beams run and nothing else. Other requests without tokens to compute wait for their grammars."""
        return bool(self.running) and all(request.answer_id in self._searches for request in self.running)

    def _set_computed(self, request: Request, num_computed: int) -> None:
        """That many of a request's tokens are in the KV cache now."""
        before = request.num_computed
        if before < request.num_prompt_tokens or request.cross is not None:
            self.images.set_computed(request, before, num_computed)
        if num_computed // self._block_size > before // self._block_size:
            self.blocks.register(request, num_computed)
        request.num_computed = num_computed
        if before < request.num_prompt_tokens <= num_computed:
            self.blocks.register_tail(request, request.num_prompt_tokens - 1)
        self.blocks.free_before_window(request)

    def _schedule_running(self, step: SchedulerOutput) -> int:
        """Chunks for the running requests; returns the budget that is left."""
        self.images.begin_step(self.limits, self.running)
        budget = self._schedule_decodes(step, self._max_num_batched_tokens)
        if self.limits is not None:
            budget = int(min(budget, self.limits.prompt_tokens(shared=len(self._requests) > 1)))
        for request in self.running[:]:  # more are admitted meanwhile
            if request.num_uncomputed > 1 and budget > 0:
                budget = self._schedule_waiting(step, budget, above=request.priority)
                most = budget - self._reserved(request, budget)
                budget -= self._schedule_chunk(step, request, self.blocks.allocate(request, most))
        return budget

    def _reserved(self, request: Request, budget: int) -> int:
        """Return tokens of a prompt's budget to leave to much shorter prompts that came later and may run."""
        if request.num_uncomputed <= budget:
            return 0
        may_run = itertools.islice(self.waiting, max(0, self._max_num_seqs - len(self.running)))
        later = itertools.chain(self.running[self.running.index(request) + 1 :], may_run)
        lengths = [one.num_uncomputed for one in later if one.priority == request.priority and one.num_uncomputed > 1]
        return int(reserved(request.num_uncomputed, lengths, budget))

    def _has_to_give_way(self, waiting: Request) -> bool:
        """Whether something runs that has a lower priority than a request that waits."""
        return bool(self.running) and waiting.priority < self.running[-1].priority

    def _give_way(self) -> None:
        """Preempt requests of lower priority as far as those that wait could run in their place in this step."""
        num_seqs, num_tables, num_blocks, num_tokens = 0, 0, 0, 0
        for request in list(self.waiting):
            if not self._has_to_give_way(request) or num_tokens >= self._max_num_batched_tokens:
                return
            if self.adapters is not None and not self.adapters.may_run(request):
                continue
            found = self.blocks.find(request)
            if self.blocks.is_being_computed(request, found):
                continue
            num_seqs += 1
            num_tables += len(request.tables)
            num_blocks += self.blocks.num_missing(request, found)
            num_tokens += len(request.token_ids) - found.end * self._block_size
            while self._has_to_give_way(request):
                num_growing = self._num_growing + num_tables
                fits = len(self.running) + num_seqs <= self._max_num_seqs
                if fits and num_blocks <= self.pool.num_free - self._num_taken_by_decodes - num_growing:
                    break
                self._preempt(self.running.pop())

    def _schedule_decodes(self, step: SchedulerOutput, budget: int) -> int:
        """Chunks of one token for all that need just one; returns the budget that is left.

        `running` is in order of priority and admission, so the requests preempted here are never ones that are in the
        step already.
        """
        decoding = [request for request in self.running if request.num_uncomputed == 1]
        for index, request in enumerate(decoding):
            if budget == 0:
                break
            if self._has_full_blocks(request):
                while self.pool.num_free < len(request.tables) and request.block_table:
                    self._preempt(self.running.pop())
                if not request.block_table:
                    break  # preempted, and so are all that were admitted later
                request.grow(1, self.pool)
            drafts: Sequence[int] = ()
            if self.propose_drafts is not None and request.answer_id not in self._searches:
                drafts = self._limit_drafts(request, self.propose_drafts(request), budget - (len(decoding) - index))
            if drafts or request.num_computed < request.num_prompt_tokens or request.cross is not None:
                budget -= self._schedule_chunk(step, request, 1, drafts)
            else:
                step.append(request.message(1))
                budget -= 1
        return budget

    def _has_full_blocks(self, request: Request) -> bool:
        """Whether a request needs another block for its next token."""
        return request.num_computed == len(request.tables[0].blocks) * self._block_size

    @property
    def _num_taken_by_decodes(self) -> int:
        """Blocks that running requests will take in this step, before others are admitted."""
        decoding = (request for request in self.running if request.num_uncomputed == 1)
        return sum(len(request.tables) for request in decoding if self._has_full_blocks(request))

    def _limit_drafts(self, request: Request, drafts: Sequence[int], budget: int) -> Sequence[int]:
        """Drafts that can be computed after a request's newest token, in blocks that no other request may need soon.

        An accepted draft is followed by one more token, and neither may go beyond `max_len`. Nor may drafts go beyond
        `max_short_len`, since longer requests are computed differently.
        """
        most = min(budget, request.max_len - len(request.token_ids) - 1)
        if request.num_short_left is not None:
            most = min(most, request.num_short_left)
        drafts = drafts[: max(0, most)]
        end = len(request.token_ids) + len(drafts)
        missing = -(-end // self._block_size) - len(request.block_table)
        if missing > 0:
            spare = (self.pool.num_free - self._num_growing) // len(request.tables)
            request.grow(max(0, min(missing, spare)), self.pool)
        return drafts[: len(request.block_table) * self._block_size - len(request.token_ids)]

    def _schedule_waiting(self, step: SchedulerOutput, budget: int, above: float = math.inf) -> int:
        """Admit waiting requests in order while there are blocks and token budget; returns the budget that is left.

        above: only those of a higher priority.
        """
        deferred: list[Request] = []
        while budget > 0 and self.waiting and len(self.running) < self._max_num_seqs:
            if self.waiting[0].priority >= above:
                break
            request = self.waiting.popleft()
            if self.adapters is not None and not self.adapters.may_run(request):
                deferred.append(request)
                continue
            found = self.blocks.find(request)
            if self.blocks.is_being_computed(request, found):
                deferred.append(request)
                continue
            if not self._admit(request, found):
                self.waiting.appendleft(request)
                break
            budget -= self._schedule_chunk(step, request, budget - self._reserved(request, budget))
        self.waiting.extendleft(reversed(deferred))
        return budget

    @property
    def _num_growing(self) -> int:
        """Blocks that running requests may need soon: one for each table."""
        return sum(len(request.tables) for request in self.running)

    def _admit(self, request: Request, found: Found) -> bool:
        """Move a request to the running ones, with blocks for all tokens that it needs at a time, if there are enough.

        Free blocks are left for running requests, or this one would soon be preempted.
        """
        if not self.blocks.take(request, found, self._num_growing):
            return False
        if request.num_cached is None:
            request.num_cached = request.num_computed
            self.prefix_queried_tokens += request.num_prompt_tokens
            self.prefix_cached_tokens += request.num_cached
        enter_last(self.running, request)
        if self.adapters is not None:
            self.adapters.acquire(request)
        return True

    def _schedule_chunk(self, step: SchedulerOutput, request: Request, budget: int, drafts: Sequence[int] = ()) -> int:
        """A chunk of at most `budget` tokens, cut before the first image that cannot be encoded in this step.

        Bidirectional spans are never cut: where one does not fit, the chunk is cut before it; a chunk that begins with
        one exceeds the budget if need be. A chunk may begin inside a span, after a prefix hit: the cached tokens were
        computed with all of the span. Returns the chunk's number of tokens, drafts included, which may be 0.
        """
        if budget <= 0:
            return 0
        if request.cross is not None and not self.images.schedule_cross_states(step, request, request.cross):
            return 0
        start = request.num_computed
        end = start + min(request.num_uncomputed, budget)
        if start < request.num_prompt_tokens:
            end = self._cut_chunk(step, request, start, end)
        if end == start:
            return 0
        num_tokens = end - start + len(drafts)
        step.append(request.message(num_tokens))
        if drafts:
            step.draft_token_ids[request.request_id] = list(drafts)
        return num_tokens

    def _cut_chunk(self, step: SchedulerOutput, request: Request, start: int, end: int) -> int:
        """Where a chunk of a prompt, ``start <= i < end``, really ends. See `_schedule_chunk`."""
        if (cut := request.bidirectional_span_at(end)) is not None:
            end = cut[0] if cut[0] > start else cut[1]
        for span in request.spans_between(start, end):
            if not self.images.schedule(step, request, span.image):
                cut = request.bidirectional_span_at(span.start)
                return max(start, span.start if cut is None else cut[0])
        return end

    def _release(self, request: Request) -> None:
        self.blocks.release(request)
        self.images.release(request)
        if self.adapters is not None:
            self.adapters.release(request)

    def _preempt(self, request: Request) -> None:
        waits_for_others = request.num_uncomputed == 0 and request.answer_id in self._searches
        if request.num_uncomputed <= 1:
            self.blocks.register_tail(request, request.num_computed)
        self._release(request)
        self.num_preemptions += 1
        if not waits_for_others:
            enter_first(self.waiting, request)

    def _recompute_as_long(self, request: Request) -> None:
        """Compute a request again from its first token on, because it exceeds `max_short_len` now."""
        self._release(request)
        request.reset_block_keys()
        if request in self.running:  # not preempted since its logits were computed
            self.running.remove(request)
            enter_first(self.waiting, request)

    def _remove(self, request: Request) -> None:
        self._release(request)
        del self._requests[request.request_id]
        if request.known_to_runner:
            self._finished.append(request.request_id)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)

"""Plans each step: which requests run, with how many tokens, and which are preempted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from vlmserve.scheduler.ahead import plan_ahead
from vlmserve.scheduler.answers import extend_answer
from vlmserve.scheduler.beams import Beams
from vlmserve.scheduler.branches import Branches
from vlmserve.scheduler.policy import gives_way
from vlmserve.scheduler.queues import Queues
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.resource import Resource, Resources
from vlmserve.scheduler.searches import BeamMembers, Search
from vlmserve.scheduler.step_limits import StepLimits
from vlmserve.steps import ModelRunnerOutput, SchedulerOutput
from vlmserve.tasks import Score
from vlmserve.types import EngineOutput

ProposeDrafts = Callable[[Request], Sequence[int]]
"""Proposes draft tokens after a request's newest token, or none."""


class Scheduler:
    def __init__(self, resources: Sequence[Resource], *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """resources: see `Resources` for their order."""
        self.resources = Resources(resources)
        self._queues = Queues(self.resources, max_num_seqs)
        self.waiting, self.running = self._queues.waiting, self._queues.running
        self.requests: Mapping[str, Request] = self._queues.requests
        self.propose_drafts: ProposeDrafts | None = None
        self.awaits_tokens = True
        """With `propose_drafts`, plan no step ahead."""
        self.limits: StepLimits | None = None
        """Limits of each step, in addition to `max_num_batched_tokens`."""
        self._max_num_batched_tokens = max_num_batched_tokens

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._queues.requests or request_id in self._queues.searches

    def __len__(self) -> int:
        return len(self._queues.requests)

    @property
    def num_preemptions(self) -> int:
        return self._queues.num_preemptions

    def add(self, request: Request, beams: Beams | None = None) -> None:
        """The request must fit alone. beams: the search that starts with its prompt."""
        if beams is not None:
            self._queues.searches[request.request_id] = BeamMembers(request, beams)
        elif isinstance(request.task, Score) and request.task.branches:
            self._queues.searches[request.request_id] = Branches(request, request.task)
        self._queues.add(request)
        self.resources.arrive(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ignores unknown ids."""
        self._queues.abort(request_ids)

    def end_failed(self) -> list[EngineOutput]:
        found = self.resources.failed(self.waiting)
        if not found:
            return []
        failed = {one.request.answer_id: one for one in found}
        self.abort(failed)
        return [EngineOutput(i, [], "error", error=one.reason, error_param=one.param) for i, one in failed.items()]

    def schedule(self) -> SchedulerOutput:
        step = SchedulerOutput()
        self.resources.begin_step(self.running, self.limits)
        self._give_way()
        budget = self._schedule_running(step)
        while not step.makes_progress and len(self.running) > 1 and any(one.num_uncomputed for one in self.running):
            # each request needs what another holds
            self._preempt_and_plan_again()
            budget = self._schedule_running(step)
        self._schedule_waiting(step, budget)
        while not step.makes_progress and self.waiting and self._queues.only_beams_run:
            # only beams run, and wait for beams that need what they hold
            self._preempt_and_plan_again()
            self._schedule_waiting(step, budget)
        self.resources.end_step(step)
        if step.has_work:
            step.finished_request_ids = self._queues.take_finished()
        return step

    def schedule_ahead(self, step: SchedulerOutput) -> SchedulerOutput | None:
        """Plan one more token for each request, before the step's tokens are known.

        None: other work comes first, or see `ahead.plan_ahead`.
        """
        if self._queues.searches or step.draft_token_ids:
            return None
        if self.propose_drafts is not None and self.awaits_tokens:
            return None
        has_place = len(self.running) < self._queues.max_num_seqs
        if self.waiting and (has_place or gives_way(self.running, self.waiting[0])):
            return None
        known = self._queues.known_to_runner
        pairs = [(one, request) for one in step.requests if (request := known(one.request_id)) is not None]
        messages = plan_ahead(pairs, self.resources) if len(pairs) == len(self.running) else None
        if messages is None:
            return None
        following = SchedulerOutput(cached_requests=messages)
        self.resources.end_step(following)
        following.finished_request_ids = self._queues.take_finished()
        return following

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineOutput]:
        """Returns an output for each request with a new token."""
        requests, searches = self._queues.requests, self._queues.searches
        for request_id, logprobs in output.prompt_logprobs.items():
            known = requests[request_id].prompt_logprobs
            assert known is not None
            known += logprobs
        for request_id, sums in output.scalings.items():
            if (mixing := requests.get(request_id)) is not None:
                mixing.add_scalings(sums)
        outputs = []
        late = set(output.token_ids)
        for scheduled in step.requests:
            late.discard(scheduled.request_id)
            request = requests.get(scheduled.request_id)
            if request is None:
                continue  # beam of a failed search
            if request.request_id in output.undone:
                self._queues.undo(request)
                continue
            end = scheduled.start + scheduled.num_tokens
            drafts = step.draft_token_ids.get(request.request_id, ())
            sampled = output.token_ids.get(request.request_id)
            # accepted if another token was sampled after it
            end -= len(drafts) - max(0, len(sampled or ()) - 1)
            if sampled is not None and request.answer_id not in searches:
                outputs.append(self._extend(request, output, end))
                continue
            if request.request_id not in output.failures:
                self.resources.advance(request, end)
            if sampled is not None:
                outputs += self._extend_search(request, searches[request.answer_id], output)
        for request_id in late:
            if (late_request := self._queues.known_to_runner(request_id)) is not None:
                outputs.append(self._extend(late_request, output, late_request.num_computed))
        return outputs

    def _extend(self, request: Request, output: ModelRunnerOutput, num_computed: int) -> EngineOutput:
        length = len(request.token_ids)
        answer = extend_answer(request, output)
        failure = output.failures.get(request.request_id)
        if failure is None:
            self.resources.advance(request, num_computed)
        if answer.finish_reason is not None:
            self.resources.discard(request, failure)
            self._queues.remove(request)
        elif request.max_short_len is not None:
            self._queues.recompute_if_long(request, length)
        return answer

    def _extend_search(self, request: Request, search: Search, output: ModelRunnerOutput) -> list[EngineOutput]:
        if request.request_id in output.failures:
            answer = extend_answer(request, output)
            for member in search.members:
                self.resources.discard(member, output.failures.get(member.request_id))
            self._queues.end_search(search)
            return [msgspec.structs.replace(answer, request_id=search.request_id)]
        if not search.enter(request, output):
            if request not in search.members:
                self._queues.remove(request)
            return []
        if search.done:
            self._queues.end_search(search)
            return [search.output()]
        for parent, children in search.fork():
            self._queues.fork(parent, children)
        return []

    def _preempt_and_plan_again(self) -> None:
        self._queues.preempt()
        self.resources.begin_step(self.running, self.limits)

    def _give_way(self) -> None:
        """Preempt lower priorities if waiting requests could run in their place."""
        if not self.waiting or not gives_way(self.running, self.waiting[0]):
            return
        wanted: list[int] = []
        num_seqs = num_tokens = 0
        preemptions = self.num_preemptions
        for request in list(self.waiting):
            if not gives_way(self.running, request) or num_tokens >= self._max_num_batched_tokens:
                break
            if not self.resources.ready(request):
                continue
            missing = self.resources.missing(request)
            wanted = [a + b for a, b in zip(wanted, missing, strict=True)] if wanted else missing
            num_seqs += 1
            num_tokens += len(request.token_ids) - self.resources.num_found(request)
            while gives_way(self.running, request):
                has_place = len(self.running) + num_seqs <= self._queues.max_num_seqs
                if has_place and self.resources.have_room(wanted, self.running):
                    break
                self._queues.preempt()
        if self.num_preemptions > preemptions:
            self.resources.begin_step(self.running, self.limits)

    def _schedule_running(self, step: SchedulerOutput) -> int:
        """Schedule decodes, then prompt chunks. Returns the remaining token budget.

        Before each chunk, it admits waiting requests of a higher priority.
        """
        budget = self._schedule_decodes(step, self._max_num_batched_tokens)
        if self.limits is not None:
            generating = budget < self._max_num_batched_tokens
            most = self.limits.prompt_tokens(shared=len(self.requests) > 1, generating=generating)
            budget = int(min(budget, most))
        for request in self.running[:]:  # more are admitted meanwhile
            if request.num_uncomputed > 1 and budget > 0:
                budget = self._schedule_waiting(step, budget, above=request.priority)
                wanted = min(self._queues.chunk_budget(request, budget), request.num_uncomputed)
                budget -= self._schedule_chunk(step, request, self.resources.grow(request, wanted))
        return budget

    def _schedule_decodes(self, step: SchedulerOutput, budget: int) -> int:
        """Return the remaining budget. Preempted requests come later in `running`, so they are not in the step yet."""
        grow = self.resources.grow_decode
        decoding = [request for request in self.running if request.num_uncomputed == 1]
        for index, request in enumerate(decoding):
            if budget == 0:
                break
            while not grow(request, 1):
                victim = self._queues.preempt()
                if victim is decoding[-1]:
                    decoding.pop()
                if victim is request:
                    return budget
            drafts: Sequence[int] = ()
            if self.propose_drafts is not None and request.answer_id not in self._queues.searches:
                drafts = self._limit_drafts(request, self.propose_drafts(request), budget - (len(decoding) - index))
            if drafts or request.num_computed < request.num_limited:
                budget -= self._schedule_chunk(step, request, 1, drafts)
            else:
                step.append(request.message(1))
                budget -= 1
        return budget

    def _limit_drafts(self, request: Request, drafts: Sequence[int], budget: int, count: int = 1) -> Sequence[int]:
        """Keep the drafts that fit without taking what other requests may need soon.

        count: tokens computed before the drafts. The token after them must not exceed `max_len`. Drafts must not exceed
        `max_short_len`, where RoPE frequencies change.
        """
        most = min(budget, request.max_len - len(request.token_ids) - 1)
        if request.num_short_left is not None:
            most = min(most, request.num_short_left)
        drafts = drafts[: max(0, most)]
        return drafts[: self.resources.grow(request, count + len(drafts), spare=self.running) - count] if drafts else ()

    def _search_drafts(self, request: Request, budget: int, count: int) -> Sequence[int]:
        """All drafts or none."""
        search = self._queues.searches.get(request.request_id)
        if search is None or not (drafts := search.drafts):
            return ()
        limited = self._limit_drafts(request, drafts, budget, count)
        return limited if len(limited) == len(drafts) else ()

    def _schedule_waiting(self, step: SchedulerOutput, budget: int, above: float = math.inf) -> int:
        """Return the remaining budget. above: only higher priorities."""
        deferred: list[Request] = []
        while budget > 0 and self.waiting and len(self.running) < self._queues.max_num_seqs:
            if self.waiting[0].priority >= above:
                break
            request = self.waiting.popleft()
            if not self.resources.ready(request):
                deferred.append(request)
            elif self._queues.admit(request):
                budget -= self._schedule_chunk(step, request, self._queues.chunk_budget(request, budget))
            else:
                self.waiting.appendleft(request)
                break
        self.waiting.extendleft(reversed(deferred))
        return budget

    def _schedule_chunk(self, step: SchedulerOutput, request: Request, budget: int, drafts: Sequence[int] = ()) -> int:
        """Return the scheduled tokens, possibly 0."""
        start = request.num_computed
        end = start + min(request.num_uncomputed, budget)
        if start < end and start < request.num_limited:
            end = self.resources.cut(step, request, start, end)
        if end <= start:
            return 0
        if end == len(request.token_ids) and not drafts:
            drafts = self._search_drafts(request, budget - (end - start), end - start)
        num_tokens = end - start + len(drafts)
        step.append(request.message(num_tokens, len(drafts)))
        if drafts:
            step.draft_token_ids[request.request_id] = list(drafts)
        return num_tokens

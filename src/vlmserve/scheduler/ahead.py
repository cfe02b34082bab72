"""Plans a step before the tokens of the previous step are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.resource import Resources
from vlmserve.steps import CachedRequest, ModelRunnerOutput, NewRequest, SchedulerOutput
from vlmserve.tasks import GENERATE


def plan_ahead(
    step: Sequence[tuple[CachedRequest | NewRequest, Request]], resources: Resources
) -> list[CachedRequest] | None:
    """Plan one more token for each request, in case the step does not end it.

    None: the next step depends on the step's tokens, lacks room, or no request continues.
    """
    for scheduled, request in step:
        whole = scheduled.start + scheduled.num_tokens == len(request.token_ids)
        if not whole or not continues_on_device(request):
            return None
    following = [(one, one.num_uncomputed + 1) for _, one in step if len(one.token_ids) + 1 < one.max_len]
    if not following or not resources.may_plan_ahead(following):
        return None
    for request, num_tokens in following:
        resources.grow(request, num_tokens)
    return [request.next_token() for request, _ in following]


def continues_on_device(request: Request) -> bool:
    """The second token must not depend on the host's reading of the first."""
    if request.params.reads_tokens or request.params.needs_host:
        return False
    if request.task != GENERATE:
        return False
    return request.max_short_len is None and request.prompt_logprobs is None


def forget_ended(requests: Mapping[str, Request], step: SchedulerOutput, output: ModelRunnerOutput) -> set[str]:
    """Drop ended and undone requests from a planned step. Returns the failed ones.

    requests: the unfinished requests.
    """
    ended = set()
    for one in step.requests:
        request = requests.get(one.request_id)
        # an ended request's id, or lost state
        if request is None or not request.known_to_runner or not request.tables:
            ended.add(one.request_id)
    failed = ended & {*output.failures, *output.undone}
    if ended:
        step.cached_requests = [one for one in step.cached_requests if one.request_id not in ended]
        step.new_requests = [one for one in step.new_requests if one.request_id not in ended]
        for results in (
            output.token_ids, output.logprobs, output.prompt_logprobs, output.failures, output.scalings, output.results
        ):  # fmt: skip
            for request_id in ended:
                results.pop(request_id, None)
        output.undone = [request_id for request_id in output.undone if request_id not in ended]
    return failed

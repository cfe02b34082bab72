"""A scheduler without a model: tokens are made up, so that only its bookkeeping is on trial."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np

from vlmserve.cache.blocks import BlockPool
from vlmserve.cache.encoder import EncoderCache
from vlmserve.cache.keys import root_key
from vlmserve.cache.prefix import PrefixCache
from vlmserve.cache.states import StatePool
from vlmserve.runner.requests import RequestStates
from vlmserve.scheduler.beams import Beams
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.images import Images
from vlmserve.scheduler.resources.memory import KVMemory
from vlmserve.scheduler.resources.resource import Resource
from vlmserve.scheduler.resources.states import StateMemory, StatePlaces
from vlmserve.scheduler.scheduler import Scheduler
from vlmserve.steps import ModelRunnerOutput, SchedulerOutput
from vlmserve.types import (
    BeamSearch,
    CrossInput,
    EngineOutput,
    EngineRequest,
    ImageInput,
    ImageSpan,
    Prompt,
    SamplingParams,
    TokenLogprobs,
)

BLOCK = 4
END = 999


def image(number: int, num_tokens: int) -> ImageInput:
    return ImageInput(bytes([number]) * 32, np.zeros((1, 3, 2, 2), np.float32), num_tokens)


def cross_input(number: int, num_tokens: int, text: int = 0) -> CrossInput:
    return CrossInput(image(number, num_tokens), [5] * text)


def request(
    name, length, *, token=1, salt="", max_tokens=3, capacity=10_000, images=(), cross=None, bidirectional=None,
    max_short_len=None, priority=0, mixed=False, thoughts=None, **params,
) -> Request:  # fmt: skip
    """mixed: it has an X-LoRA adapter, whose scaling pass is one of the base model."""
    spans = tuple(ImageSpan(one, start) for one, start in images)
    prompt = Prompt([token] * length, spans, cross, thoughts)
    return Request(
        EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens, **params), priority=priority),
        root_key=root_key(b"", adapter=b"mixed" * mixed, salt=salt),
        scaling_root=root_key(b"", salt=salt) if mixed else None,
        seed=0,
        max_len=capacity,
        end_token_ids=frozenset({END}),
        max_short_len=max_short_len,
        bidirectional=bidirectional,
    )


class TestedScheduler(Scheduler):
    """A scheduler whose resources tests look at."""

    __test__ = False

    def __init__(self, memory: KVMemory, images: Images, *others: Resource, seqs: int, budget: int) -> None:
        super().__init__((images, *others, memory), max_num_seqs=seqs, max_num_batched_tokens=budget)
        self.memory, self.images, self.pool = memory, images, memory.pool


def scheduler(
    num_blocks=100, budget=64, seqs=16, encoder_bytes=1000, max_encoded_images=4, prefix_caching=False,
    host_blocks=0, windows=(None,), others=(), states=0, host_states=0, draft_places=0,
) -> TestedScheduler:  # fmt: skip
    """states: slots of states; 0: the model has none. host_states: slots in host memory. draft_places: with states."""
    cache = PrefixCache(BlockPool(num_blocks), BlockPool(host_blocks) if host_blocks else None)
    images = Images(
        EncoderCache(encoder_bytes),
        max_encoded_images=max_encoded_images,
        image_token_bytes=1,
        state_bytes=1,
        macs=lambda image: 10 * image.num_embeddings,
    )
    options = {"prefix_caching": prefix_caching, "max_chunk": budget, "windows": windows}
    memory = KVMemory(cache, BLOCK, **options)
    if states:
        pool = StatePool(states, host_states)
        memory = StateMemory(cache, BLOCK, states=pool, draft_places=draft_places, **options)
        others = (*others, StatePlaces(memory))
    return TestedScheduler(memory, images, *others, seqs=seqs, budget=budget)


class FixedLimits:
    """`StepLimits` without a clock. macs: of the tower while requests generate; others: while none does."""

    def __init__(self, macs: float = math.inf, *, others: float = math.inf, tokens: float = math.inf) -> None:
        self.macs, self.others, self.tokens = macs, others, tokens
        self.asked: list[int] = []
        self.generating: list[bool] = []

    def tower_macs(self, num_waiting: int, *, generating: bool) -> float:
        """See `StepLimits.tower_macs`. Notes `num_waiting` of steps in which requests generate."""
        if generating:
            self.asked.append(num_waiting)
        return self.macs if generating else self.others

    def prompt_tokens(self, *, shared: bool, generating: bool) -> float:
        """See `StepLimits.prompt_tokens`. Notes `generating` of steps with several requests."""
        if shared:
            self.generating.append(generating)
        return self.tokens if shared else math.inf


def request_states(*, bidirectional=None, max_short_len=None) -> RequestStates:
    """What a runner keeps of requests, for a model without grammars."""
    model = SimpleNamespace(
        bidirectional=bidirectional, max_short_len=max_short_len, first_position=lambda prompt_len: 0, vocab_size=100,
        grid_positions=True,
    )  # fmt: skip
    return RequestStates(model, make_matcher=lambda grammar, client: 1 / 0)


def sampled(scheduler: Scheduler, step: SchedulerOutput, token: int) -> ModelRunnerOutput:
    """What a runner would answer that samples the same token everywhere, and accepts drafts of it."""
    output = ModelRunnerOutput()
    for scheduled in step.requests:
        drafts = step.draft_token_ids.get(scheduled.request_id, [])
        known = len(scheduler.requests[scheduled.request_id].token_ids)
        if scheduled.start + scheduled.num_tokens - len(drafts) == known:
            accepted = next((place for place, draft in enumerate(drafts) if draft != token), len(drafts))
            output.token_ids[scheduled.request_id] = [token] * (accepted + 1)
    return output


def extend(s: Scheduler, step: SchedulerOutput) -> list[EngineOutput]:
    """Update with made up tokens; a beam has as many choices as it asks for."""
    output = sampled(s, step, 7)
    for name in output.token_ids:
        asked = s.requests[name].params.logprobs
        if asked is not None:
            top = tuple((7 + place, -0.1 * (1 + place)) for place in range(asked))
            output.logprobs[name] = [TokenLogprobs(7, -0.1, 1, top)]
    return s.update(step, output)


def add_search(s: Scheduler, name: str, length: int, width: int, max_tokens: int, **params) -> None:
    beams = Beams(BeamSearch(width), frozenset(), max_tokens)
    s.add(request(name, length, max_tokens=None, capacity=80, logprobs=beams.num_choices, **params), beams)


def run(scheduler: Scheduler, token: int = 7) -> tuple[SchedulerOutput, list[EngineOutput]]:
    step = scheduler.schedule()
    return step, scheduler.update(step, sampled(scheduler, step, token))


def plan(step: SchedulerOutput) -> list[tuple[str, int]]:
    """The batch, decodes first."""
    batch = sorted(step.requests, key=lambda scheduled: scheduled.num_tokens != 1)
    return [(scheduled.request_id, scheduled.num_tokens) for scheduled in batch]


def finish(s: Scheduler) -> list[EngineOutput]:
    outputs = []
    while len(s):
        outputs += run(s)[1]
    return outputs

"""A scheduler without a model: tokens are made up, so that only its bookkeeping is on trial."""

from __future__ import annotations

import numpy as np

from vlmserve.cache.blocks import BlockPool
from vlmserve.cache.encoder import EncoderCache
from vlmserve.cache.keys import root_key
from vlmserve.cache.prefix import PrefixCache
from vlmserve.scheduler.scheduler import Scheduler, Step
from vlmserve.scheduler.sequence import Sequence
from vlmserve.types import CrossInput, EngineOutput, EngineRequest, ImageInput, ImageSpan, Prompt, SamplingParams

BLOCK = 4
END = 999


def image(number: int, num_tokens: int) -> ImageInput:
    return ImageInput(bytes([number]) * 32, np.zeros((1, 3, 2, 2), np.float32), num_tokens)


def looking(number: int, num_tokens: int, text: int = 0) -> CrossInput:
    return CrossInput(image(number, num_tokens), [5] * text)


def sequence(
    name, length, *, token=1, salt="", max_tokens=3, capacity=10_000, images=(), cross=None, sees_ahead=None,
    **params,
) -> Sequence:  # fmt: skip
    spans = tuple(ImageSpan(picture, start) for picture, start in images)
    prompt = Prompt([token] * length, spans, cross)
    request = EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens, **params))
    return Sequence(
        request,
        root_key=root_key(b"", salt=salt),
        seed=0,
        max_len=capacity,
        end_token_ids=frozenset({END}),
        sees_ahead=sees_ahead,
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
        state_bytes=1,
    )


def run(scheduler: Scheduler, token: int = 7) -> tuple[Step, list[EngineOutput]]:
    step = scheduler.schedule()
    return step, scheduler.update(step, [token for chunk in step.chunks if chunk.samples])


def plan(step: Step) -> list[tuple[str, int]]:
    return [(chunk.sequence.request_id, chunk.num_tokens) for chunk in step.chunks]


def finish(s: Scheduler) -> list[EngineOutput]:
    outputs = []
    while len(s):
        outputs += run(s)[1]
    return outputs

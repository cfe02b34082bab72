"""Runs steps at start, so that no request waits for compilation and capture."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec
import numpy as np

from vlmserve.layer_specs import PADDING_SLOT
from vlmserve.logs import log_format_in_use
from vlmserve.models.protocols import LoadedModel
from vlmserve.runner.adapters import NO_CHANGES, NO_MIXTURE
from vlmserve.runner.memory import run_longest_step
from vlmserve.runner.runner import ModelRunner
from vlmserve.steps import CachedRequest, NewRequest, SchedulerOutput, StateStep
from vlmserve.types import ImagePlacement, SamplingParams

logger = logging.getLogger(__name__)

PROMPT_ROWS = (8, 16, 32, 64, 128, 192, 512, 1024, 2048, 8192)
"""Rows of chunks with different kernels or tilings: Triton up to 128, the library above. MoE kernels change tiles at 32
rows per expert."""
FIRST_ROWS = (2, 1)
"""Rows of prompts if nothing is captured. They touch all weights except most experts, and start the threads. More rows
would only take longer."""
MIXED_ROWS = 512
"""Maximum rows of warm-up steps that mix decodes and chunks."""
_LEAST_ROWS_BESIDE = 3
"""A decode and a chunk of two rows. A chunk of one row would be a decode."""
SCALED_ROWS = 128
"""Maximum rows of X-LoRA chunks. Larger chunks use the same scaling kernels."""
_IMAGE = b"warm-up"
ROWS_OF_DRAFTS = (1, 2, 4, 8, 16, 32)
PREDICTED = 4
"""Drafts of the model's own layer whose time is measured."""
ROWS_OF_LAYER = 32
ROUNDS_OF_DRAFTS = 3
_SECONDS_OF_DRAFTS = 1.0
"""No round of measurements begins after this time, and only the fewest sizes are measured."""
_FEWEST_SIZES = 3
"""Numbers of rows that give a slope: costs of more rows are extrapolated."""
_STEPS_AHEAD = 8
"""Steps that `time_ahead` measures in a row."""
_PROGRESS_SECONDS = 5.0
_STEPS_OF_DECODES = 2
_GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
_CHANGING = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logit_bias={0: 1.0}, repetition_penalty=2.0)


def warm_up_steps(
    runner: ModelRunner, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, seconds: float
) -> None:
    """Run each kind of step and capture decode batches of each size, for at most `seconds`.

    Steps only write to the padding block. Devices without graphs run `FIRST_ROWS`. Skips several ranks, which would
    have to capture together, and models with cross-attention, which need an image.
    """
    if not seconds or runner.model.ranks is not None or runner.model.cross is not None:
        return
    most = min(max_num_batched_tokens, max_model_len - 1)
    sizes = runner.model.device.decode_sizes(max_num_seqs)
    if not sizes:
        for rows in FIRST_ROWS:
            if rows <= most:
                _prefill(runner, rows)
        return
    started = time.monotonic()
    logger.info("warm-up: compiling kernels and capturing graphs of %d batch sizes, up to %g s", len(sizes), seconds)
    run_longest_step(
        runner.model,
        num_tokens=max_num_batched_tokens,
        num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=runner.block_size,
        passes=2 if runner.takes_adapters else 1,
    )
    # The largest graph first, because others reuse its memory; then small batches, which requests need first.
    steps: list[Callable[[], None]] = [
        partial(_decode, runner, size, max_model_len, adapter)
        for adapter in ((b"", NO_CHANGES) if runner.takes_adapters else (b"",))
        for size in (sizes[0], *sizes[:0:-1])
    ]
    steps += _prompts(runner, most, max_model_len)
    steps += [partial(_encode, runner, tiles) for tiles in runner.tiles_to_capture()]
    done = 0
    with _progress(len(steps)) as show:
        for done, step in enumerate(steps, 1):
            step()
            show(done)
            if time.monotonic() - started > seconds:
                break
    taken = time.monotonic() - started
    logger.info("warm-up: ran %d of %d steps in %.1f s", done, len(steps), taken)
    if done < len(steps):
        logger.warning(
            "warm-up: ended before all steps ran, so some requests wait for kernels, and some batches have no graph; "
            "--max-warm-up-seconds gives it more time"
        )


def _prompts(runner: ModelRunner, most: int, max_model_len: int) -> list[Callable[[], None]]:
    """Return steps with chunks of up to `most` rows, one for each kind of kernel."""
    sizes = sorted({min(rows, most) for rows in PROMPT_ROWS})
    steps: list[Callable[[], None]] = []
    for rows in sizes:
        steps.append(partial(_prefill, runner, rows))
        if _LEAST_ROWS_BESIDE <= rows <= MIXED_ROWS:
            steps.append(partial(_prefill, runner, rows, beside=(0,)))
    few = sizes[0]
    long = max_model_len - few - 1
    if few >= _LEAST_ROWS_BESIDE and long > 0:
        steps += [partial(_prefill, runner, few, start=long, beside=beside) for beside in ((), (0,), (long,))]
        if _has_kernels_of_images(runner.model):
            of_image = partial(_prefill, runner, shows_image=True)
            steps += [partial(of_image, few, start=start, beside=one) for start in (0, long) for one in ((), (0,))]
            # one row runs as a decode, at another column of its image
            steps.append(partial(of_image, 1, start=2))
    if runner.takes_adapters:
        steps += [partial(_prefill, runner, rows, adapter=NO_CHANGES) for rows in sizes]
        steps += [partial(_prefill, runner, rows, adapter=NO_MIXTURE) for rows in sizes if rows <= SCALED_ROWS]
    return [*steps, partial(_prefill, runner, 1, params=_CHANGING)]


def _has_kernels_of_images(model: LoadedModel) -> bool:
    decoder = model.language_model
    return decoder.grid_positions or decoder.bidirectional in ("images", "prefix")


def time_rows(runner: ModelRunner, max_rows: int) -> list[tuple[int, float]]:
    """Measure steps that verify drafts. Returns ascending rows, and seconds."""
    sizes = [rows for rows in ROWS_OF_DRAFTS if rows < max_rows]
    return _fastest(runner, sizes, _check_drafts)


def time_ahead(runner: ModelRunner, max_num_seqs: int) -> list[tuple[int, float]]:
    """Measure decodes that are submitted before the step before them ends. Returns ascending numbers, and seconds."""
    return _fastest(runner, [size for size in ROWS_OF_DRAFTS if size <= max_num_seqs], _decode_ahead)


def _fastest(
    runner: ModelRunner, sizes: Sequence[int], measure: Callable[[ModelRunner, int], float], fewest: int = _FEWEST_SIZES
) -> list[tuple[int, float]]:
    """fewest: sizes that are measured, however long a step takes."""
    if runner.model.device.draw_later is not None:
        for size in sizes:
            measure(runner, size)  # compiles kernels
    fastest: dict[int, float] = {}
    started = time.perf_counter()
    for number in range(ROUNDS_OF_DRAFTS):
        if number and time.perf_counter() - started > _SECONDS_OF_DRAFTS:
            break
        for size in sizes:
            if len(fastest) >= fewest and sum(fastest.values()) > _SECONDS_OF_DRAFTS:
                break
            seconds = measure(runner, size)
            fastest[size] = min(seconds, fastest.get(size, seconds))
    return sorted(fastest.items())


def _decode_ahead(runner: ModelRunner, size: int) -> float:
    requests = [_request(runner, number, 1, max_tokens=_STEPS_AHEAD + 3) for number in range(size)]
    running, started = runner.submit(SchedulerOutput(new_requests=requests)), 0.0
    for start in range(1, _STEPS_AHEAD + 2):
        cached = [CachedRequest(request.request_id, start, 1) for request in requests]
        following = runner.submit(SchedulerOutput(cached_requests=cached))
        running.result()
        started, running = started or time.perf_counter(), following
    running.result()
    seconds = (time.perf_counter() - started) / (_STEPS_AHEAD + 1)
    _finish(runner, requests)
    return seconds


def time_layer(runner: ModelRunner) -> list[tuple[int, float]]:
    """Measure steps with and without the model's own layer, interleaved. Returns the numbers 0 to 4, and seconds.

    0, 1, 2: a decode without the layer, with it, and with `PREDICTED` drafts of it. 3, 4: a prompt of `ROWS_OF_LAYER`
    rows without the layer and with it. An assistant reads no prompts: 0 to 2.
    """
    steps: list[Callable[[], float]] = [partial(_check_drafts, runner, 1, count) for count in (None, 0, PREDICTED)]
    if runner.model.assistant is None:
        steps += [partial(_read_prompt, runner, through_layer=through_layer) for through_layer in (False, True)]
    return _fastest(runner, range(len(steps)), lambda _, number: steps[number](), fewest=len(steps))


def _read_prompt(runner: ModelRunner, *, through_layer: bool) -> float:
    request = _request(runner, 0, ROWS_OF_LAYER)
    predicted = {request.request_id: 0} if through_layer else {}
    started = time.perf_counter()
    runner.submit(SchedulerOutput(new_requests=[request], num_predicted=predicted)).result()
    seconds = time.perf_counter() - started
    _finish(runner, [request])
    return seconds


def _check_drafts(runner: ModelRunner, rows: int, num_predicted: int | None = None) -> float:
    """num_predicted: drafts of the model's own layer. None: it does not run."""
    request = _request(runner, 0, 1, max_tokens=rows + (num_predicted or 0))
    request = msgspec.structs.replace(request, num_tokens=rows, max_len=rows + 1)
    drafts = {request.request_id: [0] * (rows - 1)} if rows > 1 else {}
    if runner.model.language_model.state_specs:
        # as if all drafts of the last step had been right
        state = StateStep(PADDING_SLOT, PADDING_SLOT, num_accepted=rows - 1)
        request = msgspec.structs.replace(request, states=(state,))
    started = time.perf_counter()
    predicted = {} if num_predicted is None else {request.request_id: num_predicted}
    step = SchedulerOutput(new_requests=[request], draft_token_ids=drafts, num_predicted=predicted)
    runner.submit(step).result()
    seconds = time.perf_counter() - started
    _finish(runner, [request])
    return seconds


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, else a line every few seconds."""
    if sys.stderr.isatty() and log_format_in_use() != "json":
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("warm-up", total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    started = reported = time.monotonic()

    def report(done: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if now - reported > _PROGRESS_SECONDS:
            reported = now
            logger.info("warm-up: %d of %d steps in %.0f s", done, total, now - started)

    yield report


def _encode(runner: ModelRunner, tiles: int) -> None:
    with runner.model.device.capturing("first"):
        runner.encode_tiles(tiles)


def _decode(runner: ModelRunner, size: int, max_model_len: int, adapter: bytes) -> None:
    """Capture a batch of `size` decodes, and submit the next step before it ends, as the engine does.

    Also runs one context of the maximum length, because split-KV launches other kernels.
    """
    for longest in (1, max(1, max_model_len - _STEPS_OF_DECODES)):
        # upload buffers must grow before captures
        requests = [_request(runner, 0, 1, start=longest - 1, max_tokens=max_model_len, adapter=adapter)]
        requests += [_request(runner, number, 1, adapter=adapter) for number in range(1, size)]
        with runner.model.device.capturing("first"):
            first = runner.submit(SchedulerOutput(new_requests=requests))
            following = [CachedRequest(request.request_id, request.start + 1, 1) for request in requests]
            second = runner.submit(SchedulerOutput(cached_requests=following))
            first.result()
            second.result()
        _finish(runner, requests)


def _prefill(
    runner: ModelRunner,
    rows: int,
    *,
    start: int = 0,
    beside: Sequence[int] = (),
    adapter: bytes = b"",
    params: SamplingParams = _GREEDY,
    shows_image: bool = False,
) -> None:
    """Run a decode for each context length in `beside`, and a chunk after `start` tokens, `rows` rows in total.

    shows_image: the chunk's rows are of one image.
    """
    requests = [_request(runner, number, 1, start=context) for number, context in enumerate(beside)]
    count = rows - len(beside)
    chunk = _request(runner, len(beside), count, start=start, adapter=adapter, params=params)
    step = SchedulerOutput(new_requests=requests)
    if shows_image:
        first = max(0, start - 1)
        shown = start + count - first
        image = ImagePlacement(_IMAGE, first, shown, grid=(1, 1, shown))
        chunk = msgspec.structs.replace(chunk, images=(image,))
        size = shown * runner.model.language_model.image_width * runner.model.dtype.itemsize
        step.embeddings_to_place[_IMAGE] = np.zeros(size, np.uint8)
    requests.append(chunk)
    with runner.model.device.capturing("never"), runner.reserving_adapters():
        runner.submit(step).result()
    _finish(runner, requests, [_IMAGE] if shows_image else [])


def _finish(runner: ModelRunner, requests: list[NewRequest], images: Sequence[bytes] = ()) -> None:
    finished = [request.request_id for request in requests]
    runner.submit(SchedulerOutput(finished_request_ids=finished, embeddings_to_evict=[*images])).result()


def _request(
    runner: ModelRunner,
    number: int,
    num_tokens: int,
    *,
    start: int = 0,
    max_tokens: int = 1,
    adapter: bytes = b"",
    params: SamplingParams = _GREEDY,
) -> NewRequest:
    """Return a request that only uses the padding block, or block 0, which is free at start.

    num_tokens: after `start` earlier tokens. max_tokens: capacity of the block table.
    """
    block = runner.padding_block if runner.model.device.padding_blocks else 0
    length = start + num_tokens
    blocks = -(-max(max_tokens, length + 1) // runner.block_size)
    return NewRequest(
        request_id=f"warm-up {number}",
        start=start,
        num_tokens=num_tokens,
        num_prompt_tokens=length,
        token_ids=[0] * length,
        block_ids=[[block] * blocks] * runner.num_columns * (2 if adapter == NO_MIXTURE else 1),
        params=params,
        seed=0,
        max_len=length + 2,
        end_token_ids=[],
        adapter=adapter,
    )

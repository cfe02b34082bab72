"""Log probabilities of whole continuations against transformers' log softmax: alone, batched, chunked, cached."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

import vlmserve.engine.ranks
from tests.engine.kinds import by_kernels
from tests.engine.test_embeddings import SETTINGS, assert_close, run
from tests.engine.test_parity import Oracle, engine_for, llava_oracle, tight_cache
from tests.ranks import RankThreads
from vlmserve.engine.engine import Engine
from vlmserve.errors import InvalidRequestError
from vlmserve.runner.heads import continuations
from vlmserve.tasks import ScoreContinuation
from vlmserve.types import EngineOutput, EngineRequest, Prompt

pytestmark = pytest.mark.usefixtures("native_kernels")

CONTENTS = [(5, "image", 9), ("image", 3), (1,), ("image", 2, "image"), (33,)]
TAILS = [[7], [7, 9], [7, 9, 4, 4, 8, 20, 3], [12] * 19]
"""Each of the first three begins the next one."""


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> Oracle:
    return llava_oracle(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def contents(llava) -> list[Prompt]:
    return [llava.prompt(seed, *parts) for seed, parts in enumerate(CONTENTS)]


@pytest.fixture(scope="module")
def expected(llava, contents) -> list[np.ndarray]:
    """What transformers has for each content with each tail, content by content."""
    with torch.inference_mode():
        return [
            llava.forward(content, tail[:-1]).log_softmax(-1)[range(len(tail)), tail].numpy()
            for content in contents
            for tail in TAILS
        ]


def continued(contents: list[Prompt]) -> list[tuple[Prompt, ScoreContinuation]]:
    return [
        (Prompt([*content.token_ids, *tail], content.images), ScoreContinuation(len(content.token_ids)))
        for content in contents
        for tail in TAILS
    ]


def score(engine: Engine, contents: list[Prompt]) -> list[EngineOutput]:
    """One output for each content with each tail, in one batch."""
    for number, (prompt, task) in enumerate(continued(contents)):
        engine.add(EngineRequest(str(number), prompt, task=task))
    outputs: dict[str, EngineOutput] = {}
    while engine.has_work():
        outputs |= {output.request_id: output for output in engine.step() if output.result or output.error}
    assert [output.error for output in outputs.values()] == [None] * len(outputs)
    assert engine.stats().kv_blocks_used == 0
    return [outputs[str(number)] for number in range(len(outputs))]


@by_kernels("settings", native=SETTINGS, torch=SETTINGS[1:2], static=SETTINGS[1:])
def test_continuations_equal_transformers_in_any_chunks(llava, contents, expected, settings):
    assert_close(score(engine_for(llava, **settings), contents), expected)


def test_each_continuation_alone_scores_the_same(llava, contents, expected):
    engine = engine_for(llava)
    for number, (prompt, task) in enumerate(continued(contents)):
        assert_close(run(engine, [prompt], [task]), expected[number : number + 1])


def test_preempted_continuations_score_the_same(llava, contents, expected):
    engine = tight_cache(llava, contents, max_num_batched_tokens=20)
    assert_close(score(engine, contents), expected)


def test_hits_end_before_the_continuation(llava, contents, expected):
    engine = engine_for(llava, block_size=4)
    for _ in range(2):
        outputs = score(engine, contents)
        assert_close(outputs, expected)
    cached = [output.cached_tokens for output in outputs]
    starts = [task.start for _, task in continued(contents)]
    assert all(found < start for found, start in zip(cached, starts, strict=True))
    assert cached[-1] == 32
    assert engine.stats().images_encoded == 4, "images were encoded once"


def test_logits_are_computed_in_bounded_pieces(llava, contents, expected, monkeypatch):
    engine = engine_for(llava)
    monkeypatch.setattr(continuations, "MAX_LOGITS", 3 * llava.vocab_size)
    sizes: Counter[int] = Counter()
    model = engine.runner.model.language_model
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden, *rest: sizes.update([len(hidden)]) or logits(hidden, *rest))
    assert_close(score(engine, contents[:2]), expected[: 2 * len(TAILS)])
    assert sizes[3] > 10


def test_two_ranks_score_continuations_alike(llava, contents, expected, monkeypatch):
    monkeypatch.setattr(vlmserve.engine.ranks, "RankProcesses", RankThreads)
    engine = engine_for(llava, max_num_batched_tokens=30, tensor_parallel_size=2)
    assert_close(score(engine, contents), expected)


@pytest.mark.parametrize("start", [0, 8, 23])
def test_start_outside_the_text_is_an_error(llava, contents, start):
    with pytest.raises(InvalidRequestError, match="start must be from"):
        engine_for(llava).add(EngineRequest("wrong", contents[0], task=ScoreContinuation(start)))

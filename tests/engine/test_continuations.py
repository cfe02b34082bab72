"""Log probabilities of whole continuations against transformers' log softmax: alone, batched, chunked, cached."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
import torch

import vlmserve.engine.ranks
from tests.engine.kinds import by_kernels
from tests.engine.test_embeddings import SETTINGS, assert_close, run
from tests.engine.test_parity import Oracle, engine_for, llava_oracle, text_oracle, tight_cache
from tests.models.test_families import make
from tests.ranks import RankThreads
from vlmserve.engine.engine import Engine
from vlmserve.errors import InvalidRequestError, PromptTooLongError
from vlmserve.runner.heads import scores
from vlmserve.tasks import Prefill, Score, ScoreBranch
from vlmserve.types import EngineOutput, EngineRequest, Prompt, SamplingParams

pytestmark = pytest.mark.usefixtures("native_kernels")

CONTENTS = [(5, "image", 9), ("image", 3), (1,), ("image", 2, "image"), (33,)]
TAILS = [[7], [7, 9], [7, 9, 4, 4, 8, 20, 3], [12] * 19]
"""Each of the first three begins the next one."""
TASK = Score(tuple(map(tuple, TAILS)))


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> Oracle:
    return llava_oracle(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def contents(llava) -> list[Prompt]:
    return [llava.prompt(seed, *parts) for seed, parts in enumerate(CONTENTS)]


def sums(oracle: Oracle, content: Prompt) -> np.ndarray:
    """Return what transformers has for each tail."""
    with torch.inference_mode():
        scores = [oracle.forward(content, tail[:-1]).log_softmax(-1)[range(len(tail)), tail] for tail in TAILS]
    return np.array([float(one.double().sum()) for one in scores])


@pytest.fixture(scope="module")
def expected(llava, contents) -> list[np.ndarray]:
    return [sums(llava, content) for content in contents]


def score(engine: Engine, contents: list[Prompt]) -> list[EngineOutput]:
    """One output for each content, of one batch."""
    for number, prompt in enumerate(contents):
        engine.add(EngineRequest(str(number), prompt, task=TASK))
    outputs: dict[str, EngineOutput] = {}
    while engine.has_work():
        outputs |= {output.request_id: output for output in engine.step() if output.result or output.error}
    assert [output.error for output in outputs.values()] == [None] * len(outputs)
    assert engine.stats().kv_blocks_used == 0
    return [outputs[str(number)] for number in range(len(outputs))]


@by_kernels("settings", native=SETTINGS, torch=SETTINGS[1:2], static=SETTINGS[1:2])
def test_continuations_equal_transformers_in_any_chunks(llava, contents, expected, settings):
    assert_close(score(engine_for(llava, **settings), contents), expected)


def test_each_prompt_alone_scores_the_same(llava, contents, expected):
    engine = engine_for(llava, max_num_seqs=2)
    for number, prompt in enumerate(contents):
        assert_close(run(engine, [prompt], [TASK]), expected[number : number + 1])


@pytest.mark.parametrize("order", [(1, 2, 3, 0), (3, 2, 1), (0, 2), (3,), (2, 2, 0, 0)])
def test_continuations_in_any_order_score_alike(llava, contents, expected, order):
    task = Score(tuple(TASK.continuations[place] for place in order))
    engine = engine_for(llava, block_size=4, max_num_seqs=3)
    assert_close(run(engine, contents, [task]), [sums_of_all[[*order]] for sums_of_all in expected])


def test_preempted_branches_score_the_same(llava, contents, expected):
    engine = tight_cache(llava, contents, max_num_batched_tokens=20)
    assert_close(score(engine, contents), expected)
    assert engine.stats().preemptions > 0


def test_prompts_are_computed_once(llava, contents, expected):
    engine = engine_for(llava, block_size=4)
    rows: Counter[str] = Counter()
    submit = engine.runner.submit

    def counting(step):
        rows.update({one.request_id: one.num_tokens for one in step.requests})
        return submit(step)

    engine.runner.submit = counting
    assert_close(score(engine, contents), expected)
    for number, content in enumerate(contents):
        first, *others = [(place, len(tail) - 1) for place, tail in enumerate(TAILS) if len(tail) > 1]
        assert rows.pop(str(number)) == len(content.token_ids) + first[1]
        assert [rows.pop(f"{number}#{place}") for place, _ in others] == [count for _, count in others]
    assert not rows
    rows.clear()
    repeated = score(engine, contents)
    assert_close(repeated, expected)
    assert [output.cached_tokens for output in repeated] == [len(content.token_ids) - 1 for content in contents]
    assert engine.stats().images_encoded == 4, "images were encoded once"


def test_partly_filled_blocks_of_shared_beginnings_are_found(llava, contents, expected):
    engine = engine_for(llava, block_size=16)
    content = contents[0]
    count = next(span.end for span in content.images) + 3
    assert count % 16
    begin = msgspec.structs.replace(content, token_ids=content.token_ids[:count])
    run(engine, [begin], [Prefill()])
    [output] = score(engine, [msgspec.structs.replace(content, num_shared=count)])
    assert output.cached_tokens == count
    assert_close([output], expected[:1])


def test_branches_need_no_prefix_cache(llava, contents, expected):
    engine = engine_for(llava, enable_prefix_caching=False, block_size=4)
    assert_close(score(engine, contents), expected)


def test_answers_beside_branches_stay_the_same(llava, contents):
    engine = engine_for(llava)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = llava.greedy(contents[0])[:8]
    engine.add(EngineRequest("answer", contents[0], params))
    engine.add(EngineRequest("scores", contents[1], task=TASK))
    tokens: list[int] = []
    while engine.has_work():
        tokens += [token for output in engine.step() if output.request_id == "answer" for token in output.token_ids]
    assert tokens == expected


@pytest.mark.parametrize("name", ["qwen3.5", "gemma2"])
def test_branches_of_states_and_windows_score_alike(tmp_path, name):
    oracle = text_oracle(make(tmp_path, name))
    contents = [oracle.prompt(seed, length) for seed, length in enumerate((33, 5, 70))]
    expected = [sums(oracle, content) for content in contents]
    for settings in ({"block_size": 4}, {"block_size": 4, "max_num_batched_tokens": 9, "max_num_seqs": 3}):
        assert_close(score(engine_for(oracle, **settings), contents), expected)


def test_waiting_branches_end_chunks_at_their_blocks(tmp_path):
    """A block of a window is taken when the chunk before has freed another one."""
    oracle = text_oracle(make(tmp_path, "gemma3"))
    content = oracle.prompt(1, 41)
    engine = engine_for(oracle, block_size=16, max_num_batched_tokens=9, max_num_seqs=1)
    assert_close(score(engine, [content]), [sums(oracle, content)])


def test_logits_are_computed_in_bounded_pieces(llava, contents, expected, monkeypatch):
    engine = engine_for(llava)
    monkeypatch.setattr(scores, "MAX_LOGITS", 3 * llava.vocab_size)
    sizes: Counter[int] = Counter()
    model = engine.runner.model.language_model
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden, *rest: sizes.update([len(hidden)]) or logits(hidden, *rest))
    assert_close(score(engine, contents[:2]), expected[:2])
    assert sizes[3] > 10


def test_two_ranks_score_continuations_alike(llava, contents, expected, monkeypatch):
    monkeypatch.setattr(vlmserve.engine.ranks, "RankProcesses", RankThreads)
    engine = engine_for(llava, max_num_batched_tokens=30, tensor_parallel_size=2)
    assert_close(score(engine, contents), expected)


def test_aborted_scores_free_all(llava, contents):
    engine = engine_for(llava, max_num_seqs=2)
    engine.add(EngineRequest("1", contents[0], task=TASK))
    engine.step()
    engine.step()
    engine.abort(["1"])
    assert not engine.has_work()
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Score(()), "at least one token"),
        (Score(((1,), ())), "at least one token"),
        (Score(((1 << 20,),)), "not in the vocabulary"),
        (ScoreBranch(3, 1), "with Score"),
    ],
)
def test_wrong_continuations_are_explained(llava, contents, task, message):
    with pytest.raises(InvalidRequestError, match=message):
        engine_for(llava).add(EngineRequest("wrong", contents[0], task=task))


def test_continuations_beyond_the_context_are_rejected(llava, contents):
    engine = engine_for(llava)
    with pytest.raises(PromptTooLongError):
        engine.add(EngineRequest("long", contents[0], task=Score(((1,) * engine.info.max_prompt_len,))))

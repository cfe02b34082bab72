"""What holds for every engine behind the `VLMEngine` protocol."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.checkpoints import make_llama, make_llava
from tests.mock_checkpoint import IMAGE_TOKEN_ID, IMAGE_TOKENS, make_mock_checkpoint
from vlmserve.engine import create_engine
from vlmserve.engine.protocol import VLMEngine
from vlmserve.errors import InvalidRequestError, OverloadedError, PromptTooLongError, TooManyImagesError
from vlmserve.settings.config import EngineConfig
from vlmserve.types import (
    BeamSearch,
    EngineOutput,
    EngineRequest,
    Grammar,
    ImageInput,
    ImageSpan,
    Prompt,
    SamplingParams,
)

MakeEngine = Callable[..., VLMEngine]


def mock_factory(tmp_path_factory: pytest.TempPathFactory) -> MakeEngine:
    folders: dict[bool, Path] = {}

    def make(*, supports_images: bool = True, **settings: Any) -> VLMEngine:
        if supports_images not in folders:
            folders[supports_images] = make_mock_checkpoint(
                tmp_path_factory.mktemp("mock"), supports_images=supports_images
            )
        folder = folders[supports_images]
        return create_engine(EngineConfig(model=str(folder), engine="mock", **settings), folder)

    return make


def real_factory(tmp_path_factory: pytest.TempPathFactory) -> MakeEngine:
    llava = make_llava(tmp_path_factory.mktemp("llava"), vision={"image_size": 28, "patch_size": 14})
    blind = make_llama(tmp_path_factory.mktemp("llama"))

    def make(*, supports_images: bool = True, **settings: Any) -> VLMEngine:
        folder = llava if supports_images else blind
        settings = {
            "kv_cache_memory": "4MiB",
            "dtype": "float32",
            "device": "cpu",
            "max_model_len": 128,
            "num_threads": 1,
            **settings,
        }
        return create_engine(EngineConfig(model=str(folder), **settings), folder)

    return make


ENGINES = [pytest.param(mock_factory, id="mock"), pytest.param(real_factory, id="real")]
"""Factories of engines whose images take `IMAGE_TOKENS` tokens and whose context is at least 128 tokens."""


@pytest.fixture(scope="module", params=ENGINES)
def make(request, tmp_path_factory) -> MakeEngine:
    return request.param(tmp_path_factory)


@pytest.fixture
def engine(make) -> VLMEngine:
    return make()


def request_of(name: str = "a", tokens: Iterable[int] = (5, 6, 7), images: Any = (), **params: Any) -> EngineRequest:
    params = {"temperature": 0.0, "max_tokens": 8, **params}
    return EngineRequest(name, Prompt(list(tokens), tuple(images)), SamplingParams(**params))


def image_request(shade: float, name: str = "a") -> EngineRequest:
    pixels = np.full((1, 3, 28, 28), shade, np.float32)
    image = ImageInput(int(shade * 100).to_bytes(32, "big"), pixels, IMAGE_TOKENS)
    tokens = [5, *[IMAGE_TOKEN_ID] * IMAGE_TOKENS, 6]
    return request_of(name, tokens, [ImageSpan(image, 1)], ignore_eos=True)


def run(engine: VLMEngine, *requests: EngineRequest) -> dict[str, list[EngineOutput]]:
    """All outputs by request."""
    for request in requests:
        engine.add(request)
    outputs: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
    while engine.has_work():
        step = engine.step()
        assert len({output.request_id for output in step}) == len(step)
        for output in step:
            outputs[output.request_id].append(output)
    return outputs


def tokens_of(engine: VLMEngine, request: EngineRequest) -> list[int]:
    return [token for output in run(engine, request)[request.request_id] for token in output.token_ids]


def test_a_new_engine_has_nothing_to_do(engine):
    assert not engine.has_work()
    assert engine.step() == []
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.generation_tokens) == (0, 0, 0)


def test_timings_come_first_and_last(engine):
    outputs = run(engine, request_of(max_tokens=4, ignore_eos=True), request_of("b", max_tokens=1))
    first, *between, last = [output.timings for output in outputs["a"]]
    assert first.decode is None
    assert between == [None, None]
    assert (last.queue, last.vision, last.prefill) == (first.queue, first.vision, first.prefill)
    assert last.decode >= 0
    [only] = outputs["b"]
    assert only.timings.decode == 0


def test_timings_cover_arrival_and_image_encoding(engine):
    before = time.time()
    [first, *_] = run(engine, image_request(0.7))["a"]
    timings = first.timings
    assert before <= timings.arrived <= time.time()
    assert (timings.before_vision > 0) == (timings.vision > 0) == (engine.stats().vision_seconds > 0)
    if timings.vision:
        assert timings.queue <= timings.before_vision
        assert timings.before_vision + timings.vision <= timings.queue + timings.prefill


def test_its_info_is_consistent(engine):
    info = engine.info
    assert 0 < info.max_prompt_len < info.max_model_len
    assert info.vocab_size > 0
    assert info.supports_images


def test_every_request_has_one_finish_reason(engine):
    requests = [request_of(str(number), [5] * (number + 1), max_tokens=number + 1) for number in range(20)]
    for outputs in run(engine, *requests).values():
        assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_max_tokens_ends_with_length(engine):
    [*_, last] = outputs = run(engine, request_of(max_tokens=5, ignore_eos=True))["a"]
    assert sum(len(output.token_ids) for output in outputs) == 5
    assert (last.finish_reason, last.stop_token_id) == ("length", None)


def test_an_answer_ends_with_the_context(engine):
    tokens = tokens_of(engine, request_of(max_tokens=None, ignore_eos=True))
    assert engine.info.max_prompt_len - 3 <= len(tokens) <= engine.info.max_model_len - 3


def test_the_longest_prompt_gets_a_token(engine):
    longest = request_of(tokens=[5] * engine.info.max_prompt_len, ignore_eos=True)
    assert len(tokens_of(engine, longest)) >= 1


def test_a_stop_token_is_not_in_the_answer(engine):
    tokens = tokens_of(engine, request_of(ignore_eos=True))
    stop = tokens[-1]
    [*_, last] = outputs = run(engine, request_of(ignore_eos=True, stop_token_ids=(stop,)))["a"]
    assert [token for output in outputs for token in output.token_ids] == tokens[: tokens.index(stop)]
    assert (last.finish_reason, last.stop_token_id) == ("stop", stop)


def test_min_tokens_makes_stop_tokens_impossible_before(engine):
    first = tokens_of(engine, request_of(ignore_eos=True))[0]
    tokens = tokens_of(engine, request_of(stop_token_ids=(first,), min_tokens=6, max_tokens=6))
    assert len(tokens) == 6
    assert first not in tokens


def test_min_tokens_holds_the_end_back(engine):
    assert len(tokens_of(engine, request_of(min_tokens=60, max_tokens=60))) == 60


def test_greedy_answers_depend_on_the_prompt_alone(engine):
    alone = tokens_of(engine, request_of(ignore_eos=True))
    assert tokens_of(engine, request_of(ignore_eos=True, seed=5)) == alone
    crowd = [request_of(str(number), [number + 5], ignore_eos=True) for number in range(10)]
    together = run(engine, *crowd, request_of(ignore_eos=True))
    assert [token for output in together["a"] for token in output.token_ids] == alone
    assert tokens_of(engine, request_of(tokens=[7, 6, 5], ignore_eos=True)) != alone


def test_a_seed_reproduces_an_answer(engine):
    def ask(seed: int) -> list[int]:
        return tokens_of(engine, request_of(temperature=5.0, seed=seed, max_tokens=20, ignore_eos=True))

    assert ask(1) == ask(1) != ask(2)


def test_another_image_gives_another_answer(engine):
    red, again, blue = (tokens_of(engine, image_request(shade)) for shade in (0.1, 0.1, 0.9))
    assert red == again != blue


def test_text_models_reject_images(make):
    with pytest.raises(TooManyImagesError):
        make(supports_images=False).add(image_request(0.5))


def test_rejected_requests_leave_nothing_behind(engine):
    vocab_size, longest = engine.info.vocab_size, engine.info.max_prompt_len
    for error, bad in [
        (PromptTooLongError, request_of(tokens=[5] * (longest + 1))),
        (InvalidRequestError, request_of(tokens=[])),
        (InvalidRequestError, request_of(tokens=[5, vocab_size])),
        (InvalidRequestError, request_of(tokens=[5, -1])),
    ]:
        with pytest.raises(error):
            engine.add(bad)
    assert not engine.has_work()
    assert run(engine, request_of())["a"]


def test_an_id_in_use_is_rejected(engine):
    engine.add(request_of())
    with pytest.raises(InvalidRequestError):
        engine.add(request_of())
    while engine.has_work():
        engine.step()
    engine.add(request_of())


def test_a_full_queue_refuses_until_there_is_room(make):
    engine = make(max_num_seqs=1, max_waiting=1)
    engine.add(request_of("a", max_tokens=2, ignore_eos=True))
    engine.add(request_of("b"))
    with pytest.raises(OverloadedError):
        engine.add(request_of("c"))
    finished: list[str] = []
    while not finished:
        finished += [output.request_id for output in engine.step() if output.finish_reason]
    engine.add(request_of("c"))


def test_a_burst_that_fits_is_accepted(make):
    engine = make(max_num_seqs=4, max_waiting=1)
    for name in "abcde":
        engine.add(request_of(name))
    with pytest.raises(OverloadedError):
        engine.add(request_of("f"))


def test_max_num_seqs_bounds_running_requests(make):
    engine = make(max_num_seqs=2)
    for name in "abcd":
        engine.add(request_of(name, max_tokens=3, ignore_eos=True))
    finished = []
    while engine.has_work():
        finished += [output.request_id for output in engine.step() if output.finish_reason]
        assert engine.stats().num_running <= 2
    assert finished == list("abcd")


def test_an_aborted_request_is_gone_at_once(make):
    engine = make(max_num_seqs=1)
    for name in "abc":
        engine.add(request_of(name, max_tokens=50, ignore_eos=True))
    engine.step()
    engine.abort(["a", "c", "unknown"])
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {"b"}
    engine.add(request_of("a"))


def test_aborting_everything_leaves_no_work_and_no_blocks(engine):
    for name in "abc":
        engine.add(request_of(name, max_tokens=50, ignore_eos=True))
    engine.step()
    engine.abort("abc")
    engine.abort("abc")
    assert not engine.has_work()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert engine.step() == []


def test_stats_count_what_was_done(engine):
    run(engine, request_of("a", max_tokens=4, ignore_eos=True), image_request(0.3, "b"))
    stats = engine.stats()
    assert stats.generation_tokens == 4 + 8
    assert stats.prompt_tokens == 3 + IMAGE_TOKENS + 2
    assert stats.images_encoded == 1
    assert stats.steps >= 8
    assert stats.step_seconds >= stats.vision_seconds >= 0
    assert stats.step_seconds > 0
    assert (stats.num_running, stats.kv_blocks_used) == (0, 0)


def test_what_joins_later_does_not_change_what_runs(engine):
    alone = tokens_of(engine, request_of(max_tokens=30, ignore_eos=True))
    engine.add(request_of(max_tokens=30, ignore_eos=True))
    tokens: list[int] = []
    number = 0
    while engine.has_work():
        tokens += [token for output in engine.step() if output.request_id == "a" for token in output.token_ids]
        if number < 10:
            engine.add(request_of(f"later {number}", [number + 8] * (number + 1), max_tokens=number + 1))
            number += 1
    assert tokens == alone


def test_a_snapshot_shows_every_unfinished_request(make):
    engine = make(max_num_seqs=1)
    assert engine.inspect().requests == []
    engine.add(image_request(0.5, "a"))
    engine.add(request_of("b", range(5, 25)))
    waiting = engine.inspect()
    assert [(r.request_id, r.state, r.num_blocks, r.num_images) for r in waiting.requests] == [
        ("a", "waiting", 0, 1),
        ("b", "waiting", 0, 0),
    ]
    while engine.stats().generation_tokens < 3:
        engine.step()
    snapshot = engine.inspect()
    assert snapshot.stats == engine.stats()
    running, waits = snapshot.requests
    assert (running.request_id, running.state, running.num_images) == ("a", "running", 1)
    assert running.num_prompt_tokens == IMAGE_TOKENS + 2
    assert running.num_tokens == IMAGE_TOKENS + 2 + 3
    assert running.num_computed_tokens == running.num_tokens - 1
    assert running.num_blocks == snapshot.stats.kv_blocks_used > 0
    assert (waits.request_id, waits.state, waits.num_tokens, waits.num_computed_tokens) == ("b", "waiting", 20, 0)
    engine.abort("ab")
    assert engine.inspect().requests == []


def test_a_block_map_agrees_with_the_stats(make):
    engine = make()
    engine.add(request_of("a", range(5, 25), max_tokens=20, ignore_eos=True))
    while engine.stats().generation_tokens < 3:
        engine.step()
    stats, shown = engine.stats(), engine.map_blocks()
    assert (shown.num_blocks, sum(shown.held)) == (stats.kv_blocks_total, stats.kv_blocks_used)
    assert sum(shown.held) > 0
    assert max(shown.holders) == 1
    engine.abort("a")
    assert sum(engine.map_blocks().held) == 0


def test_logprobs_are_in_order_of_likelihood(engine):
    outputs = run(engine, request_of(logprobs=3, ignore_eos=True), request_of("b", logprobs=0), request_of("c"))
    for output in outputs["a"]:
        assert [one.token_id for one in output.logprobs] == output.token_ids
        for one in output.logprobs:
            scores = [score for _, score in one.top]
            assert (len(scores), sorted(scores, reverse=True)) == (3, scores)
            assert sum(map(math.exp, scores)) < 1 + 1e-5
            assert one.rank == 1, "the request is greedy"
            assert one.top[0] == (one.token_id, one.logprob)
    for output in outputs["b"]:
        assert [(one.token_id, one.top) for one in output.logprobs] == [(token, ()) for token in output.token_ids]
    assert all(output.logprobs is None for output in outputs["c"])


def test_prompt_logprobs_come_with_the_first_output(engine):
    image = image_request(0.4)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)
    first, *later = run(engine, EngineRequest("a", image.prompt, params))["a"]
    told = first.prompt_logprobs
    assert [one is None for one in told] == [True] + [True] * IMAGE_TOKENS + [False]
    assert (told[-1].token_id, len(told[-1].top)) == (6, 2)
    assert told[-1].rank >= 1
    assert all(output.prompt_logprobs is None for output in later)


def test_logprobs_change_no_token(engine):
    plain = tokens_of(engine, request_of(ignore_eos=True))
    asked = [run(engine, request_of(logprobs=2, prompt_logprobs=1, ignore_eos=True))["a"] for _ in range(2)]
    assert [token for output in asked[0] for token in output.token_ids] == plain
    once, again = ([one.top for output in outputs for one in output.logprobs] for outputs in asked)
    assert [[token for token, _ in top] for top in once] == [[token for token, _ in top] for top in again]


def test_answers_have_allowed_tokens_only(engine):
    params = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}
    answer = tokens_of(engine, request_of(**params))
    allowed = [answer[0], 20, 21]
    assert set(tokens_of(engine, request_of(allowed_token_ids=allowed, **params))) <= set(allowed)
    guided = request_of(grammar=Grammar.regex("[a-z]{1,200}"), **params)
    [one, *_] = tokens_of(engine, guided)
    guided = request_of(grammar=Grammar.regex("[a-z]{1,200}"), allowed_token_ids=[one], **params)
    assert set(tokens_of(engine, guided)) == {one}


def test_answers_have_no_bad_words(engine):
    params = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}
    answer = tokens_of(engine, request_of(**params))
    for word in ([answer[0]], answer[1:3]):
        other = tokens_of(engine, request_of(bad_token_ids=[word], **params))
        assert not any(other[place : place + len(word)] == word for place in range(len(other)))
    only = request_of(bad_token_ids=[[answer[0]]], allowed_token_ids=[answer[0]], **params)
    assert set(tokens_of(engine, only)) == {answer[0]}


def test_answers_without_possible_tokens_say_why(engine):
    stuck = request_of(allowed_token_ids=[9], stop_token_ids=[9], min_tokens=2)
    [*_, output] = run(engine, stuck)["a"]
    assert (output.finish_reason, output.error_param) == ("error", "allowed_token_ids")
    assert "no token of allowed_token_ids may come next" in output.error
    assert tokens_of(engine, request_of(max_tokens=2, ignore_eos=True))


@pytest.mark.parametrize("width", [1, 3])
def test_beam_search_returns_its_best_answers(engine, width):
    asked = msgspec.structs.replace(request_of(max_tokens=6, ignore_eos=True), beams=BeamSearch(width))
    (first, again) = (run(engine, asked)["a"][-1] for _ in range(2))
    answers = [answer.token_ids for answer in first.beams]
    assert (len(answers), {len(answer) for answer in answers}) == (width, {6})
    assert len({tuple(answer) for answer in answers}) == width
    assert (first.finish_reason, first.token_ids) == ("length", answers[0])
    assert [answer.token_ids for answer in again.beams] == answers
    other = msgspec.structs.replace(request_of(tokens=(8, 9), max_tokens=6, ignore_eos=True), beams=BeamSearch(width))
    assert run(engine, other)["a"][-1].token_ids != answers[0]


def test_penalties_and_biases_are_accepted(engine):
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.5, "repeat_last_n": 16}
    assert len(tokens_of(engine, request_of(**penalties, logit_bias={5: 1.5, 6: -100}, ignore_eos=True))) == 8


def test_impossible_logprobs_and_biases_are_rejected(make):
    engine = make(max_logprobs=4)
    for name, params in [
        ("logprobs", {"logprobs": 5}),
        ("prompt_logprobs", {"prompt_logprobs": 5}),
        ("logit_bias", {"logit_bias": {engine.info.vocab_size: 1.0}}),
    ]:
        with pytest.raises(InvalidRequestError, match=name) as caught:
            engine.add(request_of(**params))
        assert caught.value.param == name
    assert tokens_of(engine, request_of(logprobs=4, prompt_logprobs=4, logit_bias={engine.info.vocab_size - 1: 1.0}))

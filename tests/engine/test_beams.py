"""Beam search in the engine against transformers: in one step a token, whatever else runs, with little memory, and with
images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.blip import BlipOracle
from tests.checkpoints import make_llama
from tests.engine.kinds import by_kernels
from tests.engine.test_parity import Oracle, engine_for, generate, llava_oracle, text_oracle
from tests.normalized import normalized
from vlmserve.engine.engine import Engine
from vlmserve.types import BeamSearch, EngineOutput, EngineRequest, Prompt, SamplingParams

pytestmark = pytest.mark.usefixtures("native_kernels")

NEW_TOKENS = 8


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return text_oracle(make_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return llava_oracle(tmp_path_factory.mktemp("llava"))


def request(name: str, prompt: Prompt, width: int, **params) -> EngineRequest:
    params = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **params}
    return EngineRequest(name, prompt, SamplingParams(**params), beams=BeamSearch(width))


def finished(engine: Engine) -> dict[str, EngineOutput]:
    outputs = {}
    while engine.has_work():
        for output in engine.step():
            if output.finish_reason is not None:
                assert output.request_id not in outputs
                outputs[output.request_id] = output
    stats = engine.stats()
    assert (stats.kv_blocks_used, stats.encoder_cache_pinned, stats.num_running, stats.num_waiting) == (0, 0, 0, 0)
    return outputs


def searched(engine: Engine, prompts: list[Prompt], width: int) -> list[list[list[int]]]:
    for number, prompt in enumerate(prompts):
        engine.add(request(str(number), prompt, width))
    outputs = finished(engine)
    found = []
    for number in range(len(prompts)):
        answers = outputs[str(number)].beams
        assert answers is not None
        assert outputs[str(number)].token_ids == answers[0].token_ids
        found.append([answer.token_ids for answer in answers])
    return found


EXPECTED: dict[tuple[Path, Prompt, int], list[list[int]]] = {}
"""What transformers has found, since several tests ask for the same."""


def expected(oracle: Oracle, prompt: Prompt, width: int) -> list[list[int]]:
    asked = (oracle.folder, prompt, width)
    if asked not in EXPECTED:
        EXPECTED[asked] = _expected(oracle, prompt, width)
    return EXPECTED[asked]


@torch.inference_mode()
def _expected(oracle: Oracle, prompt: Prompt, width: int) -> list[list[int]]:
    inputs = {"input_ids": torch.tensor([prompt.token_ids])}
    if prompt.images:
        inputs["pixel_values"] = torch.from_numpy(np.concatenate([normalized(span.image) for span in prompt.images]))
    found = oracle.model.generate(
        **inputs, num_beams=width, num_return_sequences=width, do_sample=False, max_new_tokens=NEW_TOKENS
    )
    return found[:, len(prompt.token_ids) :].tolist()


PARTS = [(5,), (16,), (33,), (4,), (31,)]


CHUNKS = pytest.param(4, {"max_num_batched_tokens": 7}, id="chunks of 7 tokens")
SCHEDULES = [
    pytest.param(1, {}, id="one beam"),
    pytest.param(2, {}, id="two beams"),
    pytest.param(4, {"enable_prefix_caching": False}, id="nothing cached"),
    pytest.param(4, {"block_size": 1}, id="blocks of one token"),
    pytest.param(4, {"max_num_seqs": 3}, id="fewer requests than beams"),
    CHUNKS,
]


@by_kernels("width, settings", native=SCHEDULES, torch=[CHUNKS])
def test_beams_are_those_of_transformers(llama: Oracle, width: int, settings: dict[str, int]) -> None:
    prompts = [llama.prompt(seed, *parts) for seed, parts in enumerate(PARTS)]
    assert searched(engine_for(llama, **settings), prompts, width) == [expected(llama, one, width) for one in prompts]


@pytest.mark.parametrize(("blocks", "caching"), [(14, True), (14, False), (20, True), (30, False)])
def test_searches_that_lack_blocks_find_the_same(llama: Oracle, blocks: int, caching: bool) -> None:
    """The longest answer takes 11 blocks, and four beams that share all but their last ones take some more."""
    probe = engine_for(llama, block_size=4)
    block_bytes = probe.info.kv_cache_bytes // probe.stats().kv_blocks_total
    engine = engine_for(llama, block_size=4, kv_cache_memory=blocks * block_bytes, enable_prefix_caching=caching)
    prompts = [llama.prompt(seed, *parts) for seed, parts in enumerate(PARTS)]
    assert searched(engine, prompts, 4) == [expected(llama, prompt, 4) for prompt in prompts]
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("steps", range(1, NEW_TOKENS))
def test_new_beams_give_way_and_return(llama: Oracle, steps: int) -> None:
    """Three equal urgent prompts want all places, but two wait for the first, whose blocks they share."""
    engine = engine_for(llama, max_num_seqs=3, block_size=4)
    prompt, urgent = llama.prompt(0, 17), llama.prompt(1, 30)
    engine.add(request("search", prompt, 2))
    for _ in range(steps):
        engine.step()
    for number in range(3):
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        engine.add(EngineRequest(str(number), urgent, params, priority=-1))
    beams = finished(engine)["search"].beams
    assert beams is not None
    assert [beam.token_ids for beam in beams] == expected(llama, prompt, 2)
    assert engine.stats().preemptions >= 2


@pytest.mark.usefixtures("kernels")
def test_images_are_searched_about(llava: Oracle) -> None:
    prompts = [llava.prompt(seed, *parts) for seed, parts in enumerate([(5, "image", 9), ("image", 3), (7, "image")])]
    engine = engine_for(llava)
    assert searched(engine, prompts, 3) == [expected(llava, prompt, 3) for prompt in prompts]
    assert engine.stats().images_encoded == 3


def test_a_beam_search_computes_the_prompt_once(llama: Oracle) -> None:
    engine = engine_for(llama, enable_prefix_caching=False)
    prompt = llama.prompt(0, 60)
    engine.add(request("a", prompt, 4))
    most = 0
    while engine.has_work():
        engine.step()
        most = max(most, engine.stats().kv_blocks_used)
    assert engine.stats().steps == NEW_TOKENS
    assert engine.stats().prompt_tokens == 60
    assert most <= 4 + 2 * 4, "full blocks are shared"


def test_others_are_answered_as_they_would_be_alone(llama: Oracle) -> None:
    prompts = [llama.prompt(seed, *parts) for seed, parts in enumerate(PARTS)]
    alone = [generate(engine_for(llama), [prompt])[0] for prompt in prompts]
    engine = engine_for(llama)
    for number, prompt in enumerate(prompts):
        engine.add(request(f"search {number}", prompt, 3))
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        engine.add(EngineRequest(str(number), prompt, params))
    answers: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    assert [answers[str(number)] for number in range(len(prompts))] == alone
    assert [answers[f"search {number}"] for number in range(len(prompts))] == [
        expected(llama, prompt, 3)[0] for prompt in prompts
    ]


@pytest.mark.parametrize("steps", range(5))
def test_aborting_a_search_frees_all_of_it(llama: Oracle, steps: int) -> None:
    engine = engine_for(llama)
    engine.add(request("a", llama.prompt(0, 30), 4))
    for _ in range(steps):
        engine.step()
    engine.abort(["a"])
    assert not engine.has_work()
    assert finished(engine) == {}
    engine.add(request("a", llama.prompt(0, 30), 2))
    assert finished(engine)["a"].finish_reason == "length"
    assert len(engine.runner.requests) <= 2
    assert "a" not in engine.scheduler


def test_nan_logits_end_a_beam_search(llama: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(llama)
    engine.add(request("a", llama.prompt(0, 30), 3))
    engine.step()
    logits = engine.runner.logits_of
    monkeypatch.setattr(engine.runner, "logits_of", lambda hidden: logits(hidden).fill_(float("nan")))
    outputs = finished(engine)
    assert (outputs["a"].finish_reason, outputs["a"].beams) == ("error", None)
    monkeypatch.setattr(engine.runner, "logits_of", logits)
    assert searched(engine, [llama.prompt(0, 30)], 3) == [expected(llama, llama.prompt(0, 30), 3)]


def test_beams_attend_to_an_image_by_cross_attention(tmp_path: Path) -> None:
    """One beam is greedy decoding; of more, the best is at least as likely."""
    oracle = BlipOracle.make(tmp_path, "caption")
    prompts = [oracle.prompt(0, 5, 0), oracle.prompt(1, 3, 1)]
    greedy = [oracle.greedy(prompt)[:NEW_TOKENS] for prompt in prompts]
    assert [best for [best] in searched(engine_for(oracle), prompts, 1)] == greedy
    alone = [searched(engine_for(oracle), [prompt], 3)[0] for prompt in prompts]
    assert searched(engine_for(oracle, block_size=2), prompts, 3) == alone
    assert len({tuple(answer) for answers in alone for answer in answers}) == 6


def test_beams_have_allowed_tokens_and_no_bad_words(llama: Oracle) -> None:
    prompt, width = llama.prompt(3, 16), 3
    [free] = searched(engine_for(llama), [prompt], width)
    allowed, bad = list(range(4, 60)), [[free[0][0]], free[1][1:3]]

    def found(**params) -> list[list[int]]:
        engine = engine_for(llama)
        engine.add(request("a", prompt, width, **params))
        return [answer.token_ids for answer in finished(engine)["a"].beams or ()]

    def theirs(**settings) -> list[list[int]]:
        ids = torch.tensor([prompt.token_ids])
        own = {"num_beams": width, "num_return_sequences": width, "do_sample": False, "max_new_tokens": NEW_TOKENS}
        return llama.model.generate(input_ids=ids, **own, **settings)[:, len(prompt.token_ids) :].tolist()

    assert found(allowed_token_ids=allowed) == theirs(prefix_allowed_tokens_fn=lambda *_: allowed)
    assert found(bad_token_ids=bad) == theirs(bad_words_ids=bad)

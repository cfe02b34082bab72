"""A model with states of layers gives the same answers however it is scheduled, and whatever is found of its states."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import vlmserve.engine.ranks
from tests.engine.kinds import with_kernels
from tests.engine.test_structured import engine_of, run
from tests.models.test_families import make
from tests.ranks import RankThreads
from vlmserve.engine.engine import Engine
from vlmserve.errors import ConfigurationError
from vlmserve.runner.runner import ModelRunner
from vlmserve.types import BeamSearch, EngineOutput, EngineRequest, Prompt, SamplingParams

END = 2
"""Token that ends turns."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("qwen"), "qwen3.5 with shared keys")


def engine(folder: Path, **settings: Any) -> Engine:
    return engine_of(folder, **{"state_cache_memory": None, "block_size": 4, **settings})


def with_slots(folder: Path, slots: int, **settings: Any) -> Engine:
    """An engine with that many slots of states."""
    ranks = settings.get("tensor_parallel_size", 1)
    of_slot = engine(folder, tensor_parallel_size=ranks).sizes.state_bytes * ranks
    return engine(folder, state_cache_memory=(1 + slots) * of_slot, **settings)


def request(name: str, token_ids: Sequence[int], **options: Any) -> EngineRequest:
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 1, **options.pop("params", {})}
    return EngineRequest(name, Prompt([*token_ids]), SamplingParams(**params), **options)


def tokens(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 290) for _ in range(length)]


def answers(outputs: dict[str, list[EngineOutput]]) -> dict[str, list[tuple[int, float]]]:
    """Tokens and their logprobs."""
    assert all(parts[-1].error is None for parts in outputs.values())
    return {
        name: [(one.token_id, one.logprob) for part in parts for one in part.logprobs or ()]
        for name, parts in outputs.items()
    }


def assert_same(found: dict[str, list[EngineOutput]], expected: dict[str, list[EngineOutput]]) -> None:
    own, others = answers(found), answers(expected)
    assert own.keys() == others.keys()
    for name, answer in own.items():
        assert [token for token, _ in answer] == [token for token, _ in others[name]], name
        assert [logprob for _, logprob in answer] == pytest.approx([one for _, one in others[name]], abs=1e-4), name


PROMPTS = {"long": tokens(1, 150), "short": tokens(2, 3), "one": [7], "middle": tokens(3, 70)}
REQUESTS = [request(name, prompt) for name, prompt in PROMPTS.items()]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[EngineOutput]]:
    """Answers of requests that ran alone and found nothing."""
    quiet = engine(folder, enable_prefix_caching=False)
    return {name: outputs for one in REQUESTS for name, outputs in run(quiet, [one]).items()}


def test_greedy_tokens_equal_those_of_transformers(folder: Path, expected: dict[str, list[EngineOutput]]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, prompt in PROMPTS.items():
        generated = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert [token for token, _ in answers(expected)[name]] == generated[0, len(prompt) :].tolist()


@with_kernels("native", "torch", "static")
def test_batches_and_chunks_give_the_same_answers(folder: Path, expected: dict[str, list[EngineOutput]]) -> None:
    for budget in (9, 67, 2048):
        assert_same(run(engine(folder, max_num_batched_tokens=budget), REQUESTS), expected)


@with_kernels("native", "static")
def test_hits_at_all_checkpoints_change_no_answer(folder: Path) -> None:
    system, turn, question = [*tokens(4, 30), END], [*tokens(5, 50), END], [*tokens(6, 9), END]
    first = request("first", [*system, *turn, 9, 9, 9])
    warm, quiet = engine(folder), engine(folder, enable_prefix_caching=False)
    [output] = run(warm, [first]).values()
    answer = [token for token, _ in answers({"first": output})["first"]]
    other = tokens(7, 90)
    following = {
        "repeat": ([*system, *turn, 9, 9, 9], len(system) + len(turn) + 2),
        "next turn": ([*system, *turn, 8, 9, 9, *question, 9, 9, 9], len(system) + len(turn)),
        "kept answer": ([*system, *turn, 9, 9, 9, *answer, *question], len(system) + len(turn) + 3 + 5),
        "other turn": ([*system, *other, END, 9, 9, 9], len(system)),
        "parts": ([*system, *other[:40], *tokens(8, 20)], 64),
    }
    for name, (prompt, cached) in following.items():
        outputs = run(warm, [request(name, prompt)])
        assert outputs[name][0].cached_tokens == cached, name
        assert_same(outputs, run(quiet, [request(name, prompt)]))


def test_equal_requests_share_a_prompt(folder: Path, expected: dict[str, list[EngineOutput]]) -> None:
    outputs = run(engine(folder), [request(str(number), PROMPTS["long"]) for number in range(4)])
    assert sorted(parts[0].cached_tokens for parts in outputs.values()) == [0, 149, 149, 149]
    for parts in outputs.values():
        assert_same({"long": parts}, {"long": expected["long"]})


def run_preempted(small: Engine) -> dict[str, list[EngineOutput]]:
    """Answer `REQUESTS`; "middle" comes last and has priority."""
    outputs: dict[str, list[EngineOutput]] = {name: [] for name in PROMPTS}
    before = small.stats().preemptions
    for name in ("long", "short", "one"):
        small.add(request(name, PROMPTS[name], priority=1))
    for number in range(60):
        if number == 3:
            small.add(request("middle", PROMPTS["middle"]))
        for output in small.step():
            outputs[output.request_id].append(output)
    assert not small.has_work()
    assert small.stats().preemptions > before
    return outputs


def test_preempted_requests_give_the_same_answers(folder: Path, expected: dict[str, list[EngineOutput]]) -> None:
    assert_same(run_preempted(with_slots(folder, 2)), expected)


def test_two_ranks_preempt_and_evict_states_alike(
    folder: Path, expected: dict[str, list[EngineOutput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vlmserve.engine.ranks, "RankProcesses", RankThreads)
    small = with_slots(folder, 2, tensor_parallel_size=2)
    assert small.stats().state_slots_total == 2
    for _ in range(3):
        assert_same(run_preempted(small), expected)
        for is_cached in (False, True):
            repeated = run(small, [request("long", PROMPTS["long"])])
            assert bool(repeated["long"][0].cached_tokens) is is_cached
            assert_same(repeated, {"long": expected["long"]})


@pytest.mark.parametrize("logprobs", [1, None], ids=["waiting", "ahead"])
@with_kernels("native", "static")
def test_out_of_memory_undoes_steps(
    folder: Path, expected: dict[str, list[EngineOutput]], monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    """As if memory ran out after the layers were computed. Without logprobs, devices run the next step already."""
    whole, hidden = engine(folder), ModelRunner.hidden_states
    whole.scheduler.limits = None

    def checked(self: ModelRunner, batch: Any, *wanted: Any) -> torch.Tensor:
        result = hidden(self, batch, *wanted)
        if len(batch.token_ids) > 400:
            raise torch.OutOfMemoryError("too many tokens")
        return result

    monkeypatch.setattr(ModelRunner, "hidden_states", checked)
    outputs: dict[str, list[EngineOutput]] = {name: [] for name in (*PROMPTS, "large")}
    for name, prompt in PROMPTS.items():
        whole.add(request(name, prompt, params={"logprobs": logprobs}))
    for number in range(60):
        if number == 2:
            whole.add(request("large", tokens(10, 420), params={"logprobs": logprobs}))
        for output in whole.step():
            outputs[output.request_id].append(output)
    assert "too little memory" in str(outputs.pop("large")[-1].error)
    if logprobs is not None:
        assert_same(outputs, expected)
    for name, answer in answers(expected).items():
        assert [token for part in outputs[name] for token in part.token_ids] == [token for token, _ in answer]


@with_kernels("native", "static")
def test_states_come_back_from_host_memory(folder: Path) -> None:
    """After each conversation the next ones evict its checkpoints, and part of its blocks.

    Steps are too short to be measured, so each evicted block is worth saving.
    """
    page = engine(folder).sizes.of_tokens.page
    options = {"kv_cache_memory": 40 * page, "kv_offload_memory": "4MiB"}
    small, quiet = with_slots(folder, 4, **options), engine(folder, enable_prefix_caching=False)
    talks = [tokens(seed, 60) for seed in range(30, 34)]
    for turn in range(3):
        asked = [request(f"{number}", prompt) for number, prompt in enumerate(talks)]
        for one in asked:
            found = run(small, [one])
            assert_same(found, run(quiet, [one]))
            [answer] = answers(found).values()
            assert (found[one.request_id][0].cached_tokens or 0) >= (len(one.prompt.token_ids) - 20 if turn else 0)
            talks[int(one.request_id)] += [*[token for token, _ in answer], *tokens(40 + turn, 12)]
    stats = small.stats()
    assert stats.states_loaded == 8
    assert stats.blocks_loaded > 0
    assert stats.host_states_total >= stats.host_states_used > 4


def test_host_memory_is_divided_like_the_device(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        sizes = with_slots(folder, 4, kv_cache_memory="1MiB", kv_offload_memory="10MiB").sizes
    assert f"and for {sizes.host_slots} in host memory" in caplog.text
    on_device, on_host = 4 / sizes.pages, sizes.host_slots / sizes.host_pages
    assert on_host == pytest.approx(on_device, rel=0.1)
    assert with_slots(folder, 4, kv_offload_memory="10MiB", enable_prefix_caching=False).sizes.host_slots == 0


def test_beams_copy_states(folder: Path) -> None:
    beams = request("beams", PROMPTS["middle"], beams=BeamSearch(3), params={"logprobs": None})
    found = [run(one, [beams])["beams"][-1].beams for one in (engine(folder), with_slots(folder, 1))]
    assert found[0] == found[1]
    assert len(found[0]) == 3


@with_kernels("static")
def test_steps_planned_ahead_give_the_same_answers(folder: Path, expected: dict[str, list[EngineOutput]]) -> None:
    plain = [request(one.request_id, one.prompt.token_ids, params={"logprobs": None}) for one in REQUESTS]
    ahead = engine(folder)
    for _ in range(3):
        found = {name: [t for part in parts for t in part.token_ids] for name, parts in run(ahead, plain).items()}
        assert found == {name: [token for token, _ in answer] for name, answer in answers(expected).items()}
    assert ahead.runner.model.device.num_ahead > 0


@with_kernels("static")
def test_next_turn_finds_answer_that_ended_ahead(folder: Path, expected: dict[str, list[EngineOutput]]) -> None:
    answer = [token for token, _ in answers(expected)["middle"]]
    number = next(number for number in range(1, 6) if answer[number] not in answer[:number])
    ahead = engine(folder)
    params = {"logprobs": None, "stop_token_ids": [answer[number]]}
    run(ahead, [request("first", PROMPTS["middle"], params=params)])
    kept = [*PROMPTS["middle"], *answer[: number + 1]]
    following = request("next", [*kept, *tokens(11, 20)])
    found = run(ahead, [following])
    assert found["next"][0].cached_tokens == len(kept)
    assert_same(found, run(engine(folder, enable_prefix_caching=False), [following]))


def test_too_small_a_state_cache_is_an_error(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="--state-cache-memory"):
        with_slots(folder, 0)


def test_stats_and_log_count_slots(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        one = with_slots(folder, 5)
    assert "room for 5 states or checkpoints of" in caplog.text
    run(one, REQUESTS[:1])
    stats = one.stats()
    assert (stats.state_slots_total, stats.state_slots_used) == (5, 0)
    assert stats.state_checkpoints == 4, "two intervals, before the prompt's last token, and after the answer"


def test_random_conversations_equal_a_quiet_engine(folder: Path) -> None:
    generator = random.Random(0)
    busy = with_slots(folder, 5, max_num_batched_tokens=96, max_num_seqs=3, kv_cache_memory="2MiB")
    quiet = engine(folder, enable_prefix_caching=False)
    submitted: list[EngineRequest] = []
    outputs: dict[str, list[EngineOutput]] = {}
    aborted = set()
    for number in range(25):
        turns = [[*tokens(seed, 25), END] for seed in generator.choices(range(3), k=generator.randint(1, 5))]
        prompt = [token for turn in turns for token in turn] + [9] * generator.randint(0, 3)
        salt, priority = generator.choice(["", "", "tenant"]), generator.randint(0, 1)
        params = {"max_tokens": generator.randint(1, 6)}
        one = request(str(number), prompt, cache_salt=salt, priority=priority, params=params)
        submitted.append(one)
        outputs[one.request_id] = []
        busy.add(one)
        for _ in range(generator.randint(0, 4)):
            for output in busy.step():
                outputs[output.request_id].append(output)
        if generator.random() < 0.1:
            aborted.add(one.request_id)
            busy.abort([one.request_id])
    while busy.has_work():
        for output in busy.step():
            outputs[output.request_id].append(output)
    finished = {name: parts for name, parts in outputs.items() if parts and parts[-1].finish_reason}
    assert finished.keys() | aborted == outputs.keys()
    assert busy.stats().prefix_cached_tokens > 0
    assert busy.stats().state_slots_used == 0
    assert_same(finished, run(quiet, [one for one in submitted if one.request_id in finished]))


@with_kernels("static")
def test_captured_steps_leave_checkpoints_of_their_own(folder: Path) -> None:
    """Beside a decode, a chunk of one token that ends a turn."""
    prompts = {str(seed): [*tokens(seed, 64), END, *tokens(seed + 9, 75)] for seed in range(20, 24)}
    busy, quiet = engine(folder, max_num_batched_tokens=64), engine(folder, enable_prefix_caching=False)
    busy.scheduler.limits = None
    outputs: dict[str, list[EngineOutput]] = {name: [] for name in (*prompts, "other")}
    busy.add(request("other", [7], params={"max_tokens": 40}))
    for name, prompt in prompts.items():
        busy.add(request(name, prompt))
        while not outputs[name] or outputs[name][-1].finish_reason is None:
            for output in busy.step():
                outputs[output.request_id].append(output)
    while busy.has_work():
        busy.step()
    del outputs["other"]
    assert_same(outputs, run(quiet, [request(name, prompt) for name, prompt in prompts.items()]))
    again = {name: [*prompt[:65], *tokens(90, 5)] for name, prompt in prompts.items()}
    asked = [request(name, prompt) for name, prompt in again.items()]
    found = run(busy, asked)
    assert {found[name][0].cached_tokens for name in again} == {65}
    assert_same(found, run(quiet, asked))

"""Thoughts of a random model, which by itself would begin none and end none: budgets, formats, and the same tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.checkpoints import make_llama
from tests.thinking_checkpoint import END, START, teach_thoughts
from vlmserve.engine.engine import Engine
from vlmserve.errors import InvalidRequestError
from vlmserve.offline.async_llm import AsyncLLM
from vlmserve.offline.llm import LLM
from vlmserve.offline.outputs import RequestOutput
from vlmserve.settings.config import EngineConfig
from vlmserve.types import EngineRequest, Grammar, Prompt, SamplingParams, Thoughts

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "What is there?"}]
SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "4MiB", "num_threads": 1}
BEGUN = {"chat_template_kwargs": {"enable_thinking": True}}
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return teach_thoughts(make_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(str(folder), **SETTINGS)


@pytest.fixture(scope="module")
def undivided(folder) -> LLM:
    """The same model, with thoughts left in the text."""
    return LLM(str(folder), reasoning_parser="none", **SETTINGS)


def markers(llm: LLM) -> tuple[int, int]:
    return tuple(llm.preparer.tokenizer.token_id(marker) for marker in (START, END))  # type: ignore[return-value]


def answer(llm: LLM, options: dict[str, Any] | None = None, **params: Any) -> RequestOutput:
    params = {"temperature": 0, "max_tokens": NUM_TOKENS, **params}
    [result] = llm.chat(QUESTION, SamplingParams(**params), False, **(options or {}))
    return result


@pytest.mark.parametrize("options", [{}, BEGUN], ids=["may begin", "begun"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "seed": 3, "presence_penalty": 0.5}])
def test_separated_thoughts_have_the_same_tokens(llm, undivided, options, sampling):
    apart, together = answer(llm, options, **sampling), answer(undivided, options, **sampling)
    assert apart.prompt_token_ids == together.prompt_token_ids
    [one], [other] = apart.outputs, together.outputs
    assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
    assert other.reasoning_content is None
    assert (one.reasoning_content or one.text) == (other.text.strip() if options else other.text)


def test_endless_thoughts_are_the_whole_answer(llm):
    [one] = answer(llm, BEGUN).outputs
    assert one.text == ""
    assert one.reasoning_content
    assert (len(one.token_ids), one.finish_reason) == (NUM_TOKENS, "length")


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_ends_thoughts_and_the_model_continues(llm, undivided, budget):
    _, end = markers(llm)
    free, held = answer(llm, BEGUN), answer(llm, BEGUN, thinking_token_budget=budget)
    [one] = held.outputs
    thoughts = free.outputs[0].token_ids[:budget]
    assert one.token_ids[: budget + 1] == [*thoughts, end]
    rest = NUM_TOKENS - budget - 1
    prompt = {"prompt_token_ids": [*held.prompt_token_ids, *thoughts, end]}
    [alone] = undivided.generate([prompt], SamplingParams(temperature=0, max_tokens=rest), False)
    assert one.token_ids[budget + 1 :] == alone.outputs[0].token_ids
    assert one.text == alone.outputs[0].text.lstrip()


async def test_a_stream_tells_them_apart_from_the_answer(folder, tmp_path):
    always = Path(shutil.copytree(folder, tmp_path / "always"))
    template = (always / "chat_template.jinja").read_text()
    (always / "chat_template.jinja").write_text(template.replace("{% elif enable_thinking is defined %}", "{% else %}"))
    llm = LLM(str(always), **SETTINGS)
    [whole] = answer(llm, thinking_token_budget=9).outputs
    assert whole.reasoning_content
    assert whole.text
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, thinking_token_budget=9)
    thoughts: list[str] = []
    assert "".join(llm.stream(QUESTION, params, on_thought=thoughts.append)) == whole.text
    assert "".join(thoughts) == whole.reasoning_content
    assert "".join(llm.stream(QUESTION, params)) == whole.text, "they may be left alone"
    async with AsyncLLM(str(always), **SETTINGS) as other:
        pieces = [piece async for piece in other.stream(QUESTION, params, on_thought=thoughts.append)]
    assert ("".join(pieces), "".join(thoughts)) == (whole.text, 2 * whole.reasoning_content)


def test_a_budget_of_nothing_lets_no_thoughts_begin(llm):
    start, _ = markers(llm)
    wants = {"logit_bias": {start: 100.0}}
    [thinks] = answer(llm, **wants).outputs
    assert thinks.token_ids[0] == start
    [answers] = answer(llm, thinking_token_budget=0, **wants).outputs
    assert answers.token_ids[0] != start
    assert answers.reasoning_content is None
    [off] = answer(llm, {"chat_template_kwargs": {"enable_thinking": False}}, **wants).outputs
    assert (off.token_ids[0], off.reasoning_content) == (start, None), "thoughts that the prompt has ended are text"
    with pytest.raises(InvalidRequestError, match="thinking_token_budget"):
        answer(llm, thinking_token_budget=-1)


@pytest.mark.parametrize("options", [{}, BEGUN], ids=["may begin", "begun"])
def test_a_format_begins_after_them(llm, options):
    start, end = markers(llm)
    for seed in range(4):
        sampling = {"temperature": 1.5, "seed": seed, "logit_bias": {start: 100.0} if not options else {}}
        [one] = answer(llm, options, grammar=Grammar.json(SCHEMA), thinking_token_budget=9, **sampling).outputs
        assert end in one.token_ids
        jsonschema.validate(json.loads(one.text), SCHEMA)
    [free] = answer(llm, options, grammar=Grammar.choice(["yes", "no"]), temperature=1.5, seed=1).outputs
    if not options:
        assert (free.text in ("yes", "no"), free.reasoning_content) == (True, None)


def test_endless_thoughts_leave_room_for_formats(llm):
    [one] = answer(llm, BEGUN, grammar=Grammar.json(SCHEMA), max_tokens=60).outputs
    assert len(one.token_ids) <= 60
    jsonschema.validate(json.loads(one.text), SCHEMA)
    assert len(one.reasoning_content or "") > 10


def test_log_probabilities_are_those_of_all_tokens(llm):
    [one] = answer(llm, BEGUN, thinking_token_budget=4, logprobs=0).outputs
    assert [next(iter(chosen)) for chosen in one.logprobs or []] == one.token_ids


def mixed(start: int, end: int) -> list[EngineRequest]:
    """Requests with thoughts, begun or not, and without, with budgets and formats, greedy or not."""
    kinds = [None, Thoughts(start, end, begun=True), Thoughts(start, end)]
    grammars = [None, Grammar.json(SCHEMA), Grammar.regex("[a-z]{1,30}!")]
    requests = []
    for number in range(18):
        params = SamplingParams(
            temperature=1.5 * (number % 2),
            seed=number,
            max_tokens=90,
            logit_bias={start: 100.0} if number % 3 == 2 and number < 9 else {},
            thinking_token_budget=[None, 5, 30][number // 2 % 3],
            grammar=grammars[number // 6],
        )
        prompt = Prompt([5 + (number * 11 + place) % 200 for place in range(20)], thoughts=kinds[number % 3])
        requests.append(EngineRequest(str(number), prompt, params))
    return requests


def run(folder: Path, requests: list[EngineRequest], **settings: Any) -> tuple[dict[str, list[int]], Engine]:
    engine = Engine(EngineConfig(model=str(folder), **{**SETTINGS, **settings}), folder)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
    return tokens, engine


def test_tokens_are_the_same_however_scheduled(folder, llm):
    requests = mixed(*markers(llm))
    together, engine = run(folder, requests)
    alone, _ = run(folder, requests, max_num_seqs=1, enable_prefix_caching=False)
    chunked, _ = run(folder, requests, max_num_batched_tokens=16)
    block = engine.info.kv_cache_bytes // engine.stats().kv_blocks_total
    preempted, tight = run(folder, requests, kv_cache_memory=14 * block, max_model_len=160)
    assert tight.stats().preemptions > 0
    assert together == alone == chunked == preempted
    num_ended = sum(markers(llm)[1] in tokens for tokens in together.values())
    assert num_ended >= 8

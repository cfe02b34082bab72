"""`AsyncLLM` returns what `LLM` does, and ends what nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pytest
import pytest_asyncio
from PIL import Image

from tests.mock_checkpoint import make_mock_checkpoint
from tests.waiting import until
from vlmserve import LLM, AsyncLLM, LoRARequest, SamplingParams
from vlmserve.errors import (
    AnswerError,
    ConfigurationError,
    InvalidImageError,
    InvalidRequestError,
    UnavailableError,
    UnknownModelError,
)
from vlmserve.frontend.client import EngineClient
from vlmserve.frontend.deciding import Question
from vlmserve.frontend.scoring import Result, VectorScorer

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = SamplingParams(temperature=0)
SHAPES = Path(__file__).parents[2] / "examples" / "shapes.png"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_mock_checkpoint(tmp_path_factory.mktemp("mock"))


@pytest.fixture(scope="module", autouse=True)
def clients() -> Iterator[list[EngineClient]]:
    """Of all engines that were started, the last one last."""
    started, start = [], EngineClient.start

    async def start_and_note(*args: Any, **options: Any) -> EngineClient:
        started.append(await start(*args, **options))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineClient, "start", start_and_note)
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(folder):
    """Few and small prompts are prepared ahead."""
    options = {"prepare_ahead": 3, "prepare_ahead_memory": 2000, "max_num_seqs": 4, "mock_tpot": 0.003}
    options["pooling"] = "last"
    async with AsyncLLM(str(folder), engine="mock", **options) as running:
        yield running


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> list[Path]:
    paths = [tmp_path_factory.mktemp("images") / f"{colour}.png" for colour in ("red", "blue")]
    for path in paths:
        Image.new("RGB", (40, 30), path.stem).save(path)
    return paths


def ask(text: str, *images: object) -> list[dict[str, object]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def shown(results) -> list:
    return [
        (result.prompt, result.prompt_token_ids, [(one.text, one.finish_reason) for one in result.outputs])
        for result in results
    ]


async def test_results_are_those_of_llm(llm, folder, images):
    conversations = [ask(f"question {number}", images[number % 2]) for number in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=1 + number % 5) for number in range(40)]
    direct = LLM(str(folder), engine="mock")
    assert shown(await llm.chat(conversations, params)) == shown(direct.chat(conversations, params, use_tqdm=False))
    assert shown(await llm.chat(conversations[0], GREEDY)) == shown(direct.chat(conversations[0], GREEDY))
    several = SamplingParams(n=3, seed=5, max_tokens=4, stop=["e"])
    assert shown(await llm.chat(ask("several"), several)) == shown(direct.chat(ask("several"), several, use_tqdm=False))
    prompts = ["one", [1, 2, 3], {"prompt_token_ids": [4, 5]}]
    assert shown(await llm.generate(prompts, GREEDY)) == shown(direct.generate(prompts, GREEDY, use_tqdm=False))
    assert await llm.chat([]) == []


async def test_decisions_are_those_of_llm(llm, folder):
    chat, questions = [{"role": "user", "content": "a"}], [Question.predicate("b"), Question.predicate("c")]
    expected = LLM(str(folder), engine="mock").decide(chat, questions, use_tqdm=False)
    assert await llm.decide(chat, questions) == expected


async def test_vectors_are_dropped_once_compared(llm, folder, monkeypatch):
    tally, held, alive = VectorScorer.tally, [], []

    def counting(scorer: VectorScorer, num_queries: int) -> Callable[[Result], list[float]]:
        take = tally(scorer, num_queries)

        def counted(result: Result) -> list[float]:
            held.append(weakref.ref(result))
            alive.append(sum(one() is not None for one in held))
            return take(result)

        return counted

    monkeypatch.setattr(VectorScorer, "tally", counting)
    documents = [f"document {number}" for number in range(12)]
    expected = LLM(str(folder), engine="mock", pooling="last").score("query", documents, use_tqdm=False)
    assert await llm.score("query", documents) == expected
    assert len(alive) == 2 * 13
    assert max(alive) <= 3, "the query, a document, and the one before"


async def test_stream_results_come_in_order(llm):
    taken = 0

    def conversations():
        nonlocal taken
        for number in range(100):
            taken += 1
            yield ask(f"question {number}")

    results = llm.chat(conversations(), GREEDY, stream=True)
    async with contextlib.aclosing(results):
        first = await anext(results)
        assert "question 0" in first.prompt
        assert taken < 100, "only some are prepared ahead"
        rest = [result async for result in results]
    assert [f"question {number}" in result.prompt for number, result in enumerate(rest, 1)] == [True] * 99


async def test_the_text_of_an_answer_comes_in_pieces(llm, images):
    pieces = [piece async for piece in llm.stream(ask("hello", images[0]), GREEDY)]
    [whole] = await llm.chat(ask("hello", images[0]), GREEDY)
    assert "".join(pieces) == whole.text
    assert len(pieces) > 1
    options = {"add_generation_prompt": False, "chat_template_kwargs": {}, "mm_processor_kwargs": {"max_pixels": 784}}
    other = [piece async for piece in llm.stream(ask("hello", images[0]), GREEDY, **options)]
    [whole_other] = await llm.chat(ask("hello", images[0]), GREEDY, **options)
    assert "".join(other) == whole_other.text != whole.text
    with pytest.raises(InvalidRequestError, match="one answer"):
        await anext(llm.stream(ask("hello"), SamplingParams(n=2)))


async def test_calls_run_at_the_same_time(llm):
    results = await asyncio.gather(*(llm.chat(ask(f"number {number}"), GREEDY) for number in range(20)))
    assert [f"number {number}" in result.prompt for number, [result] in enumerate(results)] == [True] * 20


async def test_errors_are_raised_or_returned(llm, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    conversations = [ask("a"), ask("b", broken), ask("c")]
    with pytest.raises(InvalidImageError, match=r"conversations\[1\].*broken\.png"):
        await llm.chat(conversations, GREEDY)
    first, wrong, last = await llm.chat(conversations, GREEDY, on_error="return")
    assert isinstance(wrong, InvalidImageError)
    assert first.text
    assert last.text
    with pytest.raises(InvalidImageError, match=r"gone\.png"):
        await llm.chat(ask("a", "gone.png"))
    with pytest.raises(InvalidRequestError, match="on_error"):
        await llm.chat(ask("a"), on_error="ignore")
    with pytest.raises(UnknownModelError, match="no adapter"):
        await llm.chat(ask("a"), lora_request=LoRARequest("nobody"))
    with pytest.raises(InvalidRequestError, match="one lora_request"):
        await llm.chat([ask("a"), ask("b")], lora_request=[None])
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        await llm.generate("a", SamplingParams(min_tokens=10**6))
    with pytest.raises(ConfigurationError, match="there is no option colour"):
        AsyncLLM("pixie", colour="red")


async def test_a_task_that_is_cancelled_ends_its_requests(llm, clients):
    long = SamplingParams(temperature=0, max_tokens=450, ignore_eos=True)
    task = asyncio.ensure_future(llm.chat([ask(f"{number}") for number in range(10)], long))
    client = clients[0]
    await until(lambda: client.num_unfinished >= 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.num_unfinished == 0
    await until(lambda: not client.stats.num_running)
    for results in (llm.stream(ask("long"), long), llm.chat([ask("a"), ask("b", "a.png")], long, stream=True)):
        with contextlib.suppress(InvalidRequestError):
            async with contextlib.aclosing(results), asyncio.timeout(0.2):
                await anext(results)
        assert client.num_unfinished == 0
    [result] = await llm.chat(ask("after all"), GREEDY)
    assert result.text


async def test_a_closed_one_raises(folder, clients):
    known = len(clients)
    llm = AsyncLLM(str(folder), engine="mock", mock_tpot=0.01)
    long = asyncio.ensure_future(llm.chat(ask("long"), SamplingParams(max_tokens=450, ignore_eos=True)))
    await until(lambda: len(clients) > known and clients[-1].num_unfinished > 0)
    await llm.close()
    with pytest.raises(UnavailableError, match="closed"):
        await long
    with pytest.raises(UnavailableError, match="closed"):
        await llm.chat(ask("hello"))
    await llm.close()


class Circle(pydantic.BaseModel):
    colour: Annotated[str, pydantic.Field(json_schema_extra={"enum": ["red", "green", "blue"]})]

    @pydantic.field_validator("colour")
    @classmethod
    def _is_short(cls, colour: str) -> str:
        if len(colour) > 60:
            raise ValueError("too long")
        return colour


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


async def test_answers_with_a_schema_are_objects():
    conversations = [ask("What colour is the circle?", SHAPES)] * 2
    params = [SamplingParams(temperature=0, max_tokens=64), SamplingParams(temperature=0, max_tokens=3)]
    direct = LLM("pixie", kv_cache_memory="64MiB")
    async with AsyncLLM("pixie", kv_cache_memory="64MiB") as llm:
        for chat in (llm.chat, lambda *args, **more: _later(direct.chat(*args, use_tqdm=False, **more))):
            [value] = await chat(conversations[0], params[0], schema=SCHEMA)
            assert set(value) == {"colour"}
            whole, cut = await chat(conversations, params, schema=SCHEMA, on_error="return")
            assert whole == value
            assert isinstance(cut, AnswerError)
            assert str(cut).startswith("conversations[1]: the answer was cut off")
            assert cut.output.outputs[0].finish_reason == "length"
            with pytest.raises(AnswerError, match=r"conversations\[1\]"):
                await chat(conversations, params, schema=SCHEMA)
            with pytest.raises(InvalidRequestError, match="leave n out"):
                await chat(conversations[0], SamplingParams(n=2), schema=SCHEMA)
        results = [one async for one in llm.chat(conversations[:1], params[0], schema=Circle, stream=True)]
        assert results == [Circle(colour=value["colour"])] == direct.chat(*conversations[:1], params[0], schema=Circle)


async def _later(value):
    return value


async def test_objects_are_instances_of_a_pydantic_model():
    from vlmserve.offline.calls import object_in
    from vlmserve.offline.outputs import CompletionOutput, RequestOutput

    def output(text: str) -> RequestOutput:
        return RequestOutput("a", "", [], [CompletionOutput(0, text, [], "stop")])

    assert object_in(output('{"colour": "red"}'), Circle) == Circle(colour="red")
    for text in ('{"colour": 3}', '{"colour": "' + "x" * 70 + '"}', '{"colour'):
        with pytest.raises(AnswerError, match="does not match the schema"):
            object_in(output(text), Circle)
        if "x" not in text and "3" not in text:
            with pytest.raises(AnswerError, match="does not match the schema"):
                object_in(output(text), SCHEMA)

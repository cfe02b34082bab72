"""The asynchronous client of an engine process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
from collections.abc import AsyncGenerator

import pytest
import zmq
import zmq.asyncio

from tests import engine_thread
from tests.engine_thread import EngineThread
from tests.mock_checkpoint import make_mock_checkpoint
from tests.waiting import until
from vlmserve.engine import create_engine
from vlmserve.engine.messages import Accepted, encode
from vlmserve.engine.process import EngineProcess
from vlmserve.errors import (
    CheckpointNotFoundError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    OverloadedError,
    PromptTooLongError,
    UnavailableError,
)
from vlmserve.frontend.client import EngineClient, KeptContext
from vlmserve.frontend.engine_stream import EngineStream
from vlmserve.models.progress import listener
from vlmserve.settings.config import EngineConfig
from vlmserve.types import EngineOutput, EngineRequest, Prompt, RequestTimings, SamplingParams, TokenLogprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_mock_checkpoint(tmp_path_factory.mktemp("mock"))


@pytest.fixture
def start(folder):
    """Starts clients with an engine, which is in a process of its own if that is asked for."""

    async def start(process: bool = False, **settings) -> EngineClient:
        config = EngineConfig(engine="mock", **settings)
        launch = EngineProcess.launch if process else EngineThread
        return await EngineClient.start(config, process=launch(config, folder))

    return start


def request(name: str = "a", max_tokens: int = 20, tokens: tuple[int, ...] = (5, 6)) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(name, Prompt(list(tokens)), params)


async def submit(client: EngineClient, asked: EngineRequest) -> EngineStream:
    [stream] = await client.submit_together([asked])
    return stream


async def outputs_of(client: EngineClient, asked: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
    with contextlib.closing(await submit(client, asked)) as stream:
        async for output in stream:
            yield output


async def tokens_of(client: EngineClient, asked: EngineRequest) -> list[int]:
    return [token async for output in outputs_of(client, asked) for token in output.token_ids]


async def test_it_answers_many_requests_at_once(start):
    client = await start()
    assert client.alive
    answers = await asyncio.gather(*(tokens_of(client, request(str(n), tokens=(n + 5,))) for n in range(100)))
    assert all(len(answer) == 20 for answer in answers)
    assert await tokens_of(client, request(tokens=(7,))) == answers[2]
    await until(lambda: client.stats.num_running == 0)
    assert client.stats.generation_tokens == 101 * 20
    await client.close()


async def test_progress_of_loading_is_heard(folder, monkeypatch):
    def load(*args):
        for share in ("0.10", "0.40"):
            listener.get()(f"{share} of 0.40 GB")
        return create_engine(*args)

    monkeypatch.setattr(engine_thread, "create_engine", load)
    heard = []
    config = EngineConfig(engine="mock")
    client = await EngineClient.start(config, process=EngineThread(config, folder), on_progress=heard.append)
    await client.close()
    assert heard == ["0.10 of 0.40 GB", "0.40 of 0.40 GB"]


async def test_a_request_that_cannot_be_sent_fails_alone(start):
    client = await start()
    names = ("a", "b\ud800", "c")
    answers = await asyncio.gather(*(tokens_of(client, request(name)) for name in names), return_exceptions=True)
    assert [len(answer) for answer in answers[::2]] == [20, 20]
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        raise answers[1]
    assert client.num_unfinished == 0
    await client.close()


async def test_closing_the_generator_aborts_the_request(start):
    client = await start(mock_tpot=0.01)
    outputs = outputs_of(client, request(max_tokens=400))
    assert (await anext(outputs)).token_ids
    assert client.num_unfinished == 1
    await outputs.aclose()
    assert client.num_unfinished == 0
    await until(lambda: client.stats.num_running == 0)
    assert client.stats.generation_tokens < 400
    await client.close()


async def test_cancelling_the_reader_aborts_the_request(start):
    client = await start(mock_ttft=60)
    task = asyncio.ensure_future(tokens_of(client, request()))
    await until(lambda: client.stats.num_running == 1)
    task.cancel()
    await until(lambda: client.stats.num_running == 0)
    await client.close()


async def test_refusals_raise_what_the_engine_raised(start):
    client = await start(max_num_seqs=1, max_waiting=1, mock_tpot=0.02)
    with pytest.raises(PromptTooLongError) as refusal:
        await submit(client, request(tokens=(5,) * 1000))
    assert refusal.value.param == "messages"
    streams = [await submit(client, request("a", 400))]
    await until(lambda: client.stats.num_running == 1)
    streams.append(await submit(client, request("b", 400)))
    with pytest.raises(InvalidRequestError, match="in use"):
        await submit(client, request("b"))
    with pytest.raises(OverloadedError):
        await submit(client, request("c"))
    assert client.num_unfinished == 2
    for stream in streams:
        stream.close()
    assert len(await tokens_of(client, request("c"))) == 20
    await client.close()


async def test_requests_submitted_together_each_have_their_stream(start):
    client = await start()
    streams = await client.submit_together([request(name, tokens=(number,)) for number, name in enumerate("abc", 5)])
    assert [stream.request_id for stream in streams] == ["a", "b", "c"]
    answers = [[token async for output in stream for token in output.token_ids] for stream in streams]
    assert answers == [await tokens_of(client, request("alone", tokens=(number,))) for number in (5, 6, 7)]
    assert await client.submit_together([]) == []
    await client.close()


async def test_joint_requests_are_taken_together_or_not(start):
    client = await start(mock_tpot=0.01)
    with pytest.raises(PromptTooLongError):
        await client.submit_together([request("a", 400), request("b", tokens=(5,) * 1000), request("c", 400)])
    with pytest.raises(InvalidRequestError, match="in use"):
        await client.submit_together([request("a", 400), request("a", 400)])
    assert client.num_unfinished == 0
    await until(lambda: client.stats.num_running == 0)
    assert len(await tokens_of(client, request("d"))) == 20
    await client.close()


async def test_outputs_that_nobody_waited_for_arrive_as_one(start):
    client = await start()
    expected = await tokens_of(client, request(max_tokens=50))
    stream = await submit(client, request(max_tokens=50))
    await until(lambda: client.stats.generation_tokens == 100)
    outputs = [output async for output in stream]
    assert len(outputs) == 1
    assert outputs[0].token_ids == expected
    assert outputs[0].finish_reason == "length"
    await client.close()


async def test_an_end_after_unread_outputs_keeps_them():
    stream = EngineStream("a", lambda _: None)
    stream.put(EngineOutput("a", [1, 2]))
    stream.put(EngineOutput("a", [3], "stop", 9))
    [output] = [output async for output in stream]
    assert output == EngineOutput("a", [1, 2, 3], "stop", 9)


async def test_timings_of_an_unread_first_token_are_kept():
    stream = EngineStream("a", lambda _: None)
    timings = RequestTimings(0.5, 0.0, 1.5, None)
    stream.put(EngineOutput("a", [1], timings=timings))
    stream.put(EngineOutput("a", [2]))
    assert await anext(stream) == EngineOutput("a", [1, 2], timings=timings)


async def test_unread_outputs_keep_logprobs_of_each_token():
    stream = EngineStream("a", lambda _: None)
    told = [TokenLogprobs(token, -0.5, 1) for token in range(4)]
    stream.put(EngineOutput("a", [0], logprobs=told[:1], prompt_logprobs=[None, told[3]]))
    stream.put(EngineOutput("a", [1, 2], logprobs=told[1:3]))
    stream.put(EngineOutput("a", [], "stop", 9, logprobs=[]))
    [output] = [output async for output in stream]
    assert output.logprobs == told[:3]
    assert output.prompt_logprobs == [None, told[3]]


async def test_a_killed_engine_fails_everybody_at_once(start):
    client = await start(process=True, mock_tpot=0.01, max_num_seqs=4)
    tasks = [asyncio.ensure_future(tokens_of(client, request(str(number), 400))) for number in range(8)]
    await until(lambda: client.stats.num_running == 4)
    os.kill(client.process.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) and "SIGKILL" in str(result) for result in results)
    assert not client.alive
    assert "SIGKILL" in client.death
    with pytest.raises(EngineDeadError):
        await submit(client, request())
    await client.close()


async def test_engine_state_is_shown_to_every_caller(start):
    client = await start(mock_tpot=0.01, max_num_seqs=1)
    streams = [await submit(client, request(name, 400)) for name in "ab"]
    await until(lambda: client.stats.num_running == 1)
    first, second = await asyncio.gather(client.calls.inspect(), client.calls.inspect())
    assert [(shown.request_id, shown.state) for shown in first.requests] == [("a", "running"), ("b", "waiting")]
    assert second == first
    maps = await asyncio.gather(client.calls.map_blocks(), client.calls.map_blocks())
    assert maps[0] == maps[1]
    assert sum(maps[0].held) > 0
    for stream in streams:
        stream.close()
    assert (await client.calls.inspect()).requests == []
    await client.close()


async def test_engine_killed_for_memory_says_so(start, monkeypatch):
    client = await start(process=True)
    monkeypatch.setattr("vlmserve.engine.process.num_killed", lambda: 10**9)
    os.kill(client.process.pid, signal.SIGKILL)
    await client.died.wait()
    assert "memory ran out" in client.death


async def test_asking_a_gone_engine_fails(start):
    client = await start(process=True, mock_tpot=60)
    await submit(client, request())
    await until(lambda: client.stats.num_running == 1)
    os.kill(client.process.pid, signal.SIGSTOP)  # so that it cannot answer
    asking = [asyncio.ensure_future(client.calls.inspect()) for _ in range(2)]
    mapping = asyncio.ensure_future(client.calls.map_blocks())
    await asyncio.sleep(0)
    asking[0].cancel()
    os.kill(client.process.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await asking[1]
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await mapping
    with pytest.raises(EngineDeadError):
        await client.calls.inspect()
    await client.close()
    with pytest.raises(EngineDeadError):
        await client.calls.inspect()


def test_collecting_an_unclosed_client_does_not_block():
    class Client:
        def __init__(self) -> None:
            self.context = KeptContext()
            self.socket = self.context.socket(zmq.PAIR)
            self.own = self  # a cycle, which only the garbage collector frees

    Client()
    collecting = threading.Thread(target=gc.collect, daemon=True)
    collecting.start()
    collecting.join(30)
    assert not collecting.is_alive()


async def test_closing_lets_running_requests_finish_within_the_grace(start):
    client = await start(mock_tpot=0.01)
    answer = outputs_of(client, request(max_tokens=50))
    first = await anext(answer)
    closing = asyncio.ensure_future(client.close(grace=60))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await submit(client, request("late"))
    rest = [token async for output in answer for token in output.token_ids]
    assert len(first.token_ids) + len(rest) == 50
    await closing


async def test_closing_fails_what_outlasts_the_grace(start):
    client = await start(process=True, mock_tpot=0.01)
    task = asyncio.ensure_future(tokens_of(client, request(max_tokens=400)))
    await until(lambda: client.stats.num_running == 1)
    await client.close()
    with pytest.raises(UnavailableError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(client.process.pid, 0)


async def test_a_load_error_is_raised_as_it_was(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"tokenizer\.json"):
        await EngineClient.start(EngineConfig(engine="mock"), tmp_path)


async def test_slow_load_is_given_up(folder):
    with pytest.raises(ModelLoadError, match="within 0 s"):
        await EngineClient.start(EngineConfig(engine="mock"), folder, timeout=0.0)


async def test_many_engine_messages_block_no_other_task(start, monkeypatch):
    client = await start()
    received, turns, over = 0, 0, asyncio.Event()
    message, receive = encode(Accepted([])), zmq.asyncio.Socket.recv_multipart

    def receive_many(self: zmq.asyncio.Socket) -> asyncio.Future:
        nonlocal received
        received += 1
        if received > 1000:
            over.set()
            return receive(self)
        future = asyncio.get_running_loop().create_future()
        future.set_result(message)
        return future

    monkeypatch.setattr(zmq.asyncio.Socket, "recv_multipart", receive_many)
    monkeypatch.setattr("vlmserve.frontend.client.LONGEST_TURN", 0.0)
    asked = asyncio.create_task(client.calls.inspect())
    while not over.is_set():
        turns += received > 0
        await asyncio.sleep(0)
    await asked
    await client.close()
    assert turns > 900

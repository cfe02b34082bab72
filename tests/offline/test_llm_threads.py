"""One `LLM` in several threads: each gets its own answers, and their requests share the engine's steps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.adapters.test_serving import write_adapter
from tests.checkpoints import make_llama
from tests.mock_checkpoint import make_mock_checkpoint
from tests.waiting import wait_until
from vlmserve import LLM, AsyncLLM, LoRARequest, SamplingParams
from vlmserve.errors import AdapterError, InvalidRequestError, UnavailableError

GREEDY = SamplingParams(temperature=0, max_tokens=10)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_mock_checkpoint(tmp_path_factory.mktemp("mock"))


@pytest.fixture
def llm(folder) -> LLM:
    return LLM(str(folder), engine="mock")


@pytest.fixture(autouse=True)
def _switch_often():
    """Threads take turns in the middle of steps, which the mock engine would otherwise finish undisturbed."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def answer(llm: LLM, text: str) -> list[int]:
    [result] = llm.chat(ask(text), GREEDY, use_tqdm=False)
    assert text in result.prompt
    return result.outputs[0].token_ids


def in_threads(count: int, run) -> list:
    with ThreadPoolExecutor(count) as pool:
        return [future.result(timeout=120) for future in [pool.submit(run, number) for number in range(count)]]


def test_questions_of_8_threads_get_their_answers(llm):
    questions = [f"question {number}" for number in range(400)]
    expected = [one.outputs[0].token_ids for one in llm.chat([ask(one) for one in questions], GREEDY, use_tqdm=False)]
    assert len(set(map(tuple, expected))) > 300

    def run(thread: int) -> list[list[int]]:
        return [answer(llm, one) for one in questions[thread::8]]

    answers = in_threads(8, run)
    assert [answers[number % 8][number // 8] for number in range(400)] == expected
    assert not llm.engine.has_work()


def test_threads_mix_lists_streams_and_mistakes(llm):
    texts = [f"text {number}" for number in range(24)]
    expected = [one.text for one in llm.chat([ask(text) for text in texts], GREEDY, use_tqdm=False)]
    prompts = [one.text for one in llm.generate(texts, GREEDY, use_tqdm=False)]

    def run(thread: int) -> None:
        for _ in range(3):
            if thread % 4 == 0:
                results = llm.chat([ask(text) for text in texts], GREEDY, use_tqdm=False)
                assert [one.text for one in results] == expected
            elif thread % 4 == 1:
                assert ["".join(llm.stream(ask(text), GREEDY)) for text in texts] == expected
            elif thread % 4 == 2:
                results = llm.generate(iter(texts), GREEDY, use_tqdm=False, stream=True)
                assert [one.text for one in results] == prompts
            else:
                with pytest.raises(InvalidRequestError, match=r"conversations\[1\]"):
                    llm.chat([ask(texts[0]), [{"role": "wizard", "content": "a"}]], GREEDY, use_tqdm=False)
                next(llm.stream(ask("begun"), ENDLESS))  # abandoned
                next(llm.chat(map(ask, texts), ENDLESS, use_tqdm=False, stream=True)) if thread == 7 else None

    in_threads(8, run)
    gc.collect()
    assert not llm.engine.has_work()


def test_requests_of_threads_share_steps(folder):
    llm = LLM(str(folder), engine="mock", mock_tpot=0.01)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    begun = threading.Barrier(8)

    def run(thread: int) -> None:
        begun.wait()
        llm.generate(f"prompt {thread}", params, use_tqdm=False)

    in_threads(8, run)
    assert llm.engine.stats().generation_tokens == 160
    assert llm.engine.stats().steps < 80


def test_a_thread_adds_requests_while_another_steps(folder):
    """The other thread does not wait for the long answer."""
    llm = LLM(str(folder), engine="mock", mock_tpot=0.002)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(llm.generate, "long", ENDLESS, use_tqdm=False)
        wait_until(llm.engine.has_work)
        for number in range(5):
            assert answer(llm, f"short {number}")
        assert not long.done()
        assert long.result(timeout=60)[0].outputs[0].finish_reason == "length"


def test_a_failing_step_concerns_its_thread_only(llm, monkeypatch):
    step = llm.engine.step
    failures = iter([True])

    def failing_step():
        if next(failures, False):
            raise RuntimeError("out of memory")
        return step()

    monkeypatch.setattr(llm.engine, "step", failing_step)

    def run(thread: int) -> object:
        try:
            return answer(llm, f"question {thread}")
        except RuntimeError as error:
            return str(error)

    answers = in_threads(6, run)
    assert answers.count("out of memory") == 1
    assert not llm.engine.has_work()


def test_text_that_cannot_be_made_fails_one_request(llm, monkeypatch):
    from vlmserve.offline.requests import Generation

    take = Generation.take

    def failing_take(self, output):
        if self.request_id == "offline-1":
            raise ValueError("no such token")
        take(self, output)

    monkeypatch.setattr(Generation, "take", failing_take)
    good, bad, other = llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert "no such token" in bad.outputs[0].error
    assert good.text
    assert other.text
    assert not llm.engine.has_work()


@pytest.fixture
def interruptible():
    """SIGINT as it is in a terminal; programs in the background start with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_only_the_main_threads_requests(folder):
    llm = LLM(str(folder), engine="mock", mock_tpot=0.002)
    expected = answer(llm, "question")
    stop = threading.Event()

    def run() -> int:
        count = 0
        while not stop.is_set():
            assert answer(llm, "question") == expected
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(run) for _ in range(2)]
        try:
            for delay in (0.01, 0.05, 0.1):
                timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
                timer.start()
                with pytest.raises(KeyboardInterrupt):
                    llm.generate(["a"] * 8, ENDLESS, use_tqdm=False)
                timer.join()
                assert answer(llm, "question") == expected
        finally:
            stop.set()
        assert all(one.result(timeout=60) for one in others)
    assert not llm.engine.has_work()


@pytest.mark.usefixtures("interruptible")
def test_own_signal_handlers_run_after_the_step(llm, monkeypatch):
    class Stop(BaseException):
        pass

    def stop(_number: int, _frame: object) -> None:
        raise Stop

    step, completed = llm.engine.step, []

    def interrupted_step():
        os.kill(os.getpid(), signal.SIGINT)
        completed.append(step())
        return completed[-1]

    monkeypatch.setattr(llm.engine, "step", interrupted_step)
    signal.signal(signal.SIGINT, stop)
    with pytest.raises(Stop):
        llm.generate("a", ENDLESS, use_tqdm=False)
    assert len(completed) == 1
    assert signal.getsignal(signal.SIGINT) is stop
    assert not llm.engine.has_work()


def test_a_generator_collected_in_a_step_ends_later(llm, monkeypatch):
    stream = llm.stream(ask("abandoned"), ENDLESS)
    next(stream)
    held, step, unfinished = [stream], llm.engine.step, []
    del stream

    def collecting_step():
        held.clear()
        unfinished.append(len(llm.engine.inspect().requests))
        return step()

    monkeypatch.setattr(llm.engine, "step", collecting_step)
    assert answer(llm, "question")
    assert unfinished[:2] == [2, 1], "a step never changes under the engine"
    assert not llm.engine.has_work()


def test_a_lazy_model_is_loaded_once_by_threads(folder, monkeypatch):
    import vlmserve.engine

    loaded, create = [], vlmserve.engine.create_engine

    def slow_create(*args):
        loaded.append(args)
        time.sleep(0.05)
        return create(*args)

    monkeypatch.setattr(vlmserve.engine, "create_engine", slow_create)
    llm = LLM(str(folder), engine="mock", load="lazy")
    in_threads(4, lambda number: answer(llm, f"question {number}"))
    assert len(loaded) == 1


def test_threads_get_the_adapters_that_they_ask_for(tmp_path):
    """Two paths under one name, from two threads at the same time."""
    options = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "8MiB", "enable_lora": True}
    llm = LLM(str(make_llama(tmp_path / "base", max_position_embeddings=512)), **options)
    adapters = [LoRARequest("same", 1, str(write_adapter(tmp_path / str(one), one))) for one in (1, 2)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def ids(adapter: LoRARequest | None) -> list[int]:
        return llm.generate("How many?", params, use_tqdm=False, lora_request=adapter)[0].outputs[0].token_ids

    expected = [LLM.generate(llm, "How many?", params, False, lora_request=one)[0].outputs[0].token_ids
                for one in adapters]  # fmt: skip
    assert expected[0] != expected[1]
    answers = in_threads(4, lambda thread: [ids(adapters[thread % 2]) for _ in range(4)])
    assert answers == [[expected[thread % 2]] * 4 for thread in range(4)]
    both = llm.generate(["How many?"] * 2, params, False, lora_request=adapters)
    assert [one.outputs[0].token_ids for one in both] == expected
    with pytest.raises(AdapterError, match="no folder"):
        ids(LoRARequest("same", 1, "/nowhere"))
    assert ids(adapters[0]) == expected[0]


def test_close_ends_the_calls_of_threads(folder):
    llm = LLM(str(folder), engine="mock", mock_tpot=0.002)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(llm.generate, "long", ENDLESS, use_tqdm=False) for _ in range(2)]
        wait_until(lambda: llm.engine.stats().num_running >= 2)
        llm.close()
        for one in running:
            with pytest.raises(UnavailableError, match="closed"):
                one.result(timeout=60)
    for call in (lambda: answer(llm, "more"), lambda: next(llm.stream(ask("more"))), lambda: llm.engine):
        with pytest.raises(UnavailableError, match="this LLM is closed; create another one"):
            call()
    llm.close()
    with LLM(str(folder), engine="mock") as other:
        assert answer(other, "question")
    with pytest.raises(UnavailableError):
        answer(other, "question")


@pytest.fixture
def no_other_collection():
    """`gc.collect` does nothing while another thread collects."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_other_collection")
@pytest.mark.parametrize("closes", [True, False], ids=["closed", "deleted"])
def test_its_memory_is_given_back(tmp_path, closes):
    llm = LLM(str(make_llama(tmp_path)), dtype="float32", device="cpu", kv_cache_memory="1MiB")
    weight = weakref.ref(llm.engine.runner.model.language_model)
    assert answer(llm, "question")
    if closes:
        llm.close()
    else:
        del llm
        gc.collect()
    assert weight() is None


def in_fork(run) -> str:
    """What a forked process says of `run`: the name of its error and the message, or what it returns."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            try:
                said = str(run())
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_of_a_loaded_model_raises(folder, llm):
    calls = [lambda: answer(llm, "question"), lambda: next(llm.stream(ask("question"))), lambda: llm.engine]
    for call in calls:
        said = in_fork(call)
        assert said.startswith(f"ForkError: process {os.getpid()} loaded this LLM")
        assert said.endswith("create an LLM in each process")
    assert answer(llm, "question")
    lazy = LLM(str(folder), engine="mock", load="lazy")
    assert in_fork(lambda: answer(lazy, "question")) == str(answer(llm, "question"))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_async_models_raise_in_other_loops(folder):
    async def use(llm: AsyncLLM) -> str:
        return (await llm.chat(ask("question"), GREEDY))[0].text

    async def stream(llm: AsyncLLM) -> str:
        return "".join([piece async for piece in llm.stream(ask("question"), GREEDY)])

    async def main() -> None:
        async with AsyncLLM(str(folder), engine="mock") as llm:
            assert await use(llm) == await stream(llm)
            for call in (use, stream):
                with ThreadPoolExecutor(1) as pool, pytest.raises(UnavailableError, match="another event loop"):
                    await asyncio.get_running_loop().run_in_executor(pool, asyncio.run, call(llm))
                said = in_fork(lambda: asyncio.new_event_loop().run_until_complete(call(llm)))  # noqa: B023
                assert "started this AsyncLLM and cannot share it" in said, said

    asyncio.run(main())


def test_a_running_event_loop_may_use_it(folder):
    """As cells of a notebook do."""

    async def cell() -> None:
        with LLM(str(folder), engine="mock") as llm, LLM(str(folder), engine="mock") as other:
            assert answer(llm, "question") == answer(other, "question")

    asyncio.run(cell())

"""What only the mock engine does: text without a model, at a settable speed."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import wait

import pytest
from tokenizers import Tokenizer

from tests.mock_checkpoint import make_mock_checkpoint
from vlmserve.engine import mock
from vlmserve.engine.mock import MockEngine
from vlmserve.errors import CheckpointNotFoundError, ConfigurationError
from vlmserve.settings.config import EngineConfig
from vlmserve.types import EngineRequest, Grammar, Prompt, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_mock_checkpoint(tmp_path_factory.mktemp("mock"))


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only while the engine sleeps."""

    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

        def time(self) -> float:
            return 1e9 + self.now

        def sleep(self, seconds: float) -> None:
            assert seconds >= 0
            self.now += seconds

    fake = Clock()
    monkeypatch.setattr(mock, "time", fake)
    return fake


def add(engine: MockEngine, name: str = "a", max_tokens: int = 5) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add(EngineRequest(name, Prompt([5, 6]), params))


def arrivals(engine: MockEngine, clock) -> dict[str, list[float]]:
    """When each request's tokens came."""
    times: dict[str, list[float]] = {}
    while engine.has_work():
        for output in engine.step():
            times.setdefault(output.request_id, []).extend([clock.now] * len(output.token_ids))
    return times


def test_its_answers_are_words_of_the_checkpoints_tokenizer(folder):
    engine = MockEngine(EngineConfig(engine="mock"), folder)
    engine.add(EngineRequest("a", Prompt([5, 6]), SamplingParams(temperature=0)))
    tokens = []
    while engine.has_work():
        tokens += [token for output in engine.step() for token in output.token_ids]
    words = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens).split()
    assert len(words) >= 4
    assert set(words) <= set(mock.WORDS.split())


def test_tokens_come_at_the_speed_that_was_set(folder, clock):
    engine = MockEngine(EngineConfig(engine="mock", mock_ttft=1.0, mock_tpot=0.25), folder)
    start = clock.now
    add(engine)
    times = arrivals(engine, clock)["a"]
    assert times[0] - start == pytest.approx(1.0, abs=0.25)
    assert [after - before for before, after in itertools.pairwise(times)] == pytest.approx([0.25] * 4)


def test_mock_steps_take_equally_long(folder, clock):
    engine = MockEngine(EngineConfig(engine="mock", mock_tpot=0.1), folder)
    for number in range(50):
        add(engine, str(number))
    start = clock.now
    arrivals(engine, clock)
    assert clock.now - start == pytest.approx(4 * 0.1, abs=0.06)


def test_work_between_steps_does_not_slow_it_down(folder, clock):
    engine = MockEngine(EngineConfig(engine="mock", mock_tpot=0.1), folder)
    add(engine, max_tokens=50)
    start = clock.now
    while engine.has_work():
        engine.step()
        clock.now += 0.05
    assert clock.now - start == pytest.approx(50 * 0.1, abs=0.2)


def test_a_finished_request_says_where_its_time_went(folder, clock):
    engine = MockEngine(EngineConfig(engine="mock", mock_ttft=1.0, mock_tpot=0.25, max_num_seqs=1), folder)
    add(engine, "a")
    add(engine, "b")
    timings = {}
    while engine.has_work():
        for output in engine.step():
            timings[output.request_id] = output.timings
    assert timings["a"].queue == 0
    assert timings["a"].arrived == timings["b"].arrived == pytest.approx(1e9 + 100)
    assert timings["b"].queue == pytest.approx(timings["a"].prefill + timings["a"].decode)
    assert timings["b"].prefill == pytest.approx(1.0, abs=0.25)
    assert timings["b"].decode == pytest.approx(4 * 0.25)


def test_a_long_first_wait_blocks_no_step(folder, clock):
    engine = MockEngine(EngineConfig(engine="mock", mock_ttft=60.0), folder)
    add(engine)
    start = clock.now
    assert engine.step() == []
    assert clock.now - start <= 0.1
    engine.abort(["a"])
    assert not engine.has_work()


def test_decoding_continues_while_others_wait(folder, clock):
    engine = MockEngine(EngineConfig(engine="mock", mock_ttft=1.0, mock_tpot=0.1), folder)
    add(engine, "a", max_tokens=30)
    while not engine.step():
        pass
    add(engine, "b")
    times = arrivals(engine, clock)
    gaps = [after - before for before, after in itertools.pairwise(times["a"])]
    assert gaps == pytest.approx([0.1] * len(gaps))


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"tokenizer\.json"):
        MockEngine(EngineConfig(engine="mock"), tmp_path)


def test_a_context_beyond_the_model_is_an_error(folder):
    with pytest.raises(ConfigurationError, match="max-model-len"):
        MockEngine(EngineConfig(engine="mock", max_model_len=10**6), folder)


def test_evicted_grammar_compiles_outside_of_the_step(folder, monkeypatch):
    engine = MockEngine(EngineConfig(engine="mock", grammar_cache=1), folder)
    for grammar in (Grammar.choice(["one"]), Grammar.choice(["two"])):
        engine.grammars.check(grammar)  # as the engine process does before it adds a request
    release, threads = threading.Event(), []
    compile_one = engine.grammars.compile_one

    def record(grammar: Grammar):
        threads.append(threading.current_thread())
        assert release.wait(60)
        return compile_one(grammar)

    monkeypatch.setattr(engine.grammars, "compile_one", record)
    params = SamplingParams(temperature=0, grammar=Grammar.choice(["one"]))
    engine.add(EngineRequest("held", Prompt([5, 6]), params))
    add(engine, "plain")
    outputs = [output for _ in range(9) for output in engine.step()]
    assert {output.request_id for output in outputs} == {"plain"}
    release.set()
    while engine.has_work():
        outputs += engine.step()
    assert outputs[-1].request_id == "held"
    assert outputs[-1].finish_reason == "stop"
    assert threading.current_thread() not in threads


def test_aborted_request_frees_the_grammar_threads(folder, monkeypatch):
    engine = MockEngine(EngineConfig(engine="mock", grammar_cache=1), folder)
    grammars = [Grammar.choice([str(number)]) for number in range(9)]
    for grammar in grammars:
        engine.grammars.check(grammar)
    release, compiled = threading.Event(), []
    monkeypatch.setattr(engine.grammars, "compile_one", lambda grammar: compiled.append(grammar) or release.wait(60))
    names = [f"r{number}" for number in range(8)]
    for name, grammar in zip(names, grammars, strict=False):
        engine.add(EngineRequest(name, Prompt([5, 6]), SamplingParams(grammar=grammar)))
    futures = [engine.unfinished[name].compiled for name in names]
    engine.abort(names)
    release.set()
    wait(futures, 60)
    assert len(compiled) < len(names)

"""Grammars whose masks and ends take long to compute."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_llama
from tests.engine.test_memory import out_of_memory
from tests.engine.test_structured import PERSON, engine_of, mixed, request_of, run, tokens
from tests.static_device import replace_cpus
from vlmserve.engine.engine import Engine
from vlmserve.runner import sampling
from vlmserve.sampling.grammar import Matcher
from vlmserve.steps import SchedulerOutput
from vlmserve.types import EngineRequest, Grammar

LIMIT = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


def answer(engine: Engine, request: EngineRequest) -> list[int]:
    """Step the engine until a request has ended."""
    engine.add(request)
    found: list[int] = []
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        for output in engine.step():
            if output.request_id == request.request_id:
                found += output.token_ids
                if output.finish_reason is not None:
                    return found
    raise AssertionError("the request did not end")


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Masks of answers with a limit of 77 tokens wait for this event."""
    release = threading.Event()
    allowed = Matcher.allowed

    def wait(self: Matcher, *ends: Any, left: int | None = None, **options: Any) -> Any:
        if left == 77:
            release.wait(LIMIT)
        return allowed(self, *ends, left=left, **options)

    monkeypatch.setattr(Matcher, "allowed", wait)
    yield release
    release.set()


def test_slow_mask_holds_up_no_other_request(folder: Path, blocked: threading.Event) -> None:
    request = request_of("slow", Grammar.json(PERSON), max_tokens=77)
    blocked.set()
    expected = tokens(run(engine_of(folder), [request])["slow"])
    blocked.clear()
    engine = engine_of(folder)
    engine.add(request)
    answer(engine, request_of("plain", None, max_tokens=10))
    assert engine.inspect().requests[0].num_tokens == 20
    blocked.set()
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert tokens(outputs) == expected
    assert outputs[-1].finish_reason is not None
    assert outputs[0].timings is not None


@pytest.mark.parametrize("samples_asynchronously", [False, True])
def test_plain_requests_do_not_starve_grammars(
    folder: Path, samples_asynchronously: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if samples_asynchronously:
        replace_cpus(monkeypatch)
    allowed = Matcher.allowed

    def slow(self: Matcher, *ends: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return allowed(self, *ends, **options)

    monkeypatch.setattr(Matcher, "allowed", slow)
    monkeypatch.setattr("vlmserve.sampling.guide.QUICK_SECONDS", 0.0)
    engine = engine_of(folder)
    engine.add(request_of("grammar", Grammar.regex("[a-z]{8}")))
    num_plain, plain_runs, ended = 0, False, False
    deadline = time.monotonic() + LIMIT
    while not ended and time.monotonic() < deadline:
        if not plain_runs:
            engine.add(request_of(f"plain {num_plain}", None, ignore_eos=True))
            num_plain, plain_runs = num_plain + 1, True
        for output in engine.step():
            ends = output.finish_reason is not None
            ended = ended or (ends and output.request_id == "grammar")
            plain_runs = plain_runs and not (ends and output.request_id != "grammar")
    assert ended


def test_steps_without_tokens_sample_late_rows(folder: Path, blocked: threading.Event) -> None:
    engine = engine_of(folder)
    engine.add(request_of("slow", Grammar.json(PERSON), max_tokens=77))
    assert engine.step() == []
    blocked.set()
    deadline = time.monotonic() + LIMIT
    sampled: dict[str, list[int]] = {}
    while not sampled and time.monotonic() < deadline:
        sampled = engine.runner.submit(SchedulerOutput()).result().token_ids
    assert len(sampled["slow"]) == 1


def test_late_rows_without_memory_fail_alone(
    folder: Path, blocked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(folder)
    engine.add(request_of("slow", Grammar.json(PERSON), max_tokens=77))
    assert engine.step() == []
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "sample", out_of_memory)
        blocked.set()
        outputs = []
        while engine.has_work():
            outputs += engine.step()
    [failed] = outputs
    assert "too little memory" in str(failed.error)
    assert engine.stats().kv_blocks_used == 0
    assert len(answer(engine, request_of("plain", None, max_tokens=10))) == 10


def test_quick_masks_need_no_other_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    allowed = Matcher.allowed

    def record(self: Matcher, *ends: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return allowed(self, *ends, **options)

    monkeypatch.setattr(Matcher, "allowed", record)
    monkeypatch.setattr("vlmserve.sampling.guide.QUICK_SECONDS", 60.0)
    run(engine_of(folder), [request_of("quick", Grammar.regex("[a-z]{20}"), max_tokens=30)])
    assert threads[0] is not threading.current_thread()
    assert threads[-1] is threading.current_thread()
    threads.clear()
    monkeypatch.setattr("vlmserve.sampling.guide.QUICK_SECONDS", 0.0)
    run(engine_of(folder), [request_of("slow", Grammar.regex("[a-z]{20}"), max_tokens=30)])
    assert threading.current_thread() not in threads


def run_with_failure(engine: Engine) -> str:
    """Run a JSON request that fails, and others that end. Returns its error."""
    others = [request_of("regex", Grammar.regex("[a-z]{8}")), request_of("plain", None)]
    outputs = run(engine, [request_of("json", Grammar.json(PERSON), max_tokens=77), *others])
    [error] = [output.error for output in outputs["json"] if output.error is not None]
    assert outputs["json"][-1].finish_reason == "error"
    assert all(outputs[other.request_id][-1].finish_reason in ("stop", "length") for other in others)
    assert not engine.has_work()
    return error


@pytest.mark.parametrize("quick_seconds", [0.0, 60.0])
@pytest.mark.parametrize("method", ["allowed", "settle", "advance"])
def test_exceptions_of_a_grammar_fail_its_request(
    folder: Path, method: str, quick_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_calls = 0
    run_method = getattr(Matcher, method)

    def fail(self: Matcher, *values: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += self.closes
        if num_calls >= 6 and self.closes:
            raise MemoryError
        return run_method(self, *values, **options)

    monkeypatch.setattr("vlmserve.sampling.guide.QUICK_SECONDS", quick_seconds)
    monkeypatch.setattr(Matcher, method, fail)
    assert "log" in run_with_failure(engine_of(folder))


def test_missing_threads_fail_one_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    num_failed = 0

    def fail(thread: threading.Thread) -> None:
        nonlocal num_failed
        if thread.name == "grammar-masks" and not num_failed:
            num_failed += 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert "too few threads" in run_with_failure(engine_of(folder))


def test_request_with_a_slow_mask_can_be_aborted(folder: Path, blocked: threading.Event) -> None:
    engine = engine_of(folder)
    used = engine.stats().kv_blocks_used
    engine.add(request_of("slow", Grammar.json(PERSON), max_tokens=77))
    engine.step()
    engine.abort(["slow"])
    again = request_of("slow", None, max_tokens=10)
    blocked.set()
    assert len(answer(engine, again)) == 10
    assert engine.stats().kv_blocks_used == used
    assert not engine.has_work()


@pytest.mark.parametrize("settings", [{}, {"kv_cache_memory": "tight", "max_model_len": 160}])
def test_answers_of_later_steps_are_the_same(
    folder: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [*mixed(60), request_of("cut", Grammar.json(PERSON), 3, max_tokens=25, logprobs=2)]
    plain = engine_of(folder)
    expected = {name: tokens(outputs) for name, outputs in run(plain, requests).items()}
    if settings:
        settings = {**settings, "kv_cache_memory": 12 * plain.info.kv_cache_bytes // plain.stats().kv_blocks_total}
    monkeypatch.setattr("vlmserve.runner.sampling.PATIENCE", 0.0)
    engine = engine_of(folder, **settings)
    outputs = run(engine, requests)
    assert {name: tokens(parts) for name, parts in outputs.items()} == expected
    assert sum(len(part.logprobs or ()) for part in outputs["cut"]) == len(expected["cut"])
    assert not settings or engine.stats().preemptions > 0


def test_evicted_grammar_compiles_outside_of_the_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(folder, grammar_cache=1)
    threads = []
    compile_one = engine.grammars.compile_one

    def record(grammar: Grammar) -> Any:
        threads.append(threading.current_thread())
        return compile_one(grammar)

    for number in range(3):
        engine.add(request_of(f"r{number}", Grammar.choice([f"word {number}"])))
    monkeypatch.setattr(engine.grammars, "compile_one", record)
    while engine.has_work():
        engine.step()
    assert len(threads) >= 2
    assert threading.current_thread() not in threads


def test_grammars_to_keep_are_limited_by_their_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(folder, grammar_cache_memory=5000)
    monkeypatch.setattr("vlmserve.sampling.grammar.resident_memory", lambda: 0)
    grammars = [Grammar.choice([letter * 8]) for letter in "abcdef"]
    for grammar in grammars:
        engine.grammars.check(grammar)
    kept = list(engine.grammars.kept.values())
    assert 1 <= len(kept) < len(grammars)
    assert sum(one.num_bytes for one in kept) <= 5000
    assert all(map(engine.grammars.is_known, grammars))

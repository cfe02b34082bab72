"""Grammars that would compile for too long, or with too much memory."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.prompt.tokenizers_for_tests import byte_level, write_checkpoint
from tests.rendering import fork_servers, rendering
from tests.waiting import until, wait_until
from vlmserve.cancellation import run_in_thread
from vlmserve.engine.compiling import CompilingRequests
from vlmserve.errors import InvalidRequestError
from vlmserve.media.fork_server import ForkServer, end_servers
from vlmserve.media.isolated import IsolatedProcess
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.sampling.deep_stack import in_deep_stack, stack_size
from vlmserve.sampling.grammar import LARGE_GRAMMAR, NICENESS, GrammarCompiler
from vlmserve.sampling.trials import QUICK_SECONDS, GrammarTrials, SlowGrammarError
from vlmserve.settings.config import EngineConfig
from vlmserve.types import EngineRequest, Grammar, Prompt, SamplingParams

ENDLESS = Grammar.json({"allOf": [{"type": "string", "pattern": f"^.*a{number}.*$"} for number in range(20)]})
"""llguidance compiles this without end, and takes 150 MiB more memory each second."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("trials"), byte_level())


def trials(folder: Path, **settings) -> GrammarTrials:
    return GrammarTrials(folder, EngineConfig.model_validate({"max_grammar_seconds": 1, **settings}))


def test_endless_grammar_is_killed(folder):
    began = time.monotonic()
    with pytest.raises(SlowGrammarError, match="grammar takes more than 1 s to compile") as refusal:
        trials(folder).check(ENDLESS)
    assert refusal.value.param == "grammar"
    assert time.monotonic() - began < 60


def test_large_grammar_is_killed(folder):
    with pytest.raises(InvalidRequestError, match="more than 32 MiB of memory"):
        trials(folder, max_grammar_seconds=30, max_grammar_memory=32 * 1024**2).check(ENDLESS)


async def test_small_grammar_passes_while_others_compile(folder):
    tried = trials(folder, max_grammar_seconds=60, max_grammar_memory=3 * 1024**3)
    tried.check(Grammar.regex("warm"))
    wait_until(lambda: not rendering())
    with ThreadPoolExecutor(1) as pool:
        slow = asyncio.ensure_future(run_in_thread(pool, lambda: tried.check(ENDLESS)))
        await asyncio.to_thread(wait_until, rendering)
        for number in range(3):
            grammar = Grammar.regex(f"[a-z]{{{number + 1}}}")
            assert not tried.passed(grammar)
            await asyncio.to_thread(tried.check, grammar)
            assert tried.passed(grammar)
        assert not slow.done()
        slow.cancel()


def test_oversized_object_fails_before_the_engine(folder):
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1000)}}
    with pytest.raises(InvalidRequestError, match="grammar: it is too complex to compile"):
        trials(folder, max_grammar_seconds=30).check(Grammar.json(schema))


def test_quick_grammar_may_wait_for_a_core(folder, monkeypatch):
    class Paused(IsolatedProcess):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            os.kill(self.pid, signal.SIGSTOP)
            threading.Timer(3 * QUICK_SECONDS, os.kill, (self.pid, signal.SIGCONT)).start()

    tried = trials(folder)
    tried.check(Grammar.regex("warm"))
    monkeypatch.setattr("vlmserve.sampling.trials.IsolatedProcess", Paused)
    tried.check(Grammar.regex("quick"), quick=True)
    assert tried.passed(Grammar.regex("quick"))


async def test_cancelled_caller_frees_its_thread(folder, monkeypatch):
    begun = threading.Event()

    class Watched(IsolatedProcess):
        def open(self, data, *arguments):
            begun.set()
            return super().open(data, *arguments)

    monkeypatch.setattr("vlmserve.sampling.trials.IsolatedProcess", Watched)
    tried = trials(folder, max_grammar_seconds=60, max_grammar_memory=3 * 1024**3)
    with ThreadPoolExecutor(1) as pool:
        check = asyncio.ensure_future(run_in_thread(pool, lambda: tried.check(ENDLESS)))
        await until(begun.is_set)
        check.cancel()
        await asyncio.wait_for(run_in_thread(pool, lambda: None), 10)


def test_process_starts_before_the_first_grammar(folder):
    end_servers()
    tried = trials(folder)
    assert fork_servers() == []
    tried.start()
    [started] = fork_servers()
    tried.check(Grammar.regex("a+"))
    assert fork_servers() == [started]


def test_verdict_is_kept_without_its_source(folder, monkeypatch):
    def start(*_):
        raise AssertionError("the second verdict needs no process")

    tried = trials(folder)
    broken = Grammar("regex", "(", source="guided_regex")
    for grammar in (broken, Grammar("regex", "(", source="structured_outputs.regex")):
        with pytest.raises(InvalidRequestError, match=rf"^{grammar.source}: (.|\n)*unclosed group") as refusal:
            tried.check(grammar)
        assert refusal.value.param == grammar.source
        monkeypatch.setattr("vlmserve.sampling.trials.IsolatedProcess", start)


def test_requests_wait_for_their_grammars_only(folder):
    grammars = GrammarCompiler(lambda: Tokenizer.from_folder(folder), max_bytes=1000, cache_size=4)
    compiling = CompilingRequests(grammars)

    def request(name: str, pattern: str | None) -> EngineRequest:
        grammar = None if pattern is None else Grammar.regex(pattern)
        return EngineRequest(name, Prompt([1]), SamplingParams(grammar=grammar))

    ready = compiling.hold([request("plain", None), request("a", "a+"), request("dropped", "b+")])
    assert [one.request_id for one in ready] == ["plain"]
    compiling.abort(["dropped"])
    released: list[EngineRequest] = []

    def all_are_released() -> bool:
        released.extend(one.request for one in compiling.release())
        return not compiling

    wait_until(all_are_released)
    assert [one.request_id for one in released] == ["a"]
    assert grammars.is_known(Grammar.regex("a+"))
    assert [one.request_id for one in compiling.hold([request("again", "a+")])] == ["again"]
    assert not compiling.hold([request("broken", "(")])
    broken: list[Any] = []
    wait_until(lambda: broken.extend(compiling.release()) or broken)
    assert isinstance(broken[0].error, InvalidRequestError)
    compiling.close()


def test_small_grammars_overtake_large_ones(folder, monkeypatch):
    nice: dict[int, int] = {}

    class Watched(IsolatedProcess):
        def open(self, data, *arguments):
            answer = super().open(data, *arguments)
            nice[len(data)] = os.getpriority(os.PRIO_PROCESS, self.pid)
            return answer

    monkeypatch.setattr("vlmserve.sampling.trials.IsolatedProcess", Watched)
    # A process also gets a lower priority, from outside, when it has taken long: on a busy machine, all do.
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    monkeypatch.setattr("vlmserve.sampling.trials.QUICK_SECONDS", 10.0)
    tried = trials(folder)
    for length, quick in ((5, True), (LARGE_GRAMMAR, True), (LARGE_GRAMMAR + 1, True), (6, False)):
        tried.check(Grammar.regex("a" * length), quick=quick)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    lower = min(19, own + NICENESS)
    assert nice == {5: own, LARGE_GRAMMAR: own, LARGE_GRAMMAR + 1: lower, 6: lower}


def test_verdict_precedes_the_end_of_its_process(folder, monkeypatch):
    tried = trials(folder)
    tried.check(Grammar.regex("first"))
    with monkeypatch.context() as patch:
        patch.setattr(ForkServer, "end", lambda *_: pytest.fail("waited"))
        tried.check(Grammar.regex("second"))
    assert tried.passed(Grammar.regex("second"))
    wait_until(lambda: not rendering())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_large_grammars_compile_at_lower_engine_priority():
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = nice()
    assert in_deep_stack(nice, stack_size(0), NICENESS) == min(19, own + NICENESS)
    assert in_deep_stack(nice, stack_size(0)) == nice() == own


def test_grammar_compiles_where_priorities_cannot_change(monkeypatch):
    def forbid(*_: int) -> None:
        raise PermissionError

    for name in ("nice", "setpriority"):
        monkeypatch.setattr(os, name, forbid)
    assert in_deep_stack(lambda: "compiled", stack_size(0), NICENESS) == "compiled"


def test_abort_of_the_compiler_is_reported(folder, monkeypatch):
    class Aborted(IsolatedProcess):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            os.kill(self.pid, signal.SIGABRT)

    monkeypatch.setattr("vlmserve.sampling.trials.IsolatedProcess", Aborted)
    with pytest.raises(
        InvalidRequestError, match="guided_regex made the compiler abort, usually because it takes more than"
    ):
        trials(folder).check(Grammar("regex", "a", source="guided_regex"))

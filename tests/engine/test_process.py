"""The loop of the engine process, and the process itself."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import zmq

from tests.mock_checkpoint import make_mock_checkpoint
from vlmserve.cache.blocks import BlockPool
from vlmserve.engine import process
from vlmserve.engine.base import BaseEngine
from vlmserve.engine.child import child_environment
from vlmserve.engine.messages import (
    Abort,
    Accepted,
    Add,
    Failed,
    Fatal,
    FromEngine,
    Inspect,
    Inspected,
    MapBlocks,
    Mapped,
    Outputs,
    Ready,
    Shutdown,
    ToEngine,
    decode_from_engine,
    encode,
)
from vlmserve.engine.process import EngineProcess, serve_engine
from vlmserve.errors import InvalidRequestError
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.sampling.grammar import GrammarCompiler
from vlmserve.settings.config import EngineConfig
from vlmserve.types import BlockMap, EngineOutput, EngineRequest, EngineSnapshot, EngineStats, Prompt


def read_no_tokenizer() -> Tokenizer:
    raise AssertionError("no request has a grammar")


class CountingEngine(BaseEngine):
    """Answers every request with one token a step, for as many steps as its prompt says."""

    def __init__(self) -> None:
        self._grammars = GrammarCompiler(read_no_tokenizer, max_bytes=1000, cache_size=1)
        self.left: dict[str, int] = {}
        self.polled = 0
        self.broken = False

    def add(self, request: EngineRequest) -> None:
        if request.request_id in self.left:
            raise InvalidRequestError("in use", param="request_id")
        self.left[request.request_id] = request.prompt.token_ids[0]

    def step(self) -> list[EngineOutput]:
        if self.broken:
            raise RuntimeError("no memory")
        time.sleep(0.002)
        outputs = []
        for name in list(self.left):
            self.left[name] -= 1
            outputs.append(EngineOutput(name, [1], None if self.left[name] else "length"))
        self.left = {name: left for name, left in self.left.items() if left}
        return outputs

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.left.pop(request_id, None)

    def has_work(self) -> bool:
        self.polled += 1
        return bool(self.left)

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.left))

    def inspect(self) -> EngineSnapshot:
        return EngineSnapshot(self.stats(), [])

    def map_blocks(self) -> BlockMap:
        return BlockPool(4).draw_map(2)


class Peer:
    """The frontend's end of a loop that runs in a thread."""

    def __init__(self) -> None:
        self.engine = CountingEngine()
        self.error: Exception | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.RCVTIMEO, 60_000)
        self._socket.bind("inproc://loop")
        self._engine_socket = self._context.socket(zmq.PAIR)
        self._engine_socket.connect("inproc://loop")
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            serve_engine(self.engine, self._engine_socket)
        except Exception as error:
            self.error = error

    def send(self, message: ToEngine) -> None:
        self._socket.send_multipart(encode(message))

    def add(self, name: str, steps: int) -> None:
        self.send(Add([EngineRequest(name, Prompt([steps]))]))

    def receive(self) -> FromEngine:
        return decode_from_engine(self._socket.recv())

    def close(self) -> None:
        if self.thread.is_alive():
            self.send(Shutdown())
        self.thread.join(60)
        self._context.destroy(linger=0)


@pytest.fixture
def peer():
    peer = Peer()
    yield peer
    peer.close()


def test_a_request_is_answered_step_by_step(peer):
    peer.add("a", 2)
    assert peer.receive() == Accepted(["a"])
    assert peer.receive() == Outputs([EngineOutput("a", [1])], EngineStats(num_running=1))
    assert peer.receive() == Outputs([EngineOutput("a", [1], "length")], EngineStats())


def test_a_refusal_concerns_that_request_alone(peer):
    peer.add("a", 3)
    peer.add("a", 3)
    messages = [peer.receive() for _ in range(5)]
    [failed] = [message for message in messages if isinstance(message, Failed)]
    assert failed.request_id == "a"
    assert str(failed.failure.error()) == "in use"
    assert sum(isinstance(message, Outputs) for message in messages) == 3


def test_requests_of_one_message_are_independent(peer):
    peer.send(Add([EngineRequest(name, Prompt([1])) for name in ("a", "b", "a", "c")]))
    failed, accepted, outputs = (peer.receive() for _ in range(3))
    assert isinstance(failed, Failed)
    assert failed.request_id == "a"
    assert accepted == Accepted(["a", "b", "c"])
    assert isinstance(outputs, Outputs)
    assert [output.request_id for output in outputs.outputs] == ["a", "b", "c"]


def test_an_abort_takes_effect_within_a_step(peer):
    peer.add("a", 60_000)
    while not isinstance(peer.receive(), Outputs):
        pass
    peer.send(Abort(["a"]))
    while (message := peer.receive()) != Outputs([], EngineStats()):
        assert isinstance(message, Outputs)
    assert not peer.engine.left


def test_memory_is_told_idle_and_at_work(peer):
    peer.send(Inspect())
    assert peer.receive() == Inspected(EngineSnapshot(EngineStats(), []))
    peer.send(MapBlocks())
    assert peer.receive() == Mapped(BlockMap(4, 2, [0, 0], [0, 0], [0, 0]))
    peer.add("a", 60_000)
    while not isinstance(peer.receive(), Outputs):
        pass
    peer.send(Inspect())
    while isinstance(message := peer.receive(), Outputs):
        pass
    assert message == Inspected(EngineSnapshot(EngineStats(num_running=1), []))


def test_it_blocks_while_there_is_nothing_to_do(peer):
    peer.add("a", 1)
    assert peer.receive() == Accepted(["a"])
    assert isinstance(peer.receive(), Outputs)
    time.sleep(0.02)
    polled = peer.engine.polled
    time.sleep(0.1)
    assert peer.engine.polled == polled


def test_an_exception_of_a_step_ends_the_loop(peer):
    peer.engine.broken = True
    peer.add("a", 1)
    peer.thread.join(60)
    assert isinstance(peer.error, RuntimeError)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_mock_checkpoint(tmp_path_factory.mktemp("mock"))


class Child:
    """An engine process with a plain socket to it."""

    def __init__(self, config: EngineConfig, folder) -> None:
        self.process = EngineProcess.launch(config, folder)
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PAIR)
        self.socket.set(zmq.RCVTIMEO, 60_000)
        self.socket.bind(self.process.endpoint)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)
        self.process.close()

    def receive(self) -> FromEngine:
        return decode_from_engine(self.socket.recv())


def test_the_process_exits_when_told(folder):
    with Child(EngineConfig(engine="mock", model="tiny"), folder) as child:
        ready = child.receive()
        assert isinstance(ready, Ready)
        assert ready.info.name == "tiny"
        child.socket.send_multipart(encode(Shutdown()))
        assert child.process.wait(60) == 0


def test_a_load_error_travels_with_its_class(tmp_path, capfd):
    with Child(EngineConfig(engine="mock"), tmp_path) as child:
        fatal = child.receive()
        assert isinstance(fatal, Fatal)
        assert fatal.failure.kind == "CheckpointNotFoundError"
        assert "tokenizer.json" in fatal.failure.message
        assert child.process.wait(60) == 1
    assert capfd.readouterr() == ("", "")


def test_a_bug_while_loading_logs_its_traceback(tmp_path, capfd):
    (tmp_path / "tokenizer.json").write_text("not a tokenizer")
    with Child(EngineConfig(engine="mock"), tmp_path) as child:
        fatal = child.receive()
        assert isinstance(fatal, Fatal)
        assert fatal.failure.kind == "ModelLoadError"
        assert child.process.wait(60) == 1
    assert "Traceback" in capfd.readouterr().err


def test_the_process_exits_with_its_parent(folder, monkeypatch):
    started, start = [], process.start_module
    monkeypatch.setattr(process, "start_module", lambda *args: started.append(start(*args)) or started[-1])
    with Child(EngineConfig(engine="mock", mock_tpot=30), folder) as child:
        assert isinstance(child.receive(), Ready)
        child.socket.send_multipart(encode(Add([EngineRequest("a", Prompt([5]))])))
        while not isinstance(child.receive(), Outputs):
            pass
        started[0].stdin.close()
        child.process.wait(60)


def test_closing_kills_it_and_removes_its_folder(folder):
    child = Child(EngineConfig(engine="mock"), folder)
    with child:
        assert isinstance(child.receive(), Ready)
        with pytest.raises(subprocess.TimeoutExpired):
            child.process.wait(0)
    assert child.process.returncode is not None
    assert not Path(child.process.endpoint.removeprefix("ipc://")).parent.exists()


def test_the_process_keeps_few_products(monkeypatch):
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "1000")
    environment = child_environment()
    assert environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"
    assert environment["LRU_CACHE_CAPACITY"] == "1000"

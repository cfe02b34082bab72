"""Gateways that share the limits of keys."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import httpx
import pytest

from tests.clock import Clock
from tests.scaleout.processes import TOKEN, Cluster
from tests.waiting import until, wait_until
from vlmserve.errors import StorageError
from vlmserve.scaleout import limits as limits_module
from vlmserve.scaleout.limits import ClusterLimits
from vlmserve.scaleout.member_messages import GatewayLaunch
from vlmserve.scaleout.settings import GatewayConfig
from vlmserve.server.accounts import Account
from vlmserve.server.errors import RefusedError
from vlmserve.server.keys import add_key, store
from vlmserve.settings.config import ServerConfig
from vlmserve.storage.limits import Taken
from vlmserve.storage.store import Store

REQUESTS, TOKENS = "key alice requests", "key alice tokens"


class Gateway:
    """What a gateway has of a key that may ask for 4 answers and 100 tokens a minute, and of one with two at once."""

    def __init__(self, url: str, clock: Clock) -> None:
        self.store = Store(url, ServerConfig(), clock)
        self.limits = ClusterLimits(self.store, clock)
        self.account = Account(store("key", "alice", requests_per_minute=4, tokens_per_minute=100), clock)
        self.pair = Account(store("other", "bob", max_concurrency=2), clock)

    async def admit(self, tokens: int = 0) -> bool:
        await self.limits.refresh(self.account)
        try:
            with self.account.admit():
                self.account.charge(tokens)
        except RefusedError:
            return False
        return True

    async def begin(self, stack: contextlib.ExitStack) -> bool:
        """A request of the key that may have two at once, which runs until the stack is closed."""
        await self.limits.refresh(self.pair)
        try:
            stack.enter_context(self.pair.admit())
        except RefusedError:
            return False
        return True

    async def written(self, requests: float, tokens: float = 0.0) -> None:
        """Until the database has so much that is used up."""
        nothing = [Taken(REQUESTS, 4, 0.0), Taken(TOKENS, 100, 0.0)]
        expected = pytest.approx({REQUESTS: requests, TOKENS: tokens})
        await until(lambda: asyncio.to_thread(lambda: self.store.limits.take(nothing) == expected))


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres").new_database())
    return f"sqlite:///{tmp_path / 'limits.db'}"


@pytest.fixture
async def gateways(url, monkeypatch):
    """Two gateways, and the clock of both. A request waits for the database for as long as it takes."""
    monkeypatch.setattr(limits_module, "PATIENCE", 60)
    monkeypatch.setattr(limits_module, "RETRY", 0.01)
    clock = Clock()
    first, second = Gateway(url, clock), Gateway(url, clock)
    yield first, second, clock
    await first.limits.close()
    await second.limits.close()


async def test_what_one_gateway_admits_another_one_does_not(gateways):
    first, second, clock = gateways
    assert await first.admit(tokens=30)
    assert await first.admit()
    await first.written(2, 30)
    assert await second.admit()
    assert second.account.headers()["x-ratelimit-remaining-requests"] == "1"
    assert second.account.headers()["x-ratelimit-remaining-tokens"] == "70"
    assert await second.admit(tokens=90)
    await first.written(4, 120)
    clock.now += 1
    assert not await first.admit()
    clock.now += 15
    assert await first.admit()
    await first.written(5 - 16 * 4 / 60, 120 - 16 * 100 / 60)
    assert not await second.admit()


async def test_request_waits_only_for_an_unused_key(gateways):
    first, _, clock = gateways

    def waits() -> bool:
        refreshing = first.limits.refresh(first.account)
        try:
            refreshing.send(None)
        except StopIteration:
            return False
        refreshing.close()
        return True

    assert waits()
    assert await first.admit()
    assert not waits()
    clock.now += 0.9
    assert not waits()
    await first.written(1 - 0.9 * 4 / 60)
    clock.now += 1
    assert waits()


async def test_gateways_count_alone_and_report_after_an_outage(gateways, monkeypatch):
    first, second, clock = gateways

    def away(taken):
        raise StorageError("away")

    take = first.store.limits.take
    monkeypatch.setattr(first.store.limits, "take", away)
    assert [await first.admit() for _ in range(5)] == [True] * 4 + [False]
    clock.now += 15
    assert await first.admit()
    monkeypatch.setattr(first.store.limits, "take", take)
    await second.written(4)
    assert not await second.admit()


async def test_a_database_that_hangs_holds_up_one_request(gateways, monkeypatch):
    monkeypatch.setattr(limits_module, "PATIENCE", 0.01)
    first, _, _ = gateways
    released = threading.Event()
    take = first.store.limits.take
    monkeypatch.setattr(first.store.limits, "take", lambda taken: (released.wait(60), take(taken))[1])
    with contextlib.ExitStack() as stack:
        stack.callback(released.set)
        assert await first.admit()
        monkeypatch.setattr(limits_module, "PATIENCE", 60)
        assert [await first.admit() for _ in range(4)] == [True] * 3 + [False]
    await first.written(4)


async def test_debts_repaid_in_an_outage_are_not_owed(gateways):
    first, _, clock = gateways
    account = first.account
    account.charge(100)
    clock.now += 30
    assert account.buckets["tokens"].tell() == 50
    account.charge(10)
    account.buckets["tokens"].hear(70)
    assert account.buckets["tokens"].level == 20


async def test_requests_at_once_are_counted_over_all_gateways(gateways):
    first, second, clock = gateways
    with contextlib.ExitStack() as one, contextlib.ExitStack() as other, contextlib.ExitStack() as third:
        assert await first.begin(one)
        assert await second.begin(other)
        assert not await first.begin(third)
        assert not await second.begin(third)
        one.close()
        await until(lambda: second.begin(third))
        assert not await first.begin(one)
        clock.now += 3600
        assert not await second.begin(third), "its own requests run, however late it renews its places"


async def test_concurrent_arrivals_respect_the_key_limit(gateways):
    first, second, _ = gateways
    with contextlib.ExitStack() as stack:
        begun = await asyncio.gather(*(gateway.begin(stack) for gateway in (first, second) * 5))
        assert sum(begun) <= 2
        assert first.pair.num_running + second.pair.num_running == sum(begun)


async def test_slots_of_a_gone_gateway_return(gateways, monkeypatch):
    first, second, clock = gateways
    writing, is_gone, hold = threading.Lock(), threading.Event(), first.store.limits.hold

    def hold_until_gone(*args):
        with writing:
            if is_gone.is_set():
                raise StorageError("gone")
            return hold(*args)

    monkeypatch.setattr(first.store.limits, "hold", hold_until_gone)
    with contextlib.ExitStack() as lost, contextlib.ExitStack() as stack:
        assert await first.begin(lost)
        assert await first.begin(lost)
        assert not await second.begin(stack)
        with writing:
            is_gone.set()
        clock.now += 16
        assert await second.begin(stack)
        assert await second.begin(stack)
        assert not await second.begin(stack)


async def test_a_gateway_that_ends_gives_its_places_back(gateways, url):
    first, _, clock = gateways
    leaving = Gateway(url, clock)
    with contextlib.ExitStack() as stack:
        assert await leaving.begin(stack)
        assert await leaving.begin(stack)
    await leaving.limits.close()
    with contextlib.ExitStack() as stack:
        assert await first.begin(stack)
        assert await first.begin(stack)


async def test_slots_are_per_gateway_without_the_database(gateways, monkeypatch):
    first, second, _ = gateways

    def away(*_):
        raise StorageError("away")

    with contextlib.ExitStack() as stack:
        assert await second.begin(stack)
        with monkeypatch.context() as patched:
            patched.setattr(first.store.limits, "hold", away)
            assert [await first.begin(stack) for _ in range(3)] == [True, True, False]
        await until(lambda: first.pair.places is not None)
        assert not await second.begin(stack)


@pytest.mark.parametrize("fails", [False, True])
async def test_usage_is_reported_once_despite_cancellation(gateways, url, monkeypatch, fails):
    _, second, clock = gateways
    leaving = Gateway(url, clock)
    writing, released = threading.Event(), threading.Event()
    take = leaving.store.limits.take

    def slow(taken):
        is_first = not writing.is_set()
        writing.set()
        released.wait(60)
        if fails and is_first:
            raise StorageError("away")
        return take(taken)

    await leaving.limits.refresh(leaving.account)
    monkeypatch.setattr(leaving.store.limits, "take", slow)
    leaving.account.charge(10)
    with leaving.account.admit(), contextlib.ExitStack() as stack:
        stack.callback(released.set)
        await until(writing.is_set)
        closing = asyncio.ensure_future(leaving.limits.close())  # it cancels what writes
        await asyncio.sleep(0)
        released.set()
        await closing
    await second.written(1, 10)


def test_cluster_gateways_share_key_limits(folder, tmp_path, postgres):
    path = tmp_path / "keys.jsonl"
    headers = {"authorization": f"Bearer {add_key(path, 'alice', requests_per_minute=1)}"}
    url = postgres.new_database()
    front = {"api_keys_file": str(path), "storage_url": url}
    with Cluster(folder, 0, front=front) as cluster:
        launch = GatewayLaunch(
            TOKEN, ServerConfig(port=0, **front).model_dump_json(), GatewayConfig().model_dump_json()
        )
        other = cluster.start(launch).wait_until_up()
        bodies = {"json": {"prompt": "one"}, "headers": headers}
        assert [httpx.post(f"{cluster.url}/v1/completions", **bodies).status_code for _ in range(2)] == [503, 429]
        asking = Store(url, ServerConfig())
        wait_until(lambda: asking.limits.take([Taken(REQUESTS, 1, 0.0)])[REQUESTS] >= 0.1)
        asking.close()
        answer = httpx.post(f"{other}/v1/completions", **bodies)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")

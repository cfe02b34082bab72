"""Where requests go, and what is learned from how they went."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlmserve.scaleout.fleet import tag_of
from vlmserve.scaleout.keys import RequestKey, request_key
from vlmserve.scaleout.messages import Feedback, HeldPrompt, Load, WorkerInfo
from vlmserve.scaleout.policy import POLICIES
from vlmserve.scaleout.router import Route, Router
from vlmserve.scaleout.settings import PolicyName

SLOW = Load(epoch="1", token_seconds=0.001, image_seconds=0.5)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def worker(number: int, **more: object) -> WorkerInfo:
    return WorkerInfo(f"id-{number}", f"worker-{number}", f"http://w{number}", ("m",), "1", **more)  # type: ignore[arg-type]


def router(count: int, policy: PolicyName = "affinity", clock: Clock | None = None, seed: int = 0) -> Router:
    made = Router(policy, clock=clock or Clock(), source=random.Random(seed))
    made.set_workers(worker(number) for number in range(count))
    for number in range(count):
        made.report(f"id-{number}", SLOW)
    return made


def key(*texts: str, salt: str = "", **fields: object) -> RequestKey:
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return request_key({"messages": messages, **fields} if texts else fields, model="m", salt=salt)


def answer(route: Route | None, key: RequestKey, cached: float = 0.0, load: Load = SLOW, **more: object) -> str:
    assert route is not None
    feedback = Feedback(load, 1000, int(1000 * cached))
    route.begin(feedback)
    route.finish()
    route.hear_end(Feedback(load, 1000, int(1000 * cached), **more))  # type: ignore[arg-type]
    return route.worker.info.id


LONG = "a long text " * 400


def test_other_gateways_cached_prefixes_come_from_workers():
    there, image = router(8), {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    shown = request_key({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, image]}]}, model="m")
    first = key(LONG)
    for number, prompt in enumerate((first, shown)):
        held = HeldPrompt(prompt.segments[-1].digest, prompt.images, prompt.tokens)
        there.report(f"id-{number}", SLOW, [held])
    later = key(LONG, "an answer", "and then?")
    assert answer(there.route(later), later) == "id-0"
    elsewhere = request_key({"messages": [{"role": "user", "content": [image]}]}, model="m")
    assert answer(there.route(elsewhere), elsewhere) == "id-1"


def test_what_is_cached_is_asked_where_it_is():
    there = router(8)
    first = answer(there.route(key(LONG)), key(LONG))
    for turn in range(1, 6):
        later = key(*[LONG, "answer", "question"] * turn, "question")
        assert answer(there.route(later), later, 0.9) == first


def test_image_goes_where_it_was_seen():
    def about(question: str) -> RequestKey:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
        content = [{"type": "text", "text": question}, image]
        return request_key({"messages": [{"role": "user", "content": content}]}, model="m")

    there = router(8)
    first = answer(there.route(about("What is this? " * 50)), about("What is this? " * 50))
    assert {answer(there.route(about(f"Question {n} " * 50)), about(f"Question {n} " * 50)) for n in range(10)} == {
        first
    }


def test_tenants_do_not_share():
    there = router(50)
    first = there.route(key(LONG, salt="one"))
    assert first is not None
    other = there.route(key(LONG, salt="two"))
    assert other is not None
    assert first.cached == other.cached == 0.0


def test_busy_worker_is_skipped_despite_its_prefix():
    there = router(8)
    first = answer(there.route(key(LONG)), key(LONG))
    there.report(first, Load("1", running=5, queued_seconds=60.0, token_seconds=0.001, image_seconds=0.5))
    route = there.route(key(LONG))
    assert route is not None
    assert route.worker.info.id != first


def test_a_crowd_with_one_prompt_is_spread():
    """All come before the first is answered: each counts as soon as it is sent."""
    there = router(10)
    counts = Counter(route.worker.info.id for _ in range(200) if (route := there.route(key(LONG))))
    assert max(counts.values()) <= 1.3 * 200 / 10 + 1


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_with_nothing_in_common_are_spread(policy):
    there = router(10, policy)
    counts = Counter(route.worker.info.id for n in range(200) if (route := there.route(key(f"{n} text " * 100))))
    assert max(counts.values()) <= 1.3 * 200 / 10 + 1


def test_late_gateways_do_not_flood_the_same_workers():
    """Eight of them send five requests each, and hear nothing meanwhile."""
    counts: Counter[str] = Counter()
    for seed in range(8):
        there = router(40, "least-loaded", seed=seed)
        for number in range(40):
            there.report(f"id-{number}", Load("1", running=10 + number, queued_seconds=0.1 * number))
        routes = [there.route(key()) for n in range(5)]
        counts.update(route.worker.info.id for route in routes if route is not None)
    assert counts.total() == 40
    assert max(counts.values()) <= 5


def test_sole_gateway_finds_the_least_loaded_worker():
    there = router(40, "least-loaded")
    routes = [there.route(key(f"text {n}")) for n in range(39)]
    free = {f"id-{number}" for number in range(40)} - {route.worker.info.id for route in routes if route is not None}
    last = there.route(key("the last text"))
    assert last is not None
    assert {last.worker.info.id} == free


def test_gateway_share_counts_present_workers():
    there = router(2, "least-loaded")
    assert there.fleet.own_share() == 1
    for _ in range(2):
        assert there.route(key()) is not None
    for number in range(2):
        there.report(f"id-{number}", Load("1", running=4))
    assert there.fleet.own_share() == pytest.approx(0.25)
    there.report("id-0", Load("1", running=1))
    there.set_workers([worker(0)])
    assert there.fleet.own_share() == 1


def test_a_fresh_worker_gets_requests():
    there = router(4)
    keys = [key(f"{n} {LONG}") for n in range(8)]
    routes = [there.route(keys[n % 8]) for n in range(80)]
    there.set_workers(worker(number) for number in range(5))
    there.report("id-4", SLOW)
    routes += [there.route(keys[n % 8]) for n in range(10)]
    assert "id-4" in {route.worker.info.id for route in routes if route is not None}


def test_unmeasured_worker_counts_as_fast_as_others():
    there = router(2)
    there.report("id-0", Load("1", running=1, token_seconds=1e-6, image_seconds=1e-4))
    there.report("id-1", Load("1"))
    route = there.route(key(LONG))
    assert route is not None
    assert route.worker.info.id == "id-1"


def test_of_equally_loaded_workers_any_gets_a_request():
    used = Counter(route.worker.info.id for n in range(60) if (route := router(3, "least-loaded", seed=n).route(key())))
    assert min(used[f"id-{number}"] for number in range(3)) >= 8


def test_gateways_that_never_talk_find_the_same_home():
    keys = [key(f"conversation {n} {LONG}", "answer", "next question") for n in range(30)]
    gateways = [router(20, seed=seed) for seed in range(4)]
    homes = [[answer(there.route(one), one, 0.5) for there in gateways] for one in keys]
    assert sum(len(set(places)) == 1 for places in homes) >= 25
    assert len({places[0] for places in homes}) > 5


def test_few_homes_move_when_a_worker_goes():
    numbers = [request_key({"prompt": str(n)}, model="m").homes[-1].number for n in range(500)]
    there = router(20)
    before = [there.fleet.at(int(there.fleet.homes([n])[0, :20].argmax())) for n in numbers]
    gone = there.fleet.get("id-7")
    there.set_workers(worker(n) for n in range(20) if n != 7)
    usable = there.fleet.waits(100.0) < 1e9
    after = [there.fleet.at(int((there.fleet.homes([n])[0] * usable).argmax())) for n in numbers]
    assert all(a is b for a, b in zip(before, after, strict=True) if a is not gone)
    assert 5 <= sum(a is gone for a in before) <= 60


def test_a_restarted_engine_has_nothing_cached():
    there = router(4)
    answer(there.route(key(LONG)), key(LONG))
    [held] = [w for w in there.fleet if there.index.cached_tokens(w.slot, key(LONG).segments)]
    there.report(held.info.id, Load("2", token_seconds=0.001))
    assert not there.index.cached_tokens(held.slot, key(LONG).segments)


def test_a_follow_up_goes_where_its_history_is():
    there = router(8)
    first = key(input=LONG)
    place = answer(there.route(first), first, response_id="resp_1", completion_tokens=100)
    following = key(input="and?", previous_response_id="resp_1")
    for _ in range(5):
        route = there.route(following)
        assert route is not None
        assert route.cached > 0.9
        assert answer(route, following, 0.99) == place


def test_unknown_response_finds_its_worker_by_id():
    there = router(8)
    for number in range(8):
        id = f"resp_{tag_of(f'worker-{number}')}0123"
        following = key(input="and?", previous_response_id=id)
        assert answer(there.route(following), following, 0.9) == f"id-{number}"


def test_a_conversation_stays_where_it_is():
    there = router(8)
    first = key(input=LONG, conversation="conv_1")
    place = answer(there.route(first), first, response_id="resp_9", completion_tokens=10)
    later = key(input="and?", conversation={"id": "conv_1"})
    assert answer(there.route(later), later, 0.9) == place


@pytest.mark.parametrize("policy", POLICIES)
def test_failing_draining_and_excluded_workers_get_nothing(policy):
    clock = Clock()
    there = router(4, policy, clock)
    failed = there.route(key("x"))
    assert failed is not None
    failed.fail(connection=True)
    bad = failed.worker.info.id
    draining = next(f"id-{n}" for n in range(4) if f"id-{n}" != bad)
    there.set_workers(worker(n, draining=f"id-{n}" == draining) for n in range(4))
    rest = {f"id-{n}" for n in range(4)} - {bad, draining}
    excluded = min(rest)
    assert {there.route(key(f"{n}"), [excluded]).worker.info.id for n in range(20)} == rest - {excluded}  # type: ignore[union-attr]
    assert there.route(key("x"), [f"id-{n}" for n in range(4)]) is None
    clock.now += 2.0  # then it is tried again, by one request
    tried = Counter(there.route(key(f"{n} again")).worker.info.id for n in range(40))  # type: ignore[union-attr]
    assert tried[bad] == 1
    assert tried[draining] == 0


def test_client_errors_never_trip_a_breaker():
    there = router(1)
    for _ in range(100):
        route = there.route(key("x"))
        assert route is not None
        route.finish()
    assert next(iter(there.fleet)).breaker.is_closed


def test_without_workers_there_is_no_route():
    assert Router().route(key("x")) is None


class RouterMachine(RuleBasedStateMachine):
    """Whatever comes in whatever order, every request is counted once, and only workers that may be used get any."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.router = Router(clock=self.clock, source=random.Random(0))
        self.there: dict[int, WorkerInfo] = {}
        self.routes: list[tuple[Route, RequestKey]] = []

    @rule(numbers=st.sets(st.integers(0, 5)), draining=st.integers(0, 5))
    def change_workers(self, numbers, draining):
        self.there = {number: worker(number, draining=number == draining) for number in numbers}
        self.router.set_workers(self.there.values())

    @rule(text=st.sampled_from(["a" * 2000, "b" * 2000, "c"]), seconds=st.floats(0, 3))
    def send(self, text, seconds):
        self.clock.now += seconds
        route = self.router.route(key(text))
        if route is None:
            assert not any(not w.info.draining and w.breaker.is_closed for w in self.router.fleet)
            return
        assert not route.worker.info.draining
        assert route.worker.info in self.there.values()
        self.routes.append((route, key(text)))

    @precondition(lambda self: self.routes)
    @rule(
        data=st.data(), epoch=st.sampled_from(["1", "2"]), how=st.sampled_from("finish error connection left".split())
    )
    def end(self, data, epoch, how):
        route, _ = self.routes.pop(data.draw(st.integers(0, len(self.routes) - 1)))
        if data.draw(st.booleans()):
            route.begin(Feedback(Load(epoch, running=3), 100, 50))
        match how:
            case "finish":
                route.finish()
                route.hear_end(Feedback(Load(epoch), 100, 50, response_id="resp_1"))
            case "left":
                route.abandon()
            case _:
                route.fail(connection=how == "connection")
        route.abandon()  # once more changes nothing

    @invariant()
    def counted(self):
        fleet = self.router.fleet
        for w in fleet:
            sent = sum(route.worker is w for route, _ in self.routes)
            assert fleet.sent[w.slot] == sent
            assert fleet.pending[w.slot] >= 0
        assert {w.info.id for w in fleet} == {info.id for info in self.there.values()}


TestRouter = RouterMachine.TestCase

"""Whole load tests, of servers whose right figures are known."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest

from tests.loadtest.scripted import Scripted, answer, event, piece, plain, scripted, stream, writes
from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.live import LiveServer
from vlmserve.errors import ConfigurationError
from vlmserve.loadtest import search
from vlmserve.loadtest.perform import perform
from vlmserve.loadtest.report import Report
from vlmserve.loadtest.settings import GoalConfig, LoadConfig, TargetConfig, TestConfig, WorkloadConfig
from vlmserve.loadtest.target import TargetError


class Watcher:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, text, total):
        self.stages.append(text)

    def advance(self, done, counts):
        pass


async def run(url: str, *, target=None, load=None, goal=None, **workload) -> Report:
    config = TestConfig(
        url=url,
        target=TargetConfig(**(target or {})),
        load=LoadConfig(**{"num_warmups": 0, **(load or {})}),
        goal=GoalConfig(**(goal or {})),
        workload=WorkloadConfig(**{"num_prompts": 6, "random_input_len": 8, "random_output_len": 2, **workload}),
    )
    return await perform(config, Watcher())


def measured(server: Scripted, report: Report) -> list[dict]:
    """What was asked in the test itself, without what came before."""
    return server.asked[-(report.num_good + report.num_failed) :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_mock_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def mock(folder):
    with LiveServer(folder, engine={"mock_ttft": 0.05, "mock_tpot": 0.01}) as server:
        yield server


async def test_known_server_latencies_are_measured(mock):
    report = await run(mock.url, load={"max_concurrency": 1}, random_output_len=30, num_prompts=8)
    times = report.latency_ms
    ttft, tpot, e2el = times["ttft"].median, times["tpot"].median, times["e2el"].median
    # A busy machine makes all of them longer, and a late first token makes the next tokens quicker.
    assert 45 <= ttft < 1000
    assert 300 <= e2el < 5000
    assert 5 <= tpot < 150
    assert report.output_tokens.min == report.output_tokens.max == 30


async def test_prompts_have_the_tokens_that_were_asked_for(mock):
    report = await run(mock.url, load={"max_concurrency": 4}, random_input_len=40, num_prompts=4)
    around = mock.ask(messages=[{"role": "user", "content": "a"}], max_tokens=1).json()["usage"]["prompt_tokens"] - 1
    assert report.input_tokens.max <= 40 + around
    assert report.input_tokens.min > 40 + around - 8  # this tokenizer has few whole words


async def test_what_the_server_uses_is_in_the_report(mock):
    report = await run(mock.url)
    assert {process.name for process in report.server} == {"server", "engine"}
    assert all(process.memory and process.cores is not None for process in (report.client, *report.server))


async def test_images_get_there(mock):
    report = await run(mock.url, images=2, image_size=("30x20",), image_reuse=0.5)
    assert (report.num_good, report.num_images) == (6, 12)


async def test_completions_and_whole_answers_are_measured_too(mock):
    report = await run(mock.url, target={"endpoint": "/v1/completions"})
    assert (report.num_good, report.latency_ms["ttft"].count) == (6, 6)
    report = await run(mock.url, target={"stream": False})
    assert (report.num_good, report.latency_ms["ttft"], report.latency_ms["e2el"].count) == (6, None, 6)
    assert report.output_tokens.mean == 2


async def test_impossible_lengths_are_rejected_before_sending(mock):
    with pytest.raises(ConfigurationError, match="exceed the model's context of 512"):
        await run(mock.url, random_input_len=500, random_output_len=100)


async def test_a_seed_sends_the_same_requests():
    async with scripted() as server:
        first = await run(server.url, load={"max_concurrency": 1}, random_range_ratio=0.5)
        second = await run(server.url, load={"max_concurrency": 1}, random_range_ratio=0.5)
        other = await run(server.url, load={"max_concurrency": 1}, random_range_ratio=0.5, seed=1)
    assert first.workload == second.workload != other.workload
    half = len(server.asked) // 3
    assert server.asked[:half] == server.asked[half : 2 * half] != server.asked[2 * half :]


async def test_conversations_remember_the_answers():
    async with scripted() as server:
        report = await run(server.url, turns=3, num_prompts=1)
    first, second, third = (body["messages"] for body in measured(server, report))
    assert [message["role"] for message in third] == ["user", "assistant", "user", "assistant", "user"]
    assert (first, second) == (third[:1], third[:3])
    assert third[1]["content"] == " 0 1"


async def test_closed_loop_respects_its_concurrency():
    under_way, most = 0, 0

    async def slow(head, body, writer):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        writer.write(answer())

    async with scripted(slow) as server:
        report = await run(server.url, load={"max_concurrency": 3}, num_prompts=20)
    assert (report.num_good, most, report.concurrency.peak) == (20, 3, 3)


async def test_an_open_loop_does_not_wait_for_answers():
    everybody, arrived = asyncio.Event(), 0

    async def together(head, body, writer):
        nonlocal arrived
        if json.loads(body)["max_tokens"] == 3:
            arrived += 1
            if arrived == 12:
                everybody.set()
            await everybody.wait()
        writer.write(answer())

    async with scripted(together) as server:
        report = await run(server.url, load={"request_rate": 200}, num_prompts=12, random_output_len=3)
    assert (report.num_good, report.concurrency.peak) == (12, 12)


async def test_waiting_for_a_place_counts_from_the_schedule():
    async def slow(head, body, writer):
        await asyncio.sleep(0.05)
        writer.write(answer())

    async with scripted(slow) as server:
        report = await run(server.url, load={"request_rate": 500, "max_concurrency": 1})
    sent, scheduled = (report.latency_ms[name].max for name in ("ttft", "ttft_from_schedule"))
    assert scheduled > 2 * sent
    assert any("--max-concurrency" in warning for warning in report.warnings)


async def test_failures_are_told_apart():
    turn = 0

    async def mixed(head, body, writer):
        nonlocal turn
        turn += 1
        busy = plain("503 Busy", b'{"error": {"message": "later", "code": "overloaded"}}')
        broken = stream(piece("a"))
        writer.write(answer() if turn == 1 else [busy, broken, answer()][turn % 3])

    async with scripted(mixed) as server:
        report = await run(server.url, target={"ignore_eos": False}, load={"max_concurrency": 1}, num_prompts=9)
    assert report.num_good + report.num_failed == 9
    assert {failure.reason for failure in report.failures} == {"HTTP 503 overloaded", "broken stream"}
    assert sum(failure.count for failure in report.failures) == report.num_failed


async def test_servers_that_know_less_are_asked_for_less():
    async def strict(head, body, writer):
        unknown = {"ignore_eos", "stream_options"} & set(json.loads(body))
        refusal = plain("422 Unprocessable", b'{"message": "extra fields"}')
        writer.write(refusal if unknown else stream(piece("a"), piece("b", finish_reason="stop"), b"[DONE]"))

    async with scripted(strict) as server:
        report = await run(server.url)
    assert report.num_good == 6
    assert report.output_tokens.mean == 2
    assert report.input_tokens is None
    assert any("ignore_eos" in note for note in report.notes)
    assert any("pieces of the answers are counted" in note for note in report.notes)


async def test_words_cost_prompt_tokens_without_a_tokenizer():
    async def counting(head, body, writer):
        text = json.loads(body)["messages"][-1]["content"]
        writer.write(answer(prompt_tokens=7 + 2 * len(text.split())))

    async with scripted(counting) as server:
        report = await run(server.url, random_input_len=40)
        texts = [body["messages"][0]["content"] for body in measured(server, report)]
    assert {len(text.split()) for text in texts} == {20}
    assert any("approximate" in note for note in report.notes)


async def test_keys_headers_and_further_fields_are_sent():
    heads = []

    async def keep(head, body, writer):
        heads.append(head)
        writer.write(answer())

    options = {"api_key": "secret", "header": ("X-Tenant: a",), "extra_body": {"top_p": 0.5}}
    async with scripted(keep) as server:
        report = await run(server.url + "/v1", target=options)
    assert all("Authorization: Bearer secret\r\n" in head and "X-Tenant: a\r\n" in head for head in heads)
    assert all(body["top_p"] == 0.5 and body["model"] == "scripted" for body in server.asked)
    assert "secret" not in json.dumps(report.settings)


async def test_a_test_ends_when_its_duration_is_over():
    async with scripted() as server:
        report = await run(server.url, load={"duration": 0.05, "max_concurrency": 1}, num_prompts=1_000)
    assert 0 < report.num_good < 1_000
    assert report.num_unfinished == 0
    assert any("the duration was over" in warning for warning in report.warnings)


async def test_interrupted_test_reports_earlier_answers():
    async def interrupt(head, body, writer):
        writer.write(answer())
        if len(server.asked) == 4:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, lambda *_: None)  # an unhandled Ctrl-C would end all tests
    try:
        async with scripted(interrupt) as server:
            report = await run(server.url, load={"max_concurrency": 1}, num_prompts=1_000)
    finally:
        signal.signal(signal.SIGINT, before)
    assert 0 < report.num_good < 1_000
    assert any("it was interrupted" in warning for warning in report.warnings)


async def test_a_search_reports_what_it_tried(monkeypatch):
    monkeypatch.setattr(search, "LOWEST_RATE", 40)
    async with scripted(writes(answer())) as server:
        goal = {"find_rate": True, "slo": ("e2el=1us",)}
        report = await run(server.url, goal=goal, load={"request_rate": 100, "duration": 1})
    assert [trial.passed for trial in report.trials] == [False, False]
    assert report.goodput.count == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"goal": {"slo": ("ttfb=3",)}}, "ttft=500ms"),
        ({"goal": {"find_rate": True}}, "--slo"),
        ({"goal": {"slo": ("ttft=1",)}, "target": {"stream": False}}, "e2el"),
        ({"target": {"header": ("nothing",)}}, "Name: value"),
        ({"target": {"endpoint": "/v1/completions"}, "images": 1}, "neither images"),
    ],
)
async def test_settings_that_do_not_go_together_are_refused(options, words):
    async with scripted() as server:
        with pytest.raises(ConfigurationError, match=words):
            await run(server.url, **options)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_paths_of_urls_are_kept(end):
    async with scripted(prefix="/team/a") as server:
        report = await run(f"{server.url}/team/a{end}")
        assert report.num_good == 6
        with pytest.raises(TargetError, match="/team/b/v1/models lists no model"):
            await run(f"{server.url}/team/b/v1")


async def test_what_cannot_be_tested_says_why():
    async with scripted() as server:
        url = server.url
    with pytest.raises(TargetError, match="there is no server"):
        await run(url)
    async with scripted(writes(plain("401 No", b'{"error": {"message": "a key, please"}}'))) as server:
        with pytest.raises(TargetError, match="a key, please"):
            await run(server.url)
    async with scripted(writes(stream(piece("a"), event({"error": {}})))) as server:
        with pytest.raises(TargetError, match="/v1/chat/completions rejected a short request"):
            await run(server.url)

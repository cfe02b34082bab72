"""Runs a load test: probe, make the workload, warm up, send, report."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vlmserve.errors import ConfigurationError
from vlmserve.loadtest.figures import Summary, latencies
from vlmserve.loadtest.machine import Monitor
from vlmserve.loadtest.record import Record
from vlmserve.loadtest.report import Report, client_limits, make_report, throughput
from vlmserve.loadtest.run import Counts, Outcome, Run, shown_every
from vlmserve.loadtest.search import Trial, best, find_rate
from vlmserve.loadtest.settings import LoadConfig, TestConfig
from vlmserve.loadtest.target import Target, open_target
from vlmserve.loadtest.workload import Session, digest, make_workload

_WARM_UP = 2**31
"""Salt of warm-up requests, which share no content with measured ones."""
_MOST_WARMUPS = 8
_TRIAL_SECONDS = 15.0
_FEWEST = 20
"""Minimum requests of a trial."""
_REFRESH = 0.5
_INTERRUPTED = "it was interrupted"


class Watcher(Protocol):
    """Receives the progress of a test."""

    def stage(self, text: str, total: int | None) -> None:
        """total: requests or items to make, if known."""

    def advance(self, done: int, counts: Counts | None) -> None:
        """Report `done` requests or items."""


async def perform(config: TestConfig, watcher: Watcher, *, detailed: bool = False) -> Report:
    """Test a server. Ctrl-C reports the results until then.

    Raises TargetError for an unusable server, ConfigurationError for wrong settings.
    """
    _check(config)
    watcher.stage("Looking at the server", None)
    target = await open_target(config)
    try:
        test = _Test(config, target, watcher, detailed=detailed)
        return await (test.search() if config.goal.find_rate else test.measure())
    finally:
        target.close()


class _Test:
    def __init__(self, config: TestConfig, target: Target, watcher: Watcher, *, detailed: bool) -> None:
        self._config, self._target, self._watcher, self._detailed = config, target, watcher, detailed
        self._started = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
        self._interrupted = False

    async def measure(self) -> Report:
        config = self._config
        sessions = self._make(None, 0)
        times = arrival_times(config.load, len(sessions), config.workload.seed) if config.is_open else None
        await self._warm_up(len(sessions))
        outcome = await self._send("Sending", sessions, None if times is None else times.tolist(), config.load.duration)
        return self._report(outcome, sessions, ())

    async def search(self) -> Report:
        """Try many rates. Report the best, or the last if none passed."""
        trials: list[Trial] = []
        chosen: tuple[Outcome, list[Session]] = (Outcome(), [])
        await self._warm_up(_MOST_WARMUPS)

        async def attempt(rate: float) -> Trial:
            nonlocal chosen
            trial, outcome, sessions = await self._try(rate, len(trials) + 1)
            highest = best(trials)
            trials.append(trial)
            if highest is None or (trial.passed and rate > highest.rate):
                chosen = outcome, sessions
            return trial

        start = self._config.load.request_rate or 1.0
        precision = self._config.goal.find_rate_precision
        await find_rate(attempt, start=start, precision=precision, stop=lambda: self._interrupted)
        return self._report(*chosen, trials)

    async def _try(self, rate: float, number: int) -> tuple[Trial, Outcome, list[Session]]:
        goal, load = self._config.goal, self._config.load
        count = max(_FEWEST, math.ceil(rate * (load.duration or _TRIAL_SECONDS)))
        sessions = self._make(count, number)
        paced = load.model_copy(update={"request_rate": rate})
        times = arrival_times(paced, count, self._config.workload.seed + number).tolist()
        objectives = goal.objectives
        bad = 0

        def watch(record: Record) -> str | None:
            nonlocal bad
            bad += not record.keeps(objectives)
            return "too many missed" if bad > (1 - goal.slo_share) * count else None

        outcome = await self._send(f"Trying {rate:.3g} requests/s", sessions, times, None, watch)
        return _judge(rate, outcome, bad, goal.slo_share), outcome, sessions

    def _make(self, count: int | None, salt: int) -> list[Session]:
        workload, target = self._config.workload, self._target
        self._watcher.stage("Making the workload", count or workload.num_prompts)
        return make_workload(
            workload,
            target.vocabulary,
            is_chat=target.form.is_chat,
            count=count,
            salt=salt,
            progress=lambda done, total: self._watcher.advance(done, None) if done % 50 == 0 else None,
        )

    async def _warm_up(self, num_sessions: int) -> None:
        """Open connections and trigger the server's one-time work."""
        at_once = self._config.concurrency
        count = self._config.load.num_warmups
        if count is None:
            count = min(at_once or _MOST_WARMUPS, num_sessions, _MOST_WARMUPS)
        if count == 0:
            return
        sessions = [Session(session.turns[:1], session.num_images) for session in self._make(count, _WARM_UP)]
        await self._send("Warming up", sessions, None, None, at_once=at_once or count)

    async def _send(
        self,
        stage: str,
        sessions: Sequence[Session],
        times: Sequence[float] | None,
        duration: float | None,
        watch: Callable[[Record], str | None] = lambda record: None,
        at_once: int | None = None,
    ) -> Outcome:
        if self._interrupted:
            return Outcome(stopped=_INTERRUPTED)
        target = self._target
        run = Run(
            target.client,
            target.form,
            sessions,
            times=times,
            concurrency=at_once or self._config.concurrency,
            think_time=self._config.workload.think_time,
            duration=duration,
            watch=watch,
        )
        self._watcher.stage(stage, sum(len(session.turns) for session in sessions))

        def show() -> None:
            self._watcher.advance(run.counts.good + run.counts.failed, run.counts)

        with self._interruptible(run), _no_garbage_collection():
            async with shown_every(_REFRESH, show):
                return await run.run(Monitor(target.control, metrics=target.has_metrics))

    @contextlib.contextmanager
    def _interruptible(self, run: Run) -> Iterator[None]:
        """Make Ctrl-C end the run only."""

        def interrupt() -> None:
            self._interrupted = True
            run.stop(_INTERRUPTED)

        loop = asyncio.get_running_loop()
        try:
            loop.add_signal_handler(signal.SIGINT, interrupt)
        except (NotImplementedError, RuntimeError, ValueError):  # Windows, or another thread than the main one
            yield
            return
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def _report(self, outcome: Outcome, sessions: Sequence[Session], trials: Sequence[Trial]) -> Report:
        return make_report(
            self._config,
            outcome,
            model=self._target.model,
            url=self._target.url,
            started=self._started,
            workload=digest(sessions),
            notes=self._target.notes,
            trials=trials,
            detailed=self._detailed,
        )


def _check(config: TestConfig) -> None:
    try:
        objectives = config.goal.objectives
    except ValueError as error:
        raise ConfigurationError(f"--slo: {error}") from None
    if not config.target.stream and set(objectives) - {"e2el"}:
        raise ConfigurationError("--no-stream times whole requests only; give --slo e2el=...")
    if not config.goal.find_rate:
        return
    if not objectives:
        raise ConfigurationError("--find-rate needs objectives: --slo ttft=500ms,tpot=50ms")
    if config.load.ramp_up_strategy is not None or config.load.request_rate == math.inf:
        raise ConfigurationError("--find-rate tries rates of its own; --request-rate is the first of them")


def _judge(rate: float, outcome: Outcome, bad: int, wanted: float) -> Trial:
    """Decide whether a rate passes. A slow client cannot make a rate pass."""
    records = outcome.records
    share = 1 - bad / len(records) if records else 0.0
    delays = Summary.of(record.delay * 1e3 for record in records)
    limits = client_limits(outcome.usage.client, Summary.of(lag * 1e3 for lag in outcome.usage.lags), delays)
    passed = share >= wanted and outcome.stopped is None
    slow = "the client was slow" if limits and not passed else None
    times = {name: Summary.of(values) for name, values in latencies(records).items()}
    ttft, tpot = times["ttft_from_schedule"], times["tpot"]
    return Trial(
        rate=rate,
        passed=passed,
        share=share,
        num_requests=len(records),
        output_tokens_per_s=throughput([r for r in records if r.is_good], outcome.seconds).output_tokens,
        ttft_p99=None if ttft is None else ttft.p99,
        tpot_p99=None if tpot is None else tpot.p99,
        why="; ".join(text for text in (outcome.stopped, slow) if text),
    )


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Prevent pauses of all streams. Objects that callers froze stay frozen."""
    is_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not is_frozen:
            gc.unfreeze()


def arrival_times(load: LoadConfig, count: int, seed: int) -> npt.NDArray[np.float64]:
    """Seconds from the start to each of `count` requests, [count], ascending.

    Gaps have a gamma distribution with shape `burstiness`; 1 is a Poisson process. Scale them to the sum of the mean
    gaps, for the requested rate even in a short test. Raises ConfigurationError for a ramp without rates.
    """
    if load.request_rate is not None and np.isinf(load.request_rate):
        return np.zeros(count)
    mean_gaps = 1 / _rates(load, count)
    if np.isinf(load.burstiness):
        return np.asarray(np.cumsum(mean_gaps) - mean_gaps[0], dtype=np.float64)
    draw = np.random.default_rng((seed, 1))
    times = np.cumsum(draw.gamma(load.burstiness, mean_gaps / load.burstiness))
    return np.asarray(times * (mean_gaps.sum() / times[-1]), dtype=np.float64)


def _rates(load: LoadConfig, count: int) -> npt.NDArray[np.float64]:
    """Requests/s around each request."""
    if load.ramp_up_strategy is None:
        assert load.request_rate is not None
        return np.full(count, load.request_rate)
    start, end = load.ramp_up_start_rps, load.ramp_up_end_rps
    if start is None or end is None:
        raise ConfigurationError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if load.request_rate is not None:
        raise ConfigurationError("--request-rate is one rate and --ramp-up-strategy many; give one of the two")
    place = np.linspace(0, 1, count)
    if load.ramp_up_strategy == "linear":
        # A rate linear in time has a square linear in the number of requests.
        return np.asarray(np.sqrt(start**2 + (end**2 - start**2) * place))
    # A rate exponential in time is linear in the number of requests.
    return np.asarray(start + (end - start) * place)

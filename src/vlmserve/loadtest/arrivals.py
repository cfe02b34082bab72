"""Arrival times of requests in an open loop."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlmserve.errors import ConfigurationError
from vlmserve.loadtest.settings import LoadConfig


def arrival_times(load: LoadConfig, count: int, seed: int) -> npt.NDArray[np.float64]:
    """Seconds from the start to the sending of each of `count` requests, [count], ascending.

    Gaps have a gamma distribution with shape `burstiness`; 1 makes a Poisson process. They are scaled to the total of
    the mean gaps, so that even a short test has the requested rate. Raises ConfigurationError for a ramp without rates.
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
    """Requests a second around each request."""
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
        # A rate r(t) that is linear in time has r(n)^2 linear in the number n of requests sent.
        return np.asarray(np.sqrt(start**2 + (end**2 - start**2) * place))
    # A rate that is exponential in time is linear in the number of requests sent.
    return np.asarray(start + (end - start) * place)

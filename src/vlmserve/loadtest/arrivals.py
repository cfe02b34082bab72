"""Arrival times of requests in an open loop."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlmserve.errors import ConfigurationError
from vlmserve.loadtest.settings import LoadConfig


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

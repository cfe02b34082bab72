"""When requests are sent in an open loop."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlmserve.errors import ConfigurationError
from vlmserve.loadtest.settings import LoadConfig


def arrival_times(load: LoadConfig, count: int, seed: int) -> npt.NDArray[np.float64]:
    """Seconds after the start at which each of `count` requests is sent, [count], rising.

    Gaps are drawn from a gamma distribution whose shape is `burstiness`, for 1 the exponential one of a Poisson
    process, and then stretched so that the last request comes when it would if all gaps were of mean length: a short
    test has the rate that it was given. Raises ConfigurationError for a ramp without its rates.
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
        # By the share of requests sent, not of time: the square of a rate that is linear in time is linear in requests.
        return np.asarray(np.sqrt(start**2 + (end**2 - start**2) * place))
    # A rate that grows exponentially in time grows linearly with the requests sent.
    return np.asarray(start + (end - start) * place)

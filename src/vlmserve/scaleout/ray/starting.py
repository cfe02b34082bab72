"""Watch a cluster on this machine while it starts."""

from __future__ import annotations

import re
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable

from ray import serve
from ray.serve.schema import ApplicationStatus, ServeStatus

from vlmserve.errors import ModelLoadError

_LOOK = 0.2
"""Seconds between looks."""
_PATIENCE = 5.0
"""Seconds for an answer."""
_GATEWAY, _RUNNING = "gateway", "RUNNING"
_began = time.monotonic()


def show(step: str) -> None:
    print(f"{time.monotonic() - _began:5.1f} s  {step}", file=sys.stderr, flush=True)


def wait_until_running(stopped: threading.Event, workers: int) -> bool:
    """Show how many workers run until all of them and the gateway do. Returns False if `stopped` is set earlier.

    Raises ModelLoadError if a worker or the gateway cannot start.
    """
    shown = -1
    while not stopped.wait(_LOOK):
        status = serve.status()
        _check(status)
        running = num_workers(status)
        if running != shown:
            show(f"{running} of {workers} workers loaded")
            shown = running
        if all(one.status == ApplicationStatus.RUNNING for one in status.applications.values()):
            return True
    return False


def wait_until_ready(url: str, stopped: threading.Event) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while not stopped.is_set():
        try:
            opener.open(f"{url}/ready", timeout=_PATIENCE).close()
            return
        except OSError:  # an error status, too
            stopped.wait(_LOOK)


def num_workers(status: ServeStatus) -> int:
    return sum(
        deployment.replica_states.get(_RUNNING, 0)
        for name, application in status.applications.items()
        if name != _GATEWAY
        for deployment in application.deployments.values()
    )


def _check(status: ServeStatus) -> None:
    for name, application in status.applications.items():
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            messages = [application.message, *(one.message for one in application.deployments.values())]
            raise ModelLoadError(f"{name} cannot start: {_reason(messages)}")


def _reason(messages: Iterable[str]) -> str:
    """The error in Serve's messages, which may end with a traceback."""
    last = "\n".join(messages).strip().splitlines()[-1]
    return re.sub(r"^[\w.]+: ", "", last)

"""A worker or gateway that was started on this machine, and its place in the directory."""

from __future__ import annotations

import logging
import secrets
import subprocess
import threading
from collections.abc import Callable

import ray
from ray.exceptions import RayError

from vlmserve.scaleout.launch import MemberProcess
from vlmserve.scaleout.member import Launch
from vlmserve.scaleout.ray.directory import BEAT, Kind, open_directory

logger = logging.getLogger(__name__)

_PATIENCE = 5.0
"""Seconds to wait for the directory; then the member goes on with what it knows."""


class Membership:
    """A process, told of and telling the directory. Use as a context manager. url: where it answers.

    Raises the VLMServeError for which it does not start.
    """

    def __init__(self, kind: Kind, launch: Callable[[str, str], Launch], prefix: str = "") -> None:
        """launch: the process's settings, with the cluster's token and the name that it gets. prefix: of a name that no
        other member has; empty: it gets none."""
        self._directory = open_directory()
        self._kind = kind
        self._id = secrets.token_hex(8)
        self._name: str = ray.get(self._directory.name.remote(self._id, prefix)) if prefix else ""
        self._process = MemberProcess(launch(ray.get(self._directory.token.remote()), self._name))
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        if kind == "gateway":  # one that takes the place of another is up once it has heard of its workers
            self._start(self._follow)
        try:
            self.url = self._process.wait_until_up()
        except BaseException:
            self._over.set()
            self._process.close()
            self._directory.leave.remote(self._id)
            raise
        self._start(self._beat)

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

    @property
    def was_replaced(self) -> bool:
        """Whether it was a gateway whose place another one has taken, and has ended since."""
        return self._process.was_replaced

    def drain(self, grace: float) -> None:
        """Let the process finish what is under way, for at most `grace` seconds, and close."""
        self._process.terminate()
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            logger.warning("The %s at %s did not end within %g s", self._kind, self.url, grace)
        self.close()

    def close(self) -> None:
        """End the process, and be forgotten."""
        self._over.set()
        self._process.close()
        for thread in self._threads:
            thread.join(2 * _PATIENCE)  # Ray ends a process in which a thread asks it something while it shuts down
        try:
            ray.get(self._directory.leave.remote(self._id), timeout=_PATIENCE)
        except RayError:
            logger.debug("The directory is gone already")

    def _start(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def _beat(self) -> None:
        while not self._over.is_set() and self.is_alive:
            try:
                ray.get(self._directory.beat.remote(self._id, self._kind, self.url, self._name), timeout=_PATIENCE)
            except RayError as error:
                logger.warning("The directory of the cluster does not answer: %s", error)
            self._over.wait(BEAT)

    def _follow(self) -> None:
        """Tell a gateway who its workers are. While the directory is away, they are those from before."""
        known: list[str] = []
        while not self._over.is_set() and self.is_alive:
            try:
                urls = ray.get(self._directory.next_urls.remote("worker", known), timeout=_PATIENCE)
            except RayError:
                self._over.wait(BEAT)
                continue
            if urls != known:
                self._process.set_workers(urls)
                known = urls

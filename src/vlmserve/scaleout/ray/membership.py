"""The process of a worker or gateway, and its entry in the directory."""

from __future__ import annotations

import logging
import secrets
import subprocess
import threading
from collections.abc import Callable

import ray
from ray.exceptions import RayError

from vlmserve.scaleout.launch import MemberProcess
from vlmserve.scaleout.member_messages import Launch
from vlmserve.scaleout.ray.directory import BEAT, Kind, open_directory

logger = logging.getLogger(__name__)

_PATIENCE = 5.0
"""Timeout in seconds for the directory; after it, the member keeps its last knowledge."""


class Membership:
    """A member's process and its reports to the directory. A context manager. url: the member's address.

    Raises the VLMServeError that kept the process from starting.
    """

    def __init__(self, kind: Kind, launch: Callable[[str, str], Launch], prefix: str = "") -> None:
        """launch: makes settings of the cluster's token and the member's name. prefix: of that name; empty: no name."""
        self._directory = open_directory()
        self._kind = kind
        self._id = secrets.token_hex(8)
        self._name: str = ray.get(self._directory.name.remote(self._id, prefix)) if prefix else ""
        self._process = MemberProcess(launch(ray.get(self._directory.token.remote()), self._name))
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        if kind == "gateway":  # a gateway that takes over is up only after it has heard from its workers
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
        """True if another gateway took over."""
        return self._process.was_replaced

    def drain(self, grace: float) -> None:
        """Let requests finish for at most `grace` seconds, and close."""
        self._process.terminate()
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            logger.warning("The %s at %s did not end within %g s", self._kind, self.url, grace)
        self.close()

    def close(self) -> None:
        self._over.set()
        self._process.close()
        for thread in self._threads:
            thread.join(2 * _PATIENCE)  # Ray kills a process if a thread calls it during shutdown
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
        """Without a directory the gateway keeps its last workers."""
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

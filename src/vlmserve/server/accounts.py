"""Accounts of API keys, and their rate limits."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

from vlmserve.errors import ConfigurationError
from vlmserve.folders import expanded
from vlmserve.server.errors import RefusedError
from vlmserve.server.keys import MAX_KEY_LENGTH, StoredKey, read_keys, store
from vlmserve.settings.config import ServerConfig

logger = logging.getLogger(__name__)

_MINUTE = 60.0
_RELOAD_INTERVAL = 1.0
"""Seconds between checks of the key file for changes."""

Clock = Callable[[], float]


RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


class Bucket:
    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._then = clock()
        self.taken = 0.0

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._then) * self.per_minute / _MINUTE)
        self._then = now
        return self._level

    def take(self, amount: float) -> None:
        self._level = self.level - amount
        self.taken += amount

    def tell(self) -> float:
        """Return what was taken since the last call, less the refill, to report to other servers."""
        told = min(self.taken, max(0.0, self.per_minute - self.level))
        self.taken = 0.0
        return told

    def hear(self, used: float) -> None:
        self._level = self.per_minute - used - self.taken
        self._then = self._clock()

    def seconds_until(self, amount: float) -> float:
        return max(0.0, amount - self.level) * _MINUTE / self.per_minute


class Account:
    """A key's running requests and remaining limits. Not thread-safe.

    owner: of the key's history, the same after every start. on_use: called when a limit was used or given back. places:
    this server's share of `max_concurrency`.
    """

    def __init__(self, key: StoredKey, clock: Clock = time.monotonic, owner: str = "") -> None:
        self.key = key
        self.owner = owner or owner_of_key(key.name)
        self.num_running = 0
        self._requests = Bucket(key.requests_per_minute, clock) if key.requests_per_minute else None
        self._tokens = Bucket(key.tokens_per_minute, clock) if key.tokens_per_minute else None
        self.on_use: Callable[[Account], None] | None = None
        self.places: int | None = None

    @property
    def name(self) -> str:
        return self.key.name

    @property
    def buckets(self) -> Mapping[str, Bucket]:
        kinds = (("requests", self._requests), ("tokens", self._tokens))
        return {kind: bucket for kind, bucket in kinds if bucket is not None}

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request while it runs. Raises RefusedError (429) beyond a limit.

        Its cost is taken when it is known, so it may start while any token is left.
        """
        most = self.key.max_concurrency
        if most is not None and self.num_running >= (most if self.places is None else min(most, self.places)):
            raise self._refusal(f"has {most} running requests, which is its limit", 1.0)
        if self._requests is not None and (wait := self._requests.seconds_until(1)):
            raise self._refusal(f"has used up its {self._requests.per_minute} requests a minute", wait)
        if self._tokens is not None and (wait := self._tokens.seconds_until(1)):
            raise self._refusal(f"has used up its {self._tokens.per_minute} tokens a minute", wait)
        self._take(self._requests, 1)
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            if most is not None and self.on_use is not None:
                self.on_use(self)

    def begin_row(self) -> bool:
        """Count a request of a batch. Returns False once half of a limit is used: the rest is for clients."""
        if any(bucket.level < bucket.per_minute / 2 for bucket in self.buckets.values()):
            return False
        self._take(self._requests, 1)
        return True

    def charge(self, num_tokens: int) -> None:
        self._take(self._tokens, num_tokens)

    def headers(self) -> dict[str, str]:
        """OpenAI's ``x-ratelimit-…``: the limit, the rest, and the time until the full limit is available."""
        shown = {}
        for kind, bucket in self.buckets.items():
            shown[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            shown[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level)))
            shown[f"x-ratelimit-reset-{kind}"] = duration(bucket.seconds_until(bucket.per_minute))
        return shown

    def _take(self, bucket: Bucket | None, amount: float) -> None:
        if bucket is not None and amount:
            bucket.take(amount)
            if self.on_use is not None:
                self.on_use(self)

    def _refusal(self, reason: str, wait: float) -> RefusedError:
        seconds = max(1, math.ceil(wait))
        return RefusedError(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"The API key {self.name} {reason}; try again in {seconds} s",
            "rate_limit_exceeded",
            retry_after=wait,
            headers=self.headers(),
        )


def duration(seconds: float) -> str:
    """Write seconds as ``6m0s``, ``1.5s`` or ``20ms``, rounded up to a millisecond."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"


class SharedLimits(Protocol):
    async def refresh(self, account: Account) -> None:
        """Update what other servers have taken of an account's limits."""


class KeyRing:
    """Plain keys, and keys of a file, which is reloaded when it changes. limits: shared with other servers."""

    def __init__(self, plain: Sequence[str], path: Path | None, clock: Clock = time.monotonic) -> None:
        """Raises ConfigurationError for an empty or too long key, or an unreadable file."""
        if not all(0 < len(key) <= MAX_KEY_LENGTH for key in plain):
            raise ConfigurationError(f"an API key must have 1 to {MAX_KEY_LENGTH} characters")
        self.limits: SharedLimits | None = None
        self._clock = clock
        self._plain = [
            Account(store(key, f"api-key-{number}"), clock, _owner(key)) for number, key in enumerate(plain, 1)
        ]
        self._path = path
        self._stored: list[Account] = []
        self._seen = None if path is None else _signature(path)
        self._checked = clock()
        if path is not None:
            self._stored = [Account(key, clock) for key in read_keys(path)]

    @classmethod
    def of(cls, config: ServerConfig) -> KeyRing | None:
        """None if no key is needed."""
        if not config.api_key and config.api_keys_file is None:
            return None
        return cls(config.api_key, None if config.api_keys_file is None else expanded(config.api_keys_file))

    def find(self, key: str) -> Account | None:
        """Compares all keys, so that timing reveals none."""
        self._reload()
        if not 0 < len(key) <= MAX_KEY_LENGTH:
            return None
        found = None
        for account in (*self._plain, *self._stored):
            if account.key.matches(key):
                found = account
        return found

    def of_owner(self, owner: str) -> Account | None:
        """Find the account that owns a history; None if its key was removed."""
        self._reload()
        return next((account for account in (*self._plain, *self._stored) if account.owner == owner), None)

    def _reload(self) -> None:
        """Reload a changed file. If it cannot be read, the old keys stay."""
        if self._path is None or self._clock() - self._checked < _RELOAD_INTERVAL:
            return
        self._checked = self._clock()
        seen = _signature(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            keys = read_keys(self._path)
        except ConfigurationError as error:
            logger.error("The API keys stay as they were: %s", error)
            return
        # an unchanged key keeps what it has used up
        known = {account.key: account for account in self._stored}
        self._stored = [known.get(key) or Account(key, self._clock) for key in keys]
        logger.info("Read %d API keys from %s", len(keys), self._path)


def owner_of_key(name: str) -> str:
    """Return the owner of a stored key's history. A new key with a removed key's name continues it."""
    return f"key {name}"


def _owner(key: str) -> str:
    """Return the owner of a plain key's history. People choose such keys, so the hash must be slow."""
    return "plain " + hashlib.scrypt(key.encode(), salt=b"vlmserve owner", n=2**14, r=8, p=1, dklen=24).hex()


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes with the file; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns

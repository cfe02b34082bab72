"""API keys and the file that stores their hashes."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from vlmserve.errors import ConfigurationError

MAX_KEY_LENGTH = 512
"""Maximum characters of a key; longer strings are rejected without hashing."""
_PREFIX = "vlm-"
_PERSON = b"vlmserve api key"
_SALT_BYTES = 16

Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=1)] | None
_Hex: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^(?:[0-9a-f]{2})+$")]


class StoredKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key's hash and limits. None: no limit."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,64}$")]
    salt: _Hex
    """16 bytes in hex."""
    hash: _Hex
    """The 32 bytes of `hash_key` in hex."""
    created: str = ""
    max_concurrency: Limit = None
    """Maximum concurrent requests."""
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    """Keys with the same salt share cached data; None: shared with no other key."""
    admin: bool = False
    """It may load and unload adapters."""

    def matches(self, key: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(hash_key(key, bytes.fromhex(self.salt)), bytes.fromhex(self.hash))

    @property
    def tenant(self) -> bytes:
        """32 bytes that identify everyone who shares cached data.

        They depend on the stored hash, so that a chosen salt cannot collide with another tenant.
        """
        own = bytes.fromhex(self.hash) if self.cache_salt is None else self.cache_salt.encode()
        return hashlib.blake2b(own, digest_size=32, person=b"cache tenant").digest()


def salted(tenant: bytes, cache_salt: str) -> str:
    """The salt, 64 hex digits, of cached data for a tenant's request with its own `cache_salt`."""
    return hashlib.blake2b(cache_salt.encode(), key=tenant, digest_size=32, person=b"cache salt").hexdigest()


def hash_key(key: str, salt: bytes) -> bytes:
    """key: at most `MAX_KEY_LENGTH` characters. It is random, so the hash may be fast."""
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=32, salt=salt, person=_PERSON).digest()


def new_key() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def store(key: str, name: str, **limits: int | str | None) -> StoredKey:
    """Raises ConfigurationError for an invalid name or limit."""
    salt = secrets.token_bytes(_SALT_BYTES)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    values = {"name": name, "salt": salt.hex(), "hash": hash_key(key, salt).hex(), "created": now, **limits}
    try:
        return msgspec.convert(values, StoredKey)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"this is not a key: {error}; a name has 1 to 64 characters and no spaces") from None


def read_keys(path: Path) -> list[StoredKey]:
    """Read the keys of a file. Raises ConfigurationError, naming the line."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"the keys in {path} cannot be read: {reason}") from None
    keys: dict[str, StoredKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key = msgspec.json.decode(line, type=StoredKey)
        except msgspec.MsgspecError as error:
            raise ConfigurationError(f"{path}, line {number}: {error}") from None
        if len(bytes.fromhex(key.salt)) != _SALT_BYTES:
            raise ConfigurationError(f"{path}, line {number}: the salt must have {_SALT_BYTES} bytes")
        if key.name in keys:
            raise ConfigurationError(f"{path}, line {number}: there are two keys with the name {key.name}")
        keys[key.name] = key
    return list(keys.values())


def add_key(path: Path, name: str, **limits: int | str | None) -> str:
    """Make a key, add its hash to a file, which need not exist, and return the key.

    Raises ConfigurationError if a key has that name already.
    """
    key = new_key()
    stored = store(key, name, **limits)
    keys = read_keys(path) if path.exists() else []
    if any(other.name == name for other in keys):
        raise ConfigurationError(f"there is a key with the name {name} in {path} already; remove it first")
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    _write(path, [*lines, msgspec.json.encode(stored).decode()])
    return key


def remove_key(path: Path, name: str) -> None:
    """Raises ConfigurationError if the key is not there."""
    if all(key.name != name for key in read_keys(path)):
        raise ConfigurationError(f"there is no key with the name {name} in {path}")
    lines = path.read_text("utf-8").splitlines()
    _write(path, [line for line in lines if not _is_of(line, name)])


def _is_of(line: str, name: str) -> bool:
    comment = not line.strip() or line.lstrip().startswith("#")
    return not comment and msgspec.json.decode(line, type=StoredKey).name == name


def _write(path: Path, lines: Sequence[str]) -> None:
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigurationError(f"another command is writing {path}; if none is, remove {new}") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
        os.fsync(descriptor)
    os.replace(new, path)

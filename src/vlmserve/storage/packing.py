"""Pack JSON: the bytes of data URLs are stored apart, once per content."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from blake3 import blake3

_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_BLOB = "$blob"
"""The only key of an object that replaces a data URL. No other stored object has this key."""


def digest_of(data: bytes) -> str:
    """The hexadecimal blake3 digest, the key of a blob."""
    return blake3(data).hexdigest()


def pack(value: Any) -> tuple[str, dict[str, bytes]]:
    """A JSON value as text, and the bytes of its data URLs by digest. `unpack` reverses it."""
    found: dict[str, bytes] = {}
    return msgspec.json.encode(_taken_out(value, found)).decode(), found


def unpack(body: str, blobs: Mapping[str, bytes]) -> Any:
    return _put_back(msgspec.json.decode(body), blobs)


def _taken_out(value: Any, found: dict[str, bytes]) -> Any:
    if isinstance(value, dict):
        return {key: _taken_out(field, found) for key, field in value.items()}
    if isinstance(value, list):
        return [_taken_out(element, found) for element in value]
    if not isinstance(value, str) or (head := _DATA_URL.match(value)) is None:
        return value
    encoded = value[head.end() :]
    try:
        data = msgspec.convert(encoded, bytes)
    except (msgspec.ValidationError, UnicodeEncodeError):
        return value
    if binascii.b2a_base64(data, newline=False) != encoded.encode():
        return value  # re-encoding would give other text
    digest = digest_of(data)
    found[digest] = data
    return {_BLOB: [head[0], digest]}


def _put_back(value: Any, blobs: Mapping[str, bytes]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_BLOB}:
            head, digest = value[_BLOB]
            return head + base64.b64encode(blobs[digest]).decode()
        return {key: _put_back(field, blobs) for key, field in value.items()}
    return [_put_back(element, blobs) for element in value] if isinstance(value, list) else value

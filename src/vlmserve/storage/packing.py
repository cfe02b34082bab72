"""JSON in which what data URLs hold is kept aside as bytes, once for all that hold the same."""

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
"""The only key of an object that stands for a data URL; nothing else in what is stored has a name like it."""


def digest_of(data: bytes) -> str:
    """The hexadecimal blake3 digest of `data`, under which it is stored."""
    return blake3(data).hexdigest()


def pack(value: Any) -> tuple[str, dict[str, bytes]]:
    """A JSON value as text, and the bytes of its data URLs by their digests. `unpack` gives the same value again."""
    found: dict[str, bytes] = {}
    return msgspec.json.encode(_taken_out(value, found)).decode(), found


def unpack(body: str, blobs: Mapping[str, bytes]) -> Any:
    """The value that was packed. blobs: has all that `digests_in` names."""
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
        return value  # what is written in another way comes back as it was
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

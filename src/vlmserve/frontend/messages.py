"""Chat messages in OpenAI's form, checked: every refusal names the place in the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmserve.errors import InvalidRequestError
from vlmserve.media.sources import ImageSource, is_url
from vlmserve.prompt.template import ImagePart, Message, Role
from vlmserve.types import MAX_CACHE_SALT

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def parse_messages(messages: Any, *, allow_local: bool) -> tuple[list[Message], list[tuple[str, ImageSource]]]:
    """The turns of a conversation, and its pictures in order, each with the place that it came from.

    allow_local: take pictures that only a caller in this process may give.
    Raises InvalidRequestError for anything that is not a conversation.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequestError("messages must be a list", param="messages")
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    parsed: list[Message] = []
    sources: list[tuple[str, ImageSource]] = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"{place} must be an object with role and content", param=place)
        role = _role(message, place)
        content = message.get("content")
        if isinstance(content, str):
            if not content and role != "assistant":
                raise InvalidRequestError(f"{place}.content must not be empty", param=f"{place}.content")
            check_unicode(content, f"{place}.content")
            parsed.append(Message(role, (content,), is_string=True))
        else:
            parsed.append(Message(role, _parts(content, f"{place}.content", sources, allow_local)))
    return parsed, sources


def check_unicode(text: str, place: str) -> None:
    """Raises InvalidRequestError for a string with half a surrogate pair, which JSON can write but is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{place} is not valid Unicode text", param=place) from error


def check_cache_salt(salt: Any) -> str:
    """`salt`, or "" for None. Raises InvalidRequestError for what is no salt."""
    if salt is None:
        return ""
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_CACHE_SALT:
        raise InvalidRequestError(
            f"cache_salt must be a string of 1 to {MAX_CACHE_SALT} characters, not {salt!r:.100}", param="cache_salt"
        )
    check_unicode(salt, "cache_salt")
    return salt


def check_remote(source: Any, place: str) -> str:
    """`source`, if it is a URL. Raises InvalidRequestError for all that only a caller in this process may give."""
    if not isinstance(source, str) or not is_url(source):
        raise InvalidRequestError(f"{place} must be a URL that begins with http://, https:// or data:", param=place)
    return source


def _role(message: Mapping[str, Any], place: str) -> Role:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise InvalidRequestError(f"{place}.role must be one of {known}, not {role!r:.100}", param=f"{place}.role")
    return _ROLES[role]


def _parts(
    content: Any, place: str, sources: list[tuple[str, ImageSource]], allow_local: bool
) -> tuple[str | ImagePart, ...]:
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequestError(f"{place} must be a string or a list of parts", param=place)
    if not content:
        raise InvalidRequestError(f"{place} must not be empty", param=place)
    parts: list[str | ImagePart] = []
    for index, part in enumerate(content):
        at = f"{place}[{index}]"
        if not isinstance(part, Mapping):
            raise InvalidRequestError(f"{at} must be an object with a type", param=at)
        kind = part.get("type")
        if kind == "text":
            parts.append(_text(part, at))
        elif kind == "image_url":
            sources.append(_image_url(part, at, allow_local))
            parts.append(ImagePart())
        elif kind == "image" and allow_local:
            sources.append(_image(part, at))
            parts.append(ImagePart())
        else:
            raise InvalidRequestError(f"{at}.type must be text or image_url, not {kind!r:.100}", param=f"{at}.type")
    return tuple(parts)


def _text(part: Mapping[str, Any], place: str) -> str:
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{place}.text must be a string", param=f"{place}.text")
    check_unicode(text, f"{place}.text")
    return text


def _image_url(part: Mapping[str, Any], place: str, allow_local: bool) -> tuple[str, ImageSource]:
    value, place = part.get("image_url"), f"{place}.image_url"
    if isinstance(value, Mapping):
        value, place = value.get("url"), f"{place}.url"
    if allow_local and isinstance(value, str) and value:
        return place, value
    return place, check_remote(value, place)


def _image(part: Mapping[str, Any], place: str) -> tuple[str, ImageSource]:
    source = part.get("image")
    if source is None or source == "":
        raise InvalidRequestError(f"{place}.image must be a picture, a path or a URL", param=f"{place}.image")
    return f"{place}.image", source

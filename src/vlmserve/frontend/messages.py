"""Checks chat messages in OpenAI's form. Errors name the place in the request."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vlmserve.errors import InvalidRequestError
from vlmserve.media.arrays import frames_of
from vlmserve.media.budget import BUDGET_FIELDS, NO_BUDGET, ImageBudget
from vlmserve.media.sources import DocumentSource, ImageSource, is_url
from vlmserve.media.videos import VideoSource
from vlmserve.prompt.template import REASONING_FIELDS, ImagePart, Message, Part, Role, ToolCall, VideoPart
from vlmserve.settings.config import MAX_FPS
from vlmserve.types import MAX_CACHE_SALT, MediaKind

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

_LOCAL_IMAGES = ("image", "image_pil")
"""Message parts that only callers in this process may give."""
MAX_DEPTH = 100
"""Maximum depth of JSON in tool calls and function descriptions."""


@dataclass(frozen=True)
class Medium:
    kind: MediaKind
    place: str
    """In the request."""
    source: Any
    budget: ImageBudget = NO_BUDGET
    fps: float | None = None
    is_local: bool = False
    """A caller in this process gave it."""
    pages: str | None = None


def with_kwargs(media: Sequence[Medium], kwargs: Any) -> list[Medium]:
    """Apply ``mm_processor_kwargs`` to media without settings of their own.

    Raises InvalidRequestError for anything but an object with `BUDGET_FIELDS` and ``fps``.
    """
    if kwargs is None:
        return list(media)
    place, known = "mm_processor_kwargs", (*BUDGET_FIELDS, "fps")
    unknown = [name for name in kwargs if name not in known] if isinstance(kwargs, Mapping) else [kwargs]
    if unknown:
        raise _wrong(place, f"must be an object with {', '.join(known)}, not {unknown[0]!r:.100}")
    default, fps = _budget(kwargs, place), _fps(kwargs, place)
    return [replace(medium, budget=medium.budget.or_else(default), fps=medium.fps or fps) for medium in media]


def replace_media(
    messages: Sequence[Message],
    media: Sequence[Medium],
    kind: MediaKind,
    expand: Callable[[Medium], tuple[Sequence[Part], Sequence[Medium]]],
) -> tuple[list[Message], list[Medium]]:
    """Replace all media of a kind by other parts.

    media: all parts that are not text, in order. expand: returns the replacing parts, and the media among them.
    """
    if all(medium.kind != kind for medium in media):
        return [*messages], [*media]
    rest = iter(media)
    shown: list[Message] = []
    expanded: list[Medium] = []
    for message in messages:
        parts: list[Part] = []
        for part in message.parts:
            if isinstance(part, str):
                parts.append(part)
                continue
            medium = next(rest)
            new_parts, new_media = expand(medium) if medium.kind == kind else ([part], [medium])
            parts += new_parts
            expanded += new_media
        shown.append(replace(message, parts=tuple(parts)))
    return shown, expanded


def check_conversations(messages: Any) -> None:
    """Raise InvalidRequestError for anything but a conversation, or a list or iterator of them."""
    several = isinstance(messages, Iterable) and not isinstance(messages, str | bytes | Mapping)
    looked_at = messages if isinstance(messages, Sequence) else ()
    if not several or any(isinstance(message, str | bytes) for message in looked_at):
        raise InvalidRequestError(
            'messages must be a list of messages, like [{"role": "user", "content": "Hello"}], or a list of such '
            "lists; LLM.generate continues plain text",
            param="messages",
        )


def parse_messages(messages: Any, *, allow_local: bool) -> tuple[list[Message], list[Medium]]:
    """Return the turns of a conversation, and its images, videos and documents in order.

    Until its pages are known, a document counts as one image. allow_local: accept media that only a caller in this
    process may give. Raises InvalidRequestError.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequestError(
            "messages must be a list of objects with role and content, like "
            '[{"role": "user", "content": "What is this?"}]',
            param="messages",
        )
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    parsed: list[Message] = []
    media: list[Medium] = []
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"{place} must be an object with role and content", param=place)
        role = _role(message, place)
        content = message.get("content")
        sent = _tool_calls(message.get("tool_calls"), f"{place}.tool_calls") if role == "assistant" else ()
        names |= {call.id: call.name for call in sent}
        if sent and content is None:
            content = ""
        calls = tuple(call for call in sent if isinstance(call, ToolCall))
        reasoning = _reasoning(message, place) if role == "assistant" else None
        content = _with_incomplete_calls(content, [call.text for call in sent if isinstance(call, _IncompleteCall)])
        if isinstance(content, str):
            check_unicode(content, f"{place}.content")
            turn = Message(role, (content,), is_string=True, tool_calls=calls, reasoning=reasoning)
        else:
            parts = _parts(content, f"{place}.content", media, allow_local)
            turn = Message(role, parts, tool_calls=calls, reasoning=reasoning)
        parsed.append(turn if role != "tool" else _result(turn, message.get("tool_call_id"), names, place))
    return parsed, media


def check_begun(messages: Sequence[Message]) -> None:
    """Raise InvalidRequestError unless the last message is an answer to continue."""
    last, place = messages[-1], f"messages[{len(messages) - 1}]"
    text = last.parts[-1]
    if last.role != "assistant" or last.tool_calls or not isinstance(text, str) or not text:
        raise InvalidRequestError(
            "continue_final_message needs an assistant message that ends with text as the last message", param=place
        )


def _reasoning(message: Mapping[str, Any], place: str) -> str | None:
    for name in REASONING_FIELDS:
        text = message.get(name)
        if text is None:
            continue
        if not isinstance(text, str):
            raise InvalidRequestError(f"{place}.{name} must be a string", param=f"{place}.{name}")
        check_unicode(text, f"{place}.{name}")
        return text
    return None


class _IncompleteCall(NamedTuple):
    """A tool call that the token limit cut off."""

    id: str
    name: str
    arguments: str
    """The text written so far."""

    @property
    def text(self) -> str:
        return f'{{"name": {json.dumps(self.name, ensure_ascii=False)}, "arguments": {self.arguments}'


def _with_incomplete_calls(content: Any, texts: Sequence[str]) -> Any:
    if not texts:
        return content
    if isinstance(content, str):
        return "\n".join([*([content] if content else []), *texts])
    return [*content, *({"type": "text", "text": text} for text in texts)] if isinstance(content, list) else content


def _tool_calls(calls: Any, place: str) -> tuple[ToolCall | _IncompleteCall, ...]:
    """Parse calls, whose arguments may also be an object. Raises InvalidRequestError."""
    if calls is None:
        return ()
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise InvalidRequestError(f"{place} must be a list", param=place)
    parsed: list[ToolCall | _IncompleteCall] = []
    for index, call in enumerate(calls):
        at = f"{place}[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not all(
            isinstance(x, str) for x in (call.get("id"), function.get("name"))
        ):
            raise _wrong(at, "must be an object with an id and a function with a name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                for text in (call["id"], function["name"], arguments):
                    check_unicode(text, at)
                parsed.append(_IncompleteCall(call["id"], function["name"], arguments))
                continue
            except RecursionError:
                arguments = None
        if not isinstance(arguments, dict) or is_too_deep(arguments):
            raise _wrong(f"{at}.function.arguments", f"must be a JSON object of at most {MAX_DEPTH} levels")
        for text in (call["id"], function["name"], json.dumps(arguments, ensure_ascii=False)):
            check_unicode(text, at)
        parsed.append(ToolCall(call["id"], function["name"], arguments))
    return tuple(parsed)


def _result(turn: Message, call_id: Any, names: Mapping[str, str], place: str) -> Message:
    if not isinstance(call_id, str):
        raise _wrong(f"{place}.tool_call_id", "must name the call whose result this is")
    check_unicode(call_id, f"{place}.tool_call_id")
    return replace(turn, tool_call_id=call_id, name=names.get(call_id))


def is_too_deep(value: Any) -> bool:
    """Return whether more than `MAX_DEPTH` lists and objects are nested."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(inner, Mapping | list)
        ]
        if not level:
            return False
    return True


def check_unicode(text: str, place: str) -> None:
    """Raise InvalidRequestError for an unpaired surrogate, which UTF-8 cannot express."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{place} is not valid Unicode text", param=place) from error


def check_cache_salt(salt: Any) -> str:
    """Return "" for None. Raises InvalidRequestError for an invalid salt."""
    if salt is None:
        return ""
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_CACHE_SALT:
        raise InvalidRequestError(
            f"cache_salt must be a string of 1 to {MAX_CACHE_SALT} characters, not {salt!r:.100}", param="cache_salt"
        )
    check_unicode(salt, "cache_salt")
    return salt


def check_remote(source: Any, place: str) -> str:
    if not isinstance(source, str) or not is_url(source):
        raise InvalidRequestError(f"{place} must be a URL that begins with http://, https:// or data:", param=place)
    return source


def _role(message: Mapping[str, Any], place: str) -> Role:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise InvalidRequestError(f"{place}.role must be one of {known}, not {role!r:.100}", param=f"{place}.role")
    return _ROLES[role]


def _parts(content: Any, place: str, media: list[Medium], allow_local: bool) -> tuple[Part, ...]:
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequestError(f"{place} must be a string or a list of parts", param=place)
    parts: list[Part] = []
    for index, part in enumerate(content):
        at = f"{place}[{index}]"
        if not isinstance(part, Mapping):
            raise InvalidRequestError(f"{at} must be an object with a type", param=at)
        kind = part.get("type")
        if kind == "text":
            parts.append(_text(part, at))
        elif kind == "image_url" or (kind in _LOCAL_IMAGES and allow_local):
            place_of, image = _url(part, kind, at, allow_local) if kind == "image_url" else _image(part, kind, at)
            media.append(Medium("image", place_of, image, _budget(part, at), is_local=allow_local))
            parts.append(ImagePart())
        elif kind in ("video_url", "video"):
            place_of, video = (
                _url(part, kind, at, allow_local) if kind == "video_url" else _video(part, at, allow_local)
            )
            media.append(Medium("video", place_of, video, _budget(part, at), _fps(part, at), allow_local))
            parts.append(VideoPart())
        elif kind == "file" or (kind == "document" and allow_local):
            place_of, document = _file(part, at) if kind == "file" else _document(part, at)
            budget, pages = _budget(part, at), _pages(part, at)
            media.append(Medium("document", place_of, document, budget, is_local=allow_local, pages=pages))
            parts.append(ImagePart())
        else:
            raise _wrong(f"{at}.type", f"must be text, image_url, video_url, video or file, not {kind!r:.100}")
    return tuple(parts) or ("",)


def _text(part: Mapping[str, Any], place: str) -> str:
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{place}.text must be a string", param=f"{place}.text")
    check_unicode(text, f"{place}.text")
    return text


def _url(part: Mapping[str, Any], kind: str, place: str, allow_local: bool) -> tuple[str, Any]:
    value, place = part.get(kind), f"{place}.{kind}"
    if isinstance(value, Mapping):
        value, place = value.get("url"), f"{place}.url"
    if allow_local and not _is_nothing(value):
        return place, value
    return place, check_remote(value, place)


def _image(part: Mapping[str, Any], kind: str, place: str) -> tuple[str, ImageSource]:
    """An image of a caller in this process, in the form of vLLM or of Transformers' templates."""
    name = next((name for name in (kind, "image", "url", "path") if not _is_nothing(part.get(name))), None)
    if name is None:
        raise InvalidRequestError(f"{place}.{kind} must be an image, a path or a URL", param=f"{place}.{kind}")
    return f"{place}.{name}", part[name]


def _is_nothing(source: object) -> bool:
    return source is None or (isinstance(source, str | bytes) and not source)


def _file(part: Mapping[str, Any], place: str) -> tuple[str, str]:
    """A document's URL. file_data may also be plain base64."""
    file, place = part.get("file"), f"{place}.file"
    for name in ("file_data", "file_url"):
        value = file.get(name) if isinstance(file, Mapping) else None
        if isinstance(value, str) and value:
            if name == "file_data" and not is_url(value):
                value = f"data:application/octet-stream;base64,{value}"
            return f"{place}.{name}", check_remote(value, f"{place}.{name}")
    raise InvalidRequestError(f"{place} must be an object with the document in file_data", param=place)


def _document(part: Mapping[str, Any], place: str) -> tuple[str, DocumentSource]:
    source, place = part.get("document"), f"{place}.document"
    if not isinstance(source, str | bytes | os.PathLike) or not source:
        raise InvalidRequestError(f"{place} must be a path, a URL, or the bytes of a file", param=place)
    return place, source


def _pages(part: Mapping[str, Any], place: str) -> str | None:
    pages = part.get("pages")
    if pages is not None and not isinstance(pages, str):
        raise InvalidRequestError(f'{place}.pages must be a string like "1-3,7"', param=f"{place}.pages")
    return pages


def _video(part: Mapping[str, Any], place: str, allow_local: bool) -> tuple[str, VideoSource]:
    """A file (only from callers in this process), or the list of frames."""
    source, place = frames_of(part.get("video")), f"{place}.video"
    if isinstance(source, list | tuple) and source:
        if not allow_local:
            for index, frame in enumerate(source):
                check_remote(frame, f"{place}[{index}]")
        return place, list(source)
    if not allow_local:
        raise InvalidRequestError(f"{place} must be a list of the URLs of frames; a file is a video_url", param=place)
    if isinstance(source, list | tuple) or _is_nothing(source):
        raise InvalidRequestError(f"{place} must be a list of frames, a path or a URL", param=place)
    return place, source


def _budget(fields: Mapping[str, Any], place: str) -> ImageBudget:
    for name in BUDGET_FIELDS:
        value = fields.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise _wrong(f"{place}.{name}", f"must be a positive whole number, not {value!r:.100}")
    url = fields.get("image_url")
    return ImageBudget.of(fields, url.get("detail") if isinstance(url, Mapping) else None)


def _fps(part: Mapping[str, Any], place: str) -> float | None:
    fps = part.get("fps")
    if fps is None:
        return None
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not 0 < fps <= MAX_FPS:
        raise _wrong(f"{place}.fps", f"must be more than 0 and at most {MAX_FPS}, not {fps!r:.100}")
    return float(fps)


def _wrong(place: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{place} {problem}", param=place)

"""Routing keys: what a request shares with others, from its body alone.

Segments are images and pieces of text of fixed length, neither tokenized nor decoded. Their digests cover the model,
the adapter, the tenant's salt and all earlier segments, so equal digests mean equal prefixes. A wrong guess costs time
but not correctness.
"""

from __future__ import annotations

import binascii
import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

DIGEST_BYTES = 16
CHUNK = 512
"""Characters in a text segment."""
MAX_SEGMENTS = 1024
"""Maximum segments of a request; the rest of the prompt is ignored."""
_CHARACTERS_PER_TOKEN = 4
_PIXELS_PER_TOKEN = 28 * 28
_LEAST_IMAGE_TOKENS, _MOST_IMAGE_TOKENS = 64, 4096
_UNKNOWN_IMAGE_TOKENS = 512
"""For an image given by URL or id, whose size is unknown."""
_TEXTS = ("text", "input_text", "output_text", "refusal")
_CALLS = ("tool_use", "tool_result", "function_call")
_NOT_CONTENT = frozenset({"type", "media_type", "format", "cache_control"})
_INSTRUCTIONS = frozenset({"system", "developer"})
_MAX_DEPTH = 16
_MAX_DATA_HEAD = 256
"""Maximum characters before the comma of a data URL."""
HEAD_CHARACTERS = 16 * 1024
"""Base64 characters to read. The size of a JPEG with a longer preview stays unknown."""
_JPEG_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})


class Segment(NamedTuple):
    digest: bytes
    """Covers the prompt up to the end of this segment."""
    tokens: int
    """Estimated tokens up to the end of this segment."""


class Home(NamedTuple):
    """A part of a prompt that other requests may share. All gateways map it to the same worker."""

    number: int
    """The part's hash, below 2**64."""
    tokens: int
    """Tokens that are cached there if earlier requests had the part; 0 for the start of a conversation, whose own later
    requests find it."""


class RequestKey(NamedTuple):
    segments: tuple[Segment, ...]
    images: tuple[bytes, ...]
    """Digests of the images' contents with the tenant's salt, independent of their positions."""
    tokens: int
    """Estimated length of the prompt."""
    homes: tuple[Home, ...]
    """Homes of the first image, the instructions and the first turn."""
    root: bytes
    """The start of the chain of digests."""
    follows: str | None = None
    """The id of the response or conversation that the request continues."""
    conversation: str | None = None
    """The id, if the request continues a conversation."""

    @property
    def continues(self) -> bool:
        return self.follows is not None or (bool(self.homes) and self.homes[-1].tokens > 0)

    def history(self, id: str) -> bytes:
        """The digest of a stored response or conversation. It stands for the prompt up to there."""
        return blake3(self.root + b"history" + id.encode(errors="surrogatepass")).digest(DIGEST_BYTES)

    def after(self, tokens: int) -> RequestKey:
        """The key after a history of `tokens` tokens."""
        segments = tuple(Segment(digest, tokens + before) for digest, before in self.segments)
        homes = tuple(Home(number, tokens + before) for number, before in self.homes)
        return self._replace(segments=segments, tokens=self.tokens + tokens, homes=homes)


class _Turn(NamedTuple):
    role: str


class _Image(NamedTuple):
    digest: bytes
    tokens: int


def request_key(body: Mapping[str, Any], *, model: str, salt: str = "", adapter: str = "") -> RequestKey:
    """body: decoded JSON of any shape; the worker validates it. salt: the tenant's and the request's own."""
    start = blake3(b"root")
    for part in (model, adapter, salt):
        encoded = part.encode(errors="surrogatepass")
        start.update(len(encoded).to_bytes(8, "little") + encoded)
    if body.get("mm_processor_kwargs"):
        # These change every image.
        start.update(_json(body["mm_processor_kwargs"]).encode(errors="surrogatepass"))
    key = RequestKey((), (), 0, (), start.digest(), *_continued(body))
    chain = _Chain(key.root)
    if key.follows is not None:
        chain.digest = key.history(key.follows)
        chain.segments.append(Segment(chain.digest, 0))
    for piece in itertools.islice(_pieces(body), MAX_SEGMENTS):
        chain.add(piece)
    homes = tuple(chain.homes(key.follows))
    return key._replace(segments=tuple(chain.segments), images=tuple(chain.images), tokens=chain.tokens, homes=homes)


class _Chain:
    def __init__(self, root: bytes) -> None:
        self.root = root
        self.digest = root[:DIGEST_BYTES]
        self.tokens = 0
        self.segments: list[Segment] = []
        self.images: list[bytes] = []
        self._image_end = 0
        self._num_turns = 0
        self._instructions: Segment | None = None
        """The last segment before the first turn."""
        self._first_turn: bytes | None = None
        """The digest at the end of the first turn."""
        self._before_last_turn = 0
        """Tokens."""

    def add(self, piece: str | _Image | _Turn) -> None:
        if isinstance(piece, _Image):
            image = blake3(self.root + piece.digest).digest(DIGEST_BYTES)
            self._extend(b"image" + image, piece.tokens)
            self.images.append(image)
            self._image_end = self._image_end or self.tokens
        elif isinstance(piece, _Turn):
            if piece.role not in _INSTRUCTIONS:
                if self._num_turns == 0 and self.segments:
                    self._instructions = self.segments[-1]
                elif self._num_turns == 1:
                    self._first_turn = self.digest
                self._num_turns += 1
                self._before_last_turn = self.tokens
            self._extend(b"turn" + piece.role[:CHUNK].encode(errors="surrogatepass"), 1)
        else:
            self._extend(b"text" + piece.encode(errors="surrogatepass"), 1 + len(piece) // _CHARACTERS_PER_TOKEN)

    def homes(self, follows: str | None) -> Iterator[Home]:
        if follows is not None:
            yield _home(self.segments[0].digest, 0)
            return
        if self.images:
            yield _home(self.images[0], self._image_end)
        if self._instructions is not None:
            yield _home(*self._instructions)
        if self._num_turns:
            yield _home(self._first_turn or self.digest, self._before_last_turn if self._first_turn else 0)

    def _extend(self, content: bytes, tokens: int) -> None:
        self.digest = blake3(self.digest + content).digest(DIGEST_BYTES)
        self.tokens += tokens
        self.segments.append(Segment(self.digest, self.tokens))


def _home(digest: bytes, tokens: int) -> Home:
    return Home(int.from_bytes(digest[:8], "little"), tokens)


def _continued(body: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The continued id, and the conversation's id if it is one."""
    conversation = body.get("conversation")
    if isinstance(conversation, Mapping):
        conversation = conversation.get("id")
    conversation = conversation if isinstance(conversation, str) else None
    response = body.get("previous_response_id")
    return (response if isinstance(response, str) else conversation), conversation


def _pieces(body: Mapping[str, Any]) -> Iterator[str | _Image | _Turn]:
    """Turns, images and texts of at most `CHUNK` characters, in the order of chat templates."""
    if tools := body.get("tools"):
        yield from _chunks(_json(tools))
    for field in ("system", "instructions"):
        if field in body:
            yield from _item_pieces("system", body[field])
    for field in ("messages", "input", "prompt", "documents"):
        content = body.get(field)
        if isinstance(content, list) and content and isinstance(content[0], Mapping):
            for item in content:
                yield from _message_pieces(item)
        elif content is not None:
            yield from _item_pieces("user", content)


def _message_pieces(item: Any) -> Iterator[str | _Image | _Turn]:
    if isinstance(item, Mapping) and "content" in item:
        yield from _item_pieces(str(item.get("role")), item["content"])
        rest = {name: value for name, value in item.items() if name not in ("role", "content", "type", "id", "status")}
        if rest:
            yield from _chunks(_json(rest))
    else:
        yield from _chunks(_json(item))


def _item_pieces(role: str, content: Any) -> Iterator[str | _Image | _Turn]:
    yield _Turn(role)
    if isinstance(content, str):
        yield from _chunks(content)
    elif isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping):
                yield from _chunks(_json(part))
            elif part.get("type") in _TEXTS and isinstance(part.get("text"), str):
                yield from _chunks(part["text"])
            elif part.get("type") in _CALLS:
                yield from _chunks(_json(part))
            else:
                yield _image(part)
    else:
        yield from _chunks(_json(content))


def _chunks(text: str) -> Iterator[str]:
    for start in range(0, len(text), CHUNK):
        yield text[start : start + CHUNK]


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        return repr(value)  # a lone surrogate, which workers reject


def _image(part: Mapping[str, Any]) -> _Image:
    """Content and processing options."""
    digest, tokens = blake3(), 0
    for name, value in _leaves(part, "", 0):
        if not isinstance(value, str):
            digest.update(f"{name}={value!r};".encode(errors="surrogatepass"))
            continue
        # The content decides, not a data URL's media type. A memoryview copies large values only once.
        start = 1 + value.find(",", 0, _MAX_DATA_HEAD) if value.startswith("data:") else 0
        digest.update(memoryview(value.encode(errors="surrogatepass"))[start:])
        if start or name == "data":
            size = size_of_base64(value[start : start + HEAD_CHARACTERS])
            area = _UNKNOWN_IMAGE_TOKENS if size is None else size[0] * size[1] // _PIXELS_PER_TOKEN
            tokens += min(_MOST_IMAGE_TOKENS, max(_LEAST_IMAGE_TOKENS, area))
    return _Image(digest.digest(), tokens or _UNKNOWN_IMAGE_TOKENS)


def _leaves(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """All values and their names, except fields about encoding."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, Mapping):
        for key in sorted(value):
            if key not in _NOT_CONTENT:
                yield from _leaves(value[key], key, depth + 1)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for entry in value:
            yield from _leaves(entry, name, depth + 1)
    elif value is not None and not (isinstance(value, str) and name == "type"):
        yield name, value


def size_of_base64(text: str) -> tuple[int, int] | None:
    """None: the head does not say."""
    try:
        return size_of(binascii.a2b_base64(text[:HEAD_CHARACTERS]))
    except (binascii.Error, ValueError):
        return None


def size_of(head: bytes) -> tuple[int, int] | None:
    """Width and height; None: the head does not say."""
    try:
        if head[:8] == b"\x89PNG\r\n\x1a\n":
            width, height = struct.unpack_from(">II", head, 16)
        elif head[:6] in (b"GIF87a", b"GIF89a"):
            width, height = struct.unpack_from("<HH", head, 6)
        elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
            return _webp_size(head)
        elif head[:2] == b"\xff\xd8":
            return _jpeg_size(head)
        else:
            return None
    except (struct.error, IndexError):
        return None
    return width, height


def _jpeg_size(head: bytes) -> tuple[int, int] | None:
    position = 2
    while head[position] == 0xFF:
        marker = head[position + 1]
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", head, position + 5)
            return width, height
        position += 2 + struct.unpack_from(">H", head, position + 2)[0]
    return None


def _webp_size(head: bytes) -> tuple[int, int] | None:
    kind = head[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None

"""Finds out which part of a prompt changed when it reuses less of the cache than an earlier one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from vlmserve.server.schema.usage import PromptTokensDetails, Usage
from vlmserve.types import Missed, Prompt

MAX_BYTES = 32 * 2**20
"""Maximum size of the prompts that are remembered."""
_GENERATION_PROMPT = 16
"""Maximum tokens of the marker that begins an answer."""
_SAMPLE = 32 * 1024
"""Bytes of each end of a long file that its digest covers."""
_PART_BYTES = 100
"""About as many bytes as a digest takes."""

_LIMITS = frozenset({"min_pixels", "max_pixels", "max_tokens", "detail", "fps"})
"""Fields of a part that limit its size."""

Reason = Literal[
    "model", "salt", "truncated", "tools", "system", "messages", "budget", "settings",
    "evicted", "no_checkpoint", "never_seen", "not_cacheable",
]  # fmt: skip
"""truncated: the prompts lost beginnings of different lengths (`truncate_prompt_tokens`). budget: size limits of all
images. settings: other values that the chat template reads. The last four: nothing changed, and the caches lack the
prompt. never_seen: another worker answered, or the engine has restarted. not_cacheable: the request may not use cached
tokens."""


DETAILS: Mapping[Reason, str] = {
    "salt": "cache_salt_changed", "truncated": "prompt_truncated", "budget": "image_budget_changed",
    "settings": "prompt_settings_changed", "evicted": "evicted", "no_checkpoint": "no_checkpoint",
    "never_seen": "never_seen", "not_cacheable": "not_cacheable",
}  # fmt: skip
"""Names of reasons that OpenAI's and Anthropic's APIs lack."""


class Changed(msgspec.Struct, frozen=True):
    """The first part that changed. message, part: numbers from 0, the system message left out."""

    message: int
    part: int
    kind: str
    """text, image, video, document, role, or calls; image_budget: only its size limits changed; removed: the message
    is missing.
    """


class _Part(NamedTuple):
    kind: str
    digest: bytes
    source: bytes = b""
    """Digest of an image, video or document without size limits."""


@dataclass(frozen=True, slots=True)
class Miss:
    reason: Reason
    reusable_tokens: int
    """Leading tokens that both prompts have in common."""
    missed_tokens: int
    """Tokens of the prompt after them."""
    lost_tokens: int
    """Tokens of the earlier prompt after them."""
    changed: Changed | None = None
    seconds_since_eviction: float | None = None

    def details(self) -> dict[str, Any]:
        """Fields of answers for what OpenAI's and Anthropic's types lack."""
        fields = {
            "detail": DETAILS.get(self.reason),
            "changed": self.changed,
            "seconds_since_eviction": self.seconds_since_eviction,
        }
        return {name: value for name, value in fields.items() if value is not None}


class AskedPrompt:
    def __init__(
        self,
        owner: str,
        salt: str,
        messages: Sequence[Mapping[str, Any]],
        tools: object,
        prompt: Prompt,
        budget: object = None,
        cut: int = 0,
    ) -> None:
        """messages: of chat completions. owner: the only one who may compare with it. budget: of all images.

        cut: tokens that the beginning of the prompt has lost.
        """
        self.owner, self._salt, self._cut = owner, salt, cut
        self._tools, self._budget = _digest(tools), _digest(budget)
        self._system = [_parts(one) for one in messages if one["role"] in ("system", "developer")]
        self._messages = [_parts(one) for one in messages if one["role"] not in ("system", "developer")]
        self._token_ids: npt.NDArray[np.int32] = np.array(prompt.token_ids, np.int32)
        self._images = [(span.start, span.image.key) for span in prompt.images]

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        num_parts = sum(map(len, self._messages)) + sum(map(len, self._system)) + len(self._images)
        return self._token_ids.nbytes + _PART_BYTES * (num_parts + 10)

    def miss_after(self, earlier: AskedPrompt) -> Miss | None:
        """Return why a prompt cannot reuse all of an earlier one; None if it can."""
        common = self._num_common(earlier)
        reason, changed = self._change(earlier, common)
        if reason is None:
            return None
        reusable = 0 if reason in ("model", "salt") else common
        return Miss(reason, reusable, len(self._token_ids) - reusable, len(earlier._token_ids) - reusable, changed)

    def not_cached(self, earlier: AskedPrompt, details: PromptTokensDetails, block_size: int) -> Miss | None:
        """Return a miss if the caches lack full blocks of the common beginning."""
        common = min(self._num_common(earlier), len(self._token_ids) - 1)
        cached, missed = details.cached_tokens, details.missed_tokens or Missed()
        if cached >= common // block_size * block_size:
            return None
        reason: Reason = "never_seen"
        if missed.evicted or missed.no_checkpoint:
            reason = "evicted" if missed.evicted else "no_checkpoint"
        elif missed.not_cacheable and not missed.never_seen:
            reason = "not_cacheable"
        age = missed.seconds_since_eviction
        return Miss(reason, common, self.num_tokens - cached, common - cached, seconds_since_eviction=age)

    def _num_common(self, earlier: AskedPrompt) -> int:
        shorter = min(len(self._token_ids), len(earlier._token_ids))
        different = np.flatnonzero(self._token_ids[:shorter] != earlier._token_ids[:shorter])
        common = int(different[0]) if len(different) else shorter
        for (start, key), (other_start, other_key) in zip(self._images, earlier._images, strict=False):
            if (start, key) != (other_start, other_key):
                return min(common, start, other_start)
        rest = [*self._images[len(earlier._images) :], *earlier._images[len(self._images) :]]
        return min([common, *(start for start, _ in rest)])

    def _change(self, earlier: AskedPrompt, common: int) -> tuple[Reason | None, Changed | None]:
        if self._salt != earlier._salt:
            return "salt", None
        if common >= len(earlier._token_ids):
            return None, None
        if self._cut != earlier._cut:
            return "truncated", None
        if self._tools != earlier._tools:
            return "tools", None
        if self._system != earlier._system:
            return "system", None
        changed = _first_change(earlier._messages, self._messages)
        if changed is not None:
            return "messages", changed
        if self._budget != earlier._budget:
            return "budget", None
        # some templates start an answer differently from how they show it in the next turn
        return ("settings", None) if common < earlier.num_tokens - _GENERATION_PROMPT else (None, None)


class CacheLog:
    """Prompts of recent responses, by the ids of the responses."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._asked: OrderedDict[str, tuple[str, AskedPrompt]] = OrderedDict()
        self._num_bytes = 0

    def keep(self, response_id: str, model: str, asked: AskedPrompt) -> None:
        self._asked[response_id] = model, asked
        self._num_bytes += asked.num_bytes
        while self._num_bytes > MAX_BYTES:
            _, (_, oldest) = self._asked.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def find(self, response_id: str, owner: str) -> tuple[str, AskedPrompt] | None:
        """None: unknown or forgotten."""
        found = self._asked.get(response_id)
        return None if found is None or found[1].owner != owner else found


class Diagnosis:
    def __init__(self, log: CacheLog, asked: AskedPrompt, earlier_id: str | None) -> None:
        """earlier_id: of an earlier response, if any."""
        self._log, self._asked = log, asked
        self._earlier = None if earlier_id is None else log.find(earlier_id, asked.owner)
        self.compares = earlier_id is not None
        self.is_unknown = earlier_id is not None and self._earlier is None
        """There is no such response of this owner, or it is forgotten."""

    def begin(self, response_id: str, model: str) -> Miss | None:
        """Remember the prompt. Return what changed since the earlier one, if known."""
        self._log.keep(response_id, model, self._asked)
        if self._earlier is None:
            return None
        earlier_model, earlier = self._earlier
        if model != earlier_model:
            return Miss("model", 0, self._asked.num_tokens, earlier.num_tokens)
        return self._asked.miss_after(earlier)

    def end(self, usage: Usage) -> Miss | None:
        """Return a miss of an unchanged prompt."""
        if self._earlier is None:
            return None
        return self._asked.not_cached(self._earlier[1], usage.prompt_tokens_details, self._log.block_size)


def _first_change(before: Sequence[list[_Part]], after: Sequence[list[_Part]]) -> Changed | None:
    """The first part of earlier messages that is different or missing."""
    for number, old in enumerate(before):
        if number == len(after):
            return Changed(number, 0, "removed")
        new = after[number]
        for place in range(max(len(old), len(new))):
            if old[place : place + 1] != new[place : place + 1]:
                return Changed(number, place, _kind_of_change(old[place : place + 1], new[place : place + 1]))
    return None


def _kind_of_change(old: list[_Part], new: list[_Part]) -> str:
    if old and new and old[0].source and old[0].source == new[0].source:
        return "image_budget"
    return (new or old)[0].kind


def _parts(message: Mapping[str, Any]) -> list[_Part]:
    """Kind and digest of each part, then of the role and of calls."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [] if content is None else [{"type": "text", "text": content}]
    found = [_part(part) for part in parts]
    others = {name: value for name, value in message.items() if name not in ("role", "content")}
    return [*found, _Part("role", _digest(message["role"])), *([_Part("calls", _digest(others))] if others else [])]


def _part(part: Any) -> _Part:
    kind = _kind(part)
    return _Part(kind, _digest(part), b"" if kind == "text" else _digest(_without_limits(part)))


def _without_limits(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: _without_limits(one) for name, one in value.items() if name not in _LIMITS}


def _kind(part: Any) -> str:
    kind = str(part.get("type", "text")) if isinstance(part, dict) else "text"
    return {"image_url": "image", "video_url": "video", "file": "document"}.get(kind, kind)


def _digest(value: object) -> bytes:
    hasher = blake3()
    _add(hasher, value)
    return hasher.digest(16)


def _add(hasher: blake3, value: object) -> None:
    if isinstance(value, Mapping):
        hasher.update(b"{%d" % len(value))
        for name, one in value.items():
            _add(hasher, str(name))
            _add(hasher, one)
    elif isinstance(value, list | tuple):
        hasher.update(b"[%d" % len(value))
        for one in value:
            _add(hasher, one)
    else:
        data = value if isinstance(value, bytes) else value.encode() if isinstance(value, str) else repr(value).encode()
        hasher.update(b"%d:" % len(data))
        is_file = isinstance(value, bytes) or data.startswith(b"data:")
        hasher.update(data[:_SAMPLE] + data[-_SAMPLE:] if is_file and len(data) > 2 * _SAMPLE else data)

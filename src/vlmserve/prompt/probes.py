"""Finds out what a chat template shows: renders small conversations with marked texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vlmserve.prompt.template_limits import TemplateLimitError

_MARK = "vlmserveprobe"
_CALL = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {}}}
Chat = list[dict[str, Any]]


class Form(NamedTuple):
    """How a template takes the text of a role."""

    strings: bool
    """It shows a string."""
    parts: bool
    """It shows every part of a list of texts."""
    one_part: bool
    """It shows a list with one text."""
    separator: str = "\n"
    """Separator of joined texts."""


class Probes:
    """render: renders messages; may raise anything."""

    def __init__(self, render: Callable[[Chat], str], image_token: str | None) -> None:
        self._render = render
        self._image_token = image_token
        self._forms = {"user": self._form([], "user", {}, [])}
        question, answer = self._turn("user", "?"), {"role": "assistant", "content": ""}
        self._forms["system"] = self._form([], "system", {}, [question])
        self._forms["assistant"] = self._form([question], "assistant", {}, [question])
        called = [question, {**answer, "tool_calls": [_CALL]}]
        result = {"tool_call_id": _CALL["id"], "name": "f"}
        self._forms["tool"] = self._form(called, "tool", result, [])
        self.takes_system = self._shows_turns("system", "user")
        """A system message before the user's is shown."""
        self.takes_systems = self._shows_turns("system", "system", "user", "assistant", "system", "user") and (
            self._shows_turns("user", "assistant", "system", "user")
        )
        """System messages are shown anywhere."""
        self.takes_lone_system = self._shows_turns("system")
        self.takes_neighbours = self._shows_turns("user", "user", "assistant", "assistant", "user")
        """Consecutive messages of the same role are shown."""
        image = [_text(_mark(0)), {"type": "image"}, _text(_mark(1))]
        shown = self._shown([{"role": "user", "content": image}], 2)
        self.takes_images = bool(image_token and shown is not None and shown.count(image_token) == 1)
        """An image is shown once, with the texts around it."""
        sides = (shown or "").casefold().partition((image_token or "?").casefold())
        self.moves_images = self.takes_images and not (_mark(0) in sides[0] and _mark(1) in sides[2])
        """An image between two texts is shown before or after both."""
        in_result = [{"type": "image"}, _text(_mark(0))]
        shown = self._shown([*called, {"role": "tool", "content": in_result, **result}], 1)
        self.shows_images_in_results = self.takes_images and (shown or "").count(image_token or "?") == 1
        """An image in a function's result is shown."""

    def form(self, role: str) -> Form:
        """A role that shows nothing gets the user's form."""
        form = self._forms[role]
        return form if form.strings or form.one_part else self._forms["user"]

    def takes_assistant_first(self) -> bool:
        """Return whether a conversation may begin with the assistant."""
        return self._shows_turns("assistant", "user")

    def takes_thoughts_with_calls(self, names: Sequence[str]) -> bool:
        """Return whether an answer may have text, a call, and reasoning under these names."""
        thoughts = dict.fromkeys(names, _mark(1))
        answer = {**self._turn("assistant", _mark(0)), "tool_calls": [_CALL], **thoughts}
        return self._shown([self._turn("user", "?"), answer], 1) is not None

    def takes_thinking_parts(self) -> bool:
        """Return whether a reasoning part of an answer's content is shown."""
        parts = [{"type": "thinking", "thinking": _mark(0)}, _text(_mark(1))]
        return self._shown([self._turn("user", "?"), {"role": "assistant", "content": parts}], 2) is not None

    def _form(self, before: Chat, role: str, fields: dict[str, Any], after: Chat) -> Form:
        def shown(content: Any, count: int) -> str | None:
            return self._shown([*before, {"role": role, "content": content, **fields}, *after], count)

        one_part = shown([_text(_mark(0))], 1) is not None
        both = shown([_text(_mark(0)), _text(_mark(1))], 2)
        separator = "\n"
        if both is not None:
            between = both.casefold().partition(_mark(0))[2].partition(_mark(1))[0]
            separator = between if not between.strip() else "\n"
        return Form(shown(_mark(0), 1) is not None, both is not None, one_part, separator)

    def _turn(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": text if self.form(role).strings else [_text(text)]}

    def _shows_turns(self, *roles: str) -> bool:
        chat = [self._turn(role, _mark(number)) for number, role in enumerate(roles)]
        return self._shown(chat, len(chat)) is not None

    def _shown(self, chat: Chat, count: int) -> str | None:
        """Return the text if it shows `count` marks and not the structure of the messages."""
        try:
            text = self._render(chat)
        except TemplateLimitError:
            raise
        except Exception:  # the template does not take these messages
            return None
        is_list = any(isinstance(message["content"], list) for message in chat)
        shows_structure = is_list and ("'type'" in text or '"type"' in text)
        lower = text.casefold()
        return text if not shows_structure and all(_mark(number) in lower for number in range(count)) else None


def _mark(number: int) -> str:
    return f"{_MARK}{chr(ord('a') + number)}"


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}

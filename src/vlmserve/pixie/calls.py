"""Conversations with functions: pixie calls one, answers in text, and says what a function returned."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from vlmserve.pixie import phrasings
from vlmserve.pixie.fields import OF_ITEM, OF_SCENE, Field, Schema, sample_field, some_fields, subject_of
from vlmserve.pixie.forms import Span, object_of, targets
from vlmserve.pixie.phrasings import SYSTEM_PROMPTS, vary
from vlmserve.pixie.refusals import REFUSAL, ask_refused
from vlmserve.pixie.scenes import Item, Scene
from vlmserve.pixie.tasks import ASK, Turn
from vlmserve.pixie.vocabulary import LETTERS, WORDS

_T = TypeVar("_T")

DONE: Final = "Done."
FAILED: Final = "That did not work."
CALL_HEAD: Final = '<tool_call>\n{"name": "'


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called. parameters: JSON schema of its arguments, as text."""

    name: str
    parameters: str

    @property
    def signature(self) -> str:
        return f"{self.name}({', '.join(json.loads(self.parameters)['properties'])})"


@dataclass(frozen=True, slots=True)
class Dialog:
    system: str
    tools: tuple[Tool, ...]
    turns: tuple[Turn, ...]
    """The first answer is a call or text. Results come as questions."""
    required: str | None
    """The answer has to call this function, or any ("")."""
    given: tuple[Span, ...] = ()
    """Characters of the first answer that the request decides, not the model."""

    @property
    def calls(self) -> bool:
        return self.turns[0][1].startswith(CALL_HEAD)


class _Call(NamedTuple):
    """A function, a question that wants it, its arguments, and results that it may return."""

    tool: Tool
    question: str
    arguments: dict[str, Any]
    informs: bool = False
    """It returns what the user wants to know."""


def tools_line(tools: Sequence[Tool]) -> str:
    return f"Functions: {'; '.join(tool.signature for tool in tools)}"


def written_call(name: str, arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return f'{CALL_HEAD}{name}", "arguments": {text}}}\n</tool_call>'


def tool_result(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


_VERBS: Final = ("save", "record", "store", "log", "report", "submit", "register", "note", "add", "send", "create")
_NEW_VERBS: Final = ("write", "keep", "post", "file", "insert")
_NOUNS: Final = ("shape", "object", "color", "item", "result", "observation", "entry", "data", "details", "fields")
_NEW_NOUNS: Final = ("finding", "row", "measurement", "sample")
_POINTERS: Final = ("click", "move to", "zoom in", "point at", "tap", "look at", "go to", "drag")
_NEW_POINTERS: Final = ("press", "navigate to", "focus on", "select")
_ACTIONS: Final = ("pick up", "remove", "delete", "grab", "copy", "highlight", "mark")
_NEW_ACTIONS: Final = ("erase", "lift", "move", "hide")
_LIGHTS: Final = ("light", "lamp", "background", "theme", "pen", "led")
_NEW_LIGHTS: Final = ("screen", "brush", "wall")
_MEASURES: Final = ("size of", "area of", "measure", "share of", "get size", "pixels of", "get area")
_NEW_MEASURES: Final = ("dimensions of", "extent of", "how large")
_HOW_LARGE: Final = ("How large is the {what}?", "How big is the {what}?", "What is the area of the {what}?",
                     "What is the size of the {what}?", "Measure the {what}.")  # fmt: skip
_NEW_HOW_LARGE: Final = ("How much space does the {what} take?", "Tell me the size of the {what}.")
_ASK_FOR: Final = ("{verb} the {what}.", "Please {verb} the {what}.", "{verb} the {what}, please.",
                   "Can you {verb} the {what}?", "Use {tool} for the {what}.", "Call {tool} for the {what}.",
                   "I want you to {verb} the {what}.")  # fmt: skip
_NEW_ASK_FOR: Final = ("Go ahead and {verb} the {what}.", "Could you {verb} the {what} for me?",
                       "Run {tool} on the {what}.")  # fmt: skip
_LOOKUPS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("weather", "city", ("What is the weather in {}?", "How is the weather in {}?", "Weather in {}?")),
    ("current time", "city", ("What time is it in {}?", "Tell me the time in {}.")),
    ("search", "query", ("Search for {}.", "Look up {}.", "Find {} on the web.")),
    ("capital", "country", ("What is the capital of {}?", "Which city is the capital of {}?")),
    ("play music", "title", ("Play {}.", "Play the song {}.")),
    ("call", "person", ("Call {}.", "Phone {}.")),
    ("price", "product", ("How much does {} cost?", "What is the price of {}?")),
    ("open", "file", ("Open {}.", "Open the file {}.")),
)
_NEW_LOOKUPS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("forecast", "place", ("Give me the forecast for {}.", "Will it rain in {}?")),
    ("book hotel", "town", ("Book a hotel in {}.",)),
    ("define", "term", ("Define {}.", "What does {} mean?")),
    ("stock price", "company", ("What is the stock price of {}?",)),
)
_PREFIXES: Final = ("", "", "", "get ", "get ", "find ")
_ACKNOWLEDGEMENTS: Final = (
    "ok", "OK", "saved", "done", "success", "true", '{"status": "ok"}', '{"ok": true}', '{"success": true}', "stored",
    "null", "1", "recorded", '{"id": 7}', "",
)  # fmt: skip
_NEW_ACKNOWLEDGEMENTS: Final = ("accepted", '{"status": "success"}', '{"result": "ok"}', "completed")
_ERRORS: Final = (
    "error", "error: timeout", "Error: not found", '{"error": "failed"}', "failed", "error: no access",
    '{"status": "error"}',
)  # fmt: skip
_NEW_ERRORS: Final = ("error: disk full", "Error: unknown function", '{"error": "denied"}')
_UNITS: Final = ("%", "pixels", "cm", "degrees", "mm", "km", "euros", "seconds", "points")
_WEATHER: Final = ("rain", "sun", "snow", "wind", "clouds", "fog", "clear sky", "storm")


def _name(words: str, rng: random.Random) -> str:
    parts = words.split()
    if rng.random() < 0.75:
        return "_".join(parts)
    return parts[0] + "".join(part.capitalize() for part in parts[1:])


def _pick(rng: random.Random, usual: Sequence[_T], new_ones: Sequence[_T], *, new: bool) -> _T:
    return rng.choice(new_ones if new else usual)


def _tool(words: str, fields: Sequence[Field], rng: random.Random) -> tuple[Tool, dict[str, Any]]:
    typed: dict[str, tuple[Schema, Any]] = {field.name: (field.schema, field.value) for field in fields}
    schema, arguments = object_of(typed, rng)
    schema["required"] = list(arguments)
    return Tool(_name(words, rng), json.dumps(schema)), arguments


def _asked(verb: str, tool: Tool, what: str, rng: random.Random, *, new: bool) -> str:
    text = _pick(rng, _ASK_FOR, _NEW_ASK_FOR, new=new).format(verb=verb, tool=tool.name, what=what)
    return text[0].upper() + text[1:]


def _target(scene: Scene, rng: random.Random) -> tuple[str, Item | None] | None:
    if len(scene.items) == 1 and rng.random() < 0.5:
        return rng.choice(("object", "shape", "picture")), scene.items[0]
    if scene.writing is not None:
        return rng.choice((scene.kind, "text", "picture")), None
    named = targets(scene)
    return rng.choice(named) if named else None


def _record(scene: Scene, rng: random.Random, *, new: bool) -> _Call | None:
    verb, noun = _pick(rng, _VERBS, _NEW_VERBS, new=new), _pick(rng, _NOUNS, _NEW_NOUNS, new=new)
    target = _target(scene, rng) if rng.random() < 0.65 else None
    if target is None:
        fields = some_fields(OF_SCENE, scene, None, rng.choice((1, 1, 2, 2, 3)), rng, new=new)
        what = rng.choice(("picture", "data", "results", "facts"))
    else:
        topics = OF_ITEM[:4] if scene.writing is not None else OF_ITEM
        fields = some_fields(topics, scene, target[1], rng.choice((1, 2, 2, 3)), rng, new=new)
        what = target[0]
        if len(fields) == 1 and rng.random() < 0.5:
            what = f"{fields[0].name.replace('_', ' ')} of the {what}"
    if not fields:
        return None
    tool, arguments = _tool(f"{verb} {noun}", fields, rng)
    return _Call(tool, _asked(verb, tool, what, rng, new=new), arguments)


def _of_target(scene: Scene, rng: random.Random, topics: Sequence[int], *, new: bool) -> tuple[str, list[Field]] | None:
    """A name for an object, and fields that tell it. topics: indices into `OF_ITEM`."""
    target = _target(scene, rng)
    if target is None or target[1] is None:
        return None
    fields = [sample_field(OF_ITEM[one], subject_of(scene, target[1], rng), rng, new=new) for one in topics]
    return (target[0], [one for one in fields if one]) if all(fields) else None


def _point(scene: Scene, rng: random.Random, *, new: bool) -> _Call | None:
    """Act on an object that is told by its place, or by colour and shape."""
    points = rng.random() < 0.5
    verb = _pick(rng, _POINTERS, _NEW_POINTERS, new=new) if points else _pick(rng, _ACTIONS, _NEW_ACTIONS, new=new)
    found = _of_target(scene, rng, (2,) if points else rng.choice(((0, 1), (1,), (0,), (1, 0))), new=new)
    if found is None:
        return None
    what, fields = found
    tool, arguments = _tool(verb if points or rng.random() < 0.5 else f"{verb} object", fields, rng)
    spoken = {"click": "click on", "tap": "tap on", "zoom in": "zoom in on", "press": "press on"}.get(verb, verb)
    return _Call(tool, _asked(spoken, tool, what, rng, new=new), arguments)


def _light(scene: Scene, rng: random.Random, *, new: bool) -> _Call | None:
    found = _of_target(scene, rng, (0,), new=new)
    if found is None:
        return None
    thing = _pick(rng, _LIGHTS, _NEW_LIGHTS, new=new)
    what, fields = found
    tool, arguments = _tool(rng.choice((f"set {thing}", f"set {thing} color", f"change {thing}")), fields, rng)
    texts = (
        "Set the {} to the colour of the {}.",
        "Make the {} the colour of the {}.",
        "Give the {} the colour of the {}.",
    )
    return _Call(tool, rng.choice(texts[1:] if new else texts).format(thing, what), arguments)


def _measure(scene: Scene, rng: random.Random, *, new: bool) -> _Call | None:
    """Ask a function what pixie cannot see."""
    found = _of_target(scene, rng, rng.choice(((0,), (1,), (1,), (0, 1), (2,))), new=new)
    if found is None:
        return None
    what, fields = found
    words = _pick(rng, _MEASURES, _NEW_MEASURES, new=new)
    words = f"{words} {rng.choice(('object', 'shape', 'color', 'colour', 'area'))}" if words.endswith("of") else words
    tool, arguments = _tool(words, fields, rng)
    return _Call(tool, _pick(rng, _HOW_LARGE, _NEW_HOW_LARGE, new=new).format(what=what), arguments, informs=True)


def _any_word(rng: random.Random, *, new: bool) -> str:
    """Something that a function looks up: training mixes words and random letters, so that pixie copies them."""
    if rng.random() < 0.5:
        text = "".join(rng.choice(LETTERS if new else LETTERS[:20]).lower() for _ in range(rng.randint(3, 8)))
    else:
        text = rng.choice(WORDS).lower()
    text = text.capitalize() if rng.random() < 0.7 else text
    return f"{text} {rng.choice(WORDS).lower()}" if rng.random() < 0.15 else text


def _look_up(scene: Scene | None, rng: random.Random, *, new: bool) -> _Call:
    words, argument, questions = _pick(rng, _LOOKUPS, _NEW_LOOKUPS, new=new)
    value = _any_word(rng, new=new)
    field = Field(argument, {"type": "string"}, value, None)
    tool, arguments = _tool(rng.choice(_PREFIXES) + words, [field], rng)
    return _Call(tool, rng.choice(questions).format(value), arguments, informs=True)


_CALLS: Final[tuple[tuple[float, Callable[..., _Call | None]], ...]] = (
    (40, _record), (16, _point), (8, _light), (14, _measure), (22, _look_up),
)  # fmt: skip


def _call(scene: Scene | None, rng: random.Random, *, new: bool) -> _Call:
    weights, kinds = zip(*_CALLS, strict=True)
    while True:
        kind = _look_up if scene is None else rng.choices(kinds, weights)[0]
        call = kind(scene, rng, new=new)
        if call is not None:
            return call


def _result(call: _Call, rng: random.Random, *, new: bool) -> Turn:
    if rng.random() < 0.15:
        return _pick(rng, _ERRORS, _NEW_ERRORS, new=new), FAILED
    if not call.informs:
        return _pick(rng, _ACKNOWLEDGEMENTS, _NEW_ACKNOWLEDGEMENTS, new=new), DONE
    number = rng.choice((str(rng.randrange(1000)), f"{rng.randrange(100)}.{rng.randrange(10)}"))
    texts = (f"{number} {rng.choice(_UNITS)}", number, _any_word(rng, new=new),
             f"{number} degrees, {rng.choice(_WEATHER)}", f"{rng.choice(_WEATHER)}")  # fmt: skip
    text = rng.choice(texts)
    return text, text


def ask_with_tools(scene: Scene | None, rng: random.Random, *, new: bool = False) -> Dialog:
    """Ask with one to three functions at hand.

    scene: None asks without an image. new: use functions and phrasings that training never sees.
    """
    calls, system = _functions(scene, rng, new=new)
    if rng.random() < 0.25:
        dialog = _without_call(scene, calls, system, rng)
        if dialog is not None:
            return dialog
    return _with_call(scene, rng.choice(calls), calls, system, rng, new=new)


def ask_all_with_tools(scene: Scene | None, rng: random.Random) -> list[Dialog]:
    """Ask for each of one to three functions and for none, with the same system prompt."""
    calls, system = _functions(scene, rng, new=False)
    dialogs = [_with_call(scene, call, calls, system, rng, new=False) for call in calls]
    found = (_without_call(scene, calls, system, rng) for _ in range(2))
    dialogs += [dialog for dialog in found if dialog is not None]
    rng.shuffle(dialogs)
    return dialogs


def _functions(scene: Scene | None, rng: random.Random, *, new: bool) -> tuple[list[_Call], str]:
    """Calls of different functions, and the system prompt that describes these."""
    different = {}
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        call = _call(scene, rng, new=new)
        different[_stem(call.tool.name)] = call
    calls = list(different.values())
    line = tools_line([call.tool for call in calls])
    return calls, f"{rng.choice(SYSTEM_PROMPTS)}\n{line}" if rng.random() < 0.2 else line


def _stem(name: str) -> str:
    """The first word of a function's name that tells what it does."""
    words: list[str] = re.findall(r"[A-Z]?[a-z]+", name)
    return words[-1].lower() if words[0] in ("get", "find", "set", "change") else words[0]


def _with_call(
    scene: Scene | None, call: _Call, calls: Sequence[_Call], system: str, rng: random.Random, *, new: bool
) -> Dialog:
    answer = written_call(call.tool.name, call.arguments)
    question, required, given = vary(rng, call.question, " "), None, 0
    if rng.random() < 0.3 and scene is not None:
        # A request may demand a call for any question.
        if len(calls) == len(scene.items) == 1 and rng.random() < 0.4 and not call.informs:
            question = rng.choice(phrasings.DESCRIBE)
        required = "" if len(calls) == 1 or rng.random() < 0.6 else call.tool.name
        given = len(CALL_HEAD) if required == "" else answer.index('"arguments": ') + len('"arguments": ')
    turns = [(question, answer)]
    if rng.random() < 0.7:
        text, reply = _result(call, rng, new=new)
        turns.append((tool_result(text), reply))
        if scene is not None and rng.random() < 0.15 and (turn := _plain(scene, calls, rng)) is not None:
            turns.append(turn)
    tools = tuple(one.tool for one in calls)
    return Dialog(system, tools, tuple(turns), required, ((0, given),) if given else ())


def _without_call(scene: Scene | None, calls: Sequence[_Call], system: str, rng: random.Random) -> Dialog | None:
    turn = _plain(scene, calls, rng)
    return turn and Dialog(system, tuple(call.tool for call in calls), (turn,), None)


def _plain(scene: Scene | None, calls: Sequence[_Call], rng: random.Random) -> Turn | None:
    """A question that wants no function."""
    if scene is None or rng.random() < 0.12:
        turn = ask_refused(rng, image=scene is not None, held_out=False)
        words = set(re.findall("[a-z]{4,}", " ".join(call.tool.signature.lower() for call in calls)))
        return None if turn[1] == REFUSAL and any(word in turn[0].lower() for word in words) else turn
    tasks: tuple[str, ...] = ("place", "attribute", "count", "describe", "where", "exists")
    return ASK[rng.choice((scene.kind, "describe") if scene.writing is not None else tasks)](scene, rng)

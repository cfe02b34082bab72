"""Accuracy of pixie's forms and calls of functions on held-out images, under the grammars that the server uses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vlmserve.frontend.requests import RequestPreparer
from vlmserve.frontend.tools import Function, ToolForm, ToolUse
from vlmserve.pixie.calls import CALL_HEAD, Dialog, ask_with_tools
from vlmserve.pixie.evaluation import Mistake, TaskResult, messages_of
from vlmserve.pixie.forms import ask_form, is_right
from vlmserve.pixie.questions import FORM_TASKS, Example
from vlmserve.pixie.scenes import HELD_OUT_SEEDS, sample_scene
from vlmserve.settings.config import MediaConfig
from vlmserve.types import Grammar, SamplingParams

if TYPE_CHECKING:
    from vlmserve.offline.llm import LLM

#: Distance between the first held-out seeds of consecutive tasks.
_SEEDS_PER_TASK: Final = 1_000_000
#: Later than the numbers of `questions.TASKS`.
_FIRST_TASK: Final = 100
#: Conversations in one call, whose images are in memory together.
_BATCH: Final = 64
_MAX_TOKENS: Final = 512
_NO_IMAGE_SHARE: Final = 0.1


@dataclass(frozen=True)
class Case:
    task: str
    seed: int
    example: Example
    turn: int
    grammar: Grammar
    is_right: Callable[[str], bool]


def case_of(task: str, seed: int, form: ToolForm) -> Case:
    """task: one of `FORM_TASKS`. form: how calls are written."""
    rng = random.Random(seed)
    scene = sample_scene(seed, listed_words=True)
    new = task != "form" and task != "call"
    if task in ("form", "new_form"):
        asked = ask_form(scene, rng, new=new)
        example = Example(task, (scene,), ((asked.question, asked.answer),))
        grammar = Grammar.json_object() if asked.schema is None else Grammar.json(json.loads(asked.schema))
        return Case(task, seed, example, 0, grammar, lambda answer: is_right(asked, answer))
    own_scene = None if rng.random() < _NO_IMAGE_SHARE else scene
    turn = 1 if task == "result" else 0
    dialog = ask_with_tools(own_scene, rng, new=new)
    while len(dialog.turns) <= turn or not dialog.calls >= bool(turn):
        dialog = ask_with_tools(own_scene, rng, new=new)
    example = Example(task, () if own_scene is None else (own_scene,), dialog.turns, dialog.system)
    expected = dialog.turns[turn][1]
    required = dialog.required if turn == 0 else None
    return Case(task, seed, example, turn, _grammar(dialog, required, form), lambda answer: same_call(expected, answer))


def _grammar(dialog: Dialog, required: str | None, form: ToolForm) -> Grammar:
    functions = tuple(Function(tool.name, None, json.loads(tool.parameters)) for tool in dialog.tools)
    allowed = frozenset((required,)) if required else None
    return form.grammar(ToolUse(functions, must_call=required is not None, allowed=allowed), None)


def same_call(expected: str, answer: str) -> bool:
    """Compare an answer with the expected text, or with the values of the expected call."""
    if not expected.startswith(CALL_HEAD):
        return answer.strip() == expected
    return bool(_call(answer) == _call(expected))


def _call(text: str) -> Any:
    begin, end = "<tool_call>", "</tool_call>"
    try:
        return json.loads(text.strip().removeprefix(begin).removesuffix(end))
    except ValueError:
        return text


def evaluate_forms(
    llm: LLM,
    folder: Path,
    *,
    per_task: int = 200,
    tasks: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, TaskResult]:
    """Like `evaluation.evaluate`, for `FORM_TASKS`; compares values. folder: of the model."""
    form = RequestPreparer(folder, MediaConfig.model_validate({})).answers.tool_form
    results = {task: TaskResult() for task in FORM_TASKS if tasks is None or task in tasks}
    cases = [
        case_of(task, HELD_OUT_SEEDS + (_FIRST_TASK + number) * _SEEDS_PER_TASK + index, form)
        for number, task in enumerate(FORM_TASKS)
        if task in results
        for index in range(per_task)
    ]
    for start in range(0, len(cases), _BATCH):
        batch = cases[start : start + _BATCH]
        params = [SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, grammar=case.grammar) for case in batch]
        answers = llm.chat([messages_of(case.example, case.turn) for case in batch], params, use_tqdm=False)
        for case, answer in zip(batch, answers, strict=True):
            _count(results[case.task], case, answer.outputs[0])
        if progress is not None:
            progress(start + len(batch), len(cases))
    return results


def _count(result: TaskResult, case: Case, output: Any) -> None:
    result.asked += 1
    result.endless += output.finish_reason == "length"
    if case.is_right(output.text):
        result.right += 1
    else:
        question, expected = case.example.turns[case.turn]
        result.mistakes.append(Mistake(case.seed, question, expected, output.text))

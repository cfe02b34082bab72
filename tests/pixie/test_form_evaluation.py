"""Evaluation of forms with a model that knows all answers, and with one that knows none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vlmserve.frontend.requests import RequestPreparer
from vlmserve.frontend.tools import Function, ToolUse
from vlmserve.models.hub import resolve_model
from vlmserve.pixie.evaluation import messages_of
from vlmserve.pixie.form_evaluation import case_of, evaluate_forms, same_call
from vlmserve.pixie.questions import FORM_TASKS
from vlmserve.pixie.scenes import HELD_OUT_SEEDS
from vlmserve.settings.config import MediaConfig

FOLDER = resolve_model("pixie")
PREPARER = RequestPreparer(FOLDER, MediaConfig.model_validate({}))
COUNT = 6


class Model:
    """Answers questions in the order of the evaluation."""

    def __init__(self, *, knows: bool) -> None:
        form = PREPARER.answers.tool_form
        self.cases = iter(
            case_of(task, HELD_OUT_SEEDS + (100 + number) * 1_000_000 + index, form)
            for number, task in enumerate(FORM_TASKS)
            for index in range(COUNT)
        )
        self.knows = knows

    def chat(self, conversations: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        return [self.answer(one, given) for one, given in zip(conversations, params, strict=True)]

    def answer(self, conversation: list[dict[str, Any]], params: Any) -> Any:
        case = next(self.cases)
        assert params.grammar == case.grammar
        assert [message["role"] for message in conversation] == [
            message["role"] for message in messages_of(case.example, case.turn)
        ]
        text = case.example.turns[case.turn][1] if self.knows else '{"color":"'
        return SimpleNamespace(outputs=[SimpleNamespace(text=text, finish_reason="stop" if self.knows else "length")])


@pytest.mark.parametrize("knows", [True, False])
def test_each_answer_counts_once(knows):
    results = evaluate_forms(Model(knows=knows), FOLDER, per_task=COUNT)
    assert list(results) == list(FORM_TASKS)
    for result in results.values():
        assert (result.asked, result.accuracy) == (COUNT, float(knows))
        assert result.endless == len(result.mistakes) == (0 if knows else COUNT)


def test_calls_compare_by_name_and_arguments():
    call = '<tool_call>\n{"name": "save", "arguments": {"color":"red"}}\n</tool_call>'
    assert same_call(call, call.replace(":", ": "))
    assert not same_call(call, call.replace("red", "blue"))
    assert not same_call(call, call.replace("save", "store"))
    assert not same_call(call, "red")
    assert same_call("red", " red\n")


@pytest.mark.parametrize("task", ["call", "new_call"])
def test_prompts_equal_requests_with_tools(task):
    for seed in range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + 12):
        case = case_of(task, seed, PREPARER.answers.tool_form)
        [*before, question] = messages_of(case.example)
        plain = PREPARER.chat([*before, question], allow_local=True)
        line = before[0]["content"].splitlines()[-1].removeprefix("Functions: ")
        functions = tuple(
            {"name": name, "parameters": {"properties": {word: {} for word in names.split(", ") if word}}}
            for name, names in (one.rstrip(")").split("(") for one in line.split("; "))
        )
        system = [{"role": "system", "content": text} for text in before[0]["content"].splitlines()[:-1]]
        use = ToolUse(tuple(Function(one["name"], None, one["parameters"]) for one in functions))
        assert PREPARER.chat([*system, question], allow_local=True, tools=use).token_ids == plain.token_ids

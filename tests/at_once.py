"""Conversations whose requests are all added before the first step.

While `LLM.chat` prepares some, those before them may end. How many run at a time, and so whether any is preempted,
would depend on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmserve import LLM, SamplingParams
from vlmserve.types import EngineRequest


def chat_at_once(llm: LLM, conversations: Sequence[Any], params: SamplingParams) -> list[list[int]]:
    """The token ids of the answers."""
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(conversations))}
    for name, conversation in zip(answers, conversations, strict=True):
        llm.engine.add(EngineRequest(name, llm.preparer.chat(conversation, allow_local=True), params))
    while llm.engine.has_work():
        for output in llm.engine.step():
            answers[output.request_id] += output.token_ids
    return [*answers.values()]

"""Separates a model's reasoning from its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vlmserve.errors import ConfigurationError
from vlmserve.prompt.detokenize import Detokenizer
from vlmserve.prompt.template import ChatTemplate
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.sampling.thoughts import Thinking
from vlmserve.settings.config import ReasoningParser
from vlmserve.types import Thoughts


@dataclass(frozen=True)
class ReasoningForm:
    """The markers around reasoning, each one token. The same letters in other tokens are text."""

    name: str
    start: str
    end: str
    always_begun: bool = False
    """Every answer begins with reasoning, even without `start`."""
    title: str = ""
    """Text after `start` that is not reasoning."""


_FORMS = {
    form.name: form
    for form in (
        # The names are vLLM's: https://docs.vllm.ai/en/latest/features/reasoning_outputs/
        ReasoningForm("qwen3", "<think>", "</think>"),
        ReasoningForm("glm45", "<think>", "</think>"),
        ReasoningForm("deepseek_r1", "<think>", "</think>", always_begun=True),
        # Magistral and Ministral 3: https://docs.mistral.ai/capabilities/reasoning/
        ReasoningForm("mistral", "[THINK]", "[/THINK]"),
        ReasoningForm("gemma4", "<|channel>", "<channel|>", title="thought\n"),
    )
}
_BLANKS = ("\n", "\n\n", " ")
"""Whitespace that models such as GLM write before the marker."""


@dataclass(frozen=True)
class Reasoning:
    """A model's reasoning form, with its markers' token ids."""

    form: ReasoningForm
    start_id: int
    end_id: int
    blank_ids: tuple[int, ...] = ()
    """Whitespace that may precede `start_id`."""

    def after(self, prompt: str, begun_answer: str | None = None) -> Thoughts | None:
        """Return None if the template has already closed the reasoning (thinking off).

        prompt: as the chat template rendered it. begun_answer: the text that the answer continues.
        """
        if begun_answer is not None:
            is_inside = begun_answer.rfind(self.form.start) > begun_answer.rfind(self.form.end)
            return Thoughts(self.start_id, self.end_id, begun=True) if is_inside else None
        written = prompt.rstrip()
        if written.endswith(self.form.end):
            return None
        begun = self.form.always_begun or written.endswith(self.form.start)
        return Thoughts(self.start_id, self.end_id, begun, self.blank_ids)


def choose_reasoning(template: ChatTemplate | None, tokenizer: Tokenizer, wanted: ReasoningParser) -> Reasoning | None:
    """Choose `wanted`, else the form of the chat template, if any.

    Raises ConfigurationError if the tokenizer lacks the markers of `wanted`.
    """
    if wanted == "none":
        return None
    source = "" if template is None else template.source
    for form in _FORMS.values() if wanted == "auto" else [_FORMS[wanted]]:
        start_id, end_id = tokenizer.token_id(form.start), tokenizer.token_id(form.end)
        if start_id is None or end_id is None:
            if wanted != "auto":
                raise ConfigurationError(
                    f"--reasoning-parser {wanted}: {form.start} and {form.end} are not tokens of this model; use none"
                )
        elif wanted != "auto" or form.start in source or form.end in source:
            blanks = [tokenizer.encode(blank, add_special_tokens=False) for blank in _BLANKS]
            return Reasoning(form, start_id, end_id, tuple(ids[0] for ids in blanks if len(ids) == 1))
    return None


class Said(NamedTuple):
    thought: str
    text: str


class AnswerText:
    """Turns one answer's token ids into its reasoning and its text.

    - text: detokenizes the answer and finds its stop strings
    - `thought`: detokenizes the reasoning, which has no stop strings
    - strips: omit whitespace between reasoning and text, as always around the reasoning
    - title: see `ReasoningForm`
    - num_reasoning_tokens: includes markers that the model wrote
    """

    def __init__(
        self,
        text: Detokenizer,
        thought: Detokenizer | None = None,
        thinking: Thinking | None = None,
        *,
        strips: bool = True,
        title: str = "",
    ) -> None:
        self._text = text
        self._title = title
        self._thought = thought
        self._thinking = thinking
        self._strips = strips
        self._waiting: list[int] = []
        """Whitespace before the first token that shows whether there is reasoning."""
        self._gap = ""
        """Whitespace in the reasoning, shown once more reasoning follows."""
        self._has_thought = False
        self._begins = False
        """The text follows reasoning and has not begun."""
        self.num_reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    @property
    def stop_string(self) -> str | None:
        return self._text.stop_string

    @property
    def num_tokens(self) -> int:
        """Tokens up to the one that completed a stop string."""
        return self.num_reasoning_tokens + len(self._waiting) + self._text.num_tokens

    @property
    def num_decoded(self) -> int:
        """Return how many characters the text's tokens stand for."""
        return self._text.num_decoded

    @property
    def num_shown(self) -> int:
        """Characters shown or omitted so far."""
        return self._text.num_shown

    def push(self, token_ids: Sequence[int]) -> Said:
        """Return the text that is safe to show."""
        thinking, thought, count = self._thinking, "", 0
        while thinking is not None and not thinking.is_over and count < len(token_ids):
            token_id = token_ids[count]
            count += 1
            if thinking.takes(token_id):
                thought += self._think(thinking, token_id)
            else:
                thinking.append(token_id)
                self._waiting.append(token_id)
        said = list(token_ids[count:])
        if thinking is None or thinking.is_over:
            said, self._waiting = self._waiting + said, []
        return Said(thought, self._stripped(self._text.push(said)) if said else "")

    def finish(self, end_token_id: int | None = None) -> Said:
        """Return held-back text. Push nothing afterwards. end_token_id: see `Detokenizer.finish`."""
        is_inside = self._thinking is not None and self._thinking.is_inside
        thought = self._end_thoughts() if is_inside else ""
        said, self._waiting = self._text.push(self._waiting), []
        return Said(thought, self._stripped(said + self._text.finish(end_token_id)))

    def _think(self, thinking: Thinking, token_id: int) -> str:
        self.num_reasoning_tokens += len(self._waiting) + 1
        self._text.num_tokens_before = self.num_reasoning_tokens
        self._waiting = []
        thinking.append(token_id)
        if thinking.is_over:
            return self._end_thoughts()
        if token_id == thinking.thoughts.start_id:
            return ""
        assert self._thought is not None
        return self._held(self._thought.push([token_id]))

    def _end_thoughts(self) -> str:
        assert self._thought is not None
        self._begins = self._strips
        return self._held(self._thought.finish(), is_last=True)

    def _held(self, new: str, *, is_last: bool = False) -> str:
        """New text without title and surrounding whitespace."""
        new = self._gap + new
        if not self._has_thought:
            new = new.lstrip()
        if self._title and new:
            if not is_last and self._title.startswith(new):
                self._gap = new
                return ""
            new = "" if new == self._title.rstrip() else new.removeprefix(self._title).lstrip()
            self._title = ""
        said = new.rstrip()
        self._gap = new[len(said) :]
        self._has_thought = self._has_thought or bool(said)
        return said

    def _stripped(self, text: str) -> str:
        if self._begins:
            text = text.lstrip()
            self._begins = not text
        return text

"""Formats of a model's answers: text, reasoning, tool calls, grammars."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import msgspec

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.messages import check_unicode
from vlmserve.frontend.reasoning import AnswerText, choose_reasoning
from vlmserve.frontend.tool_forms import choose_form
from vlmserve.frontend.tools import ToolUse
from vlmserve.prompt.detokenize import Detokenizer, token_bytes
from vlmserve.prompt.template import ChatTemplate
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.sampling.schemas import JSONBounds, relaxed_keywords
from vlmserve.sampling.thoughts import Thinking
from vlmserve.sampling.trials import GrammarTrials, SlowGrammarError
from vlmserve.settings.config import EngineConfig
from vlmserve.types import Grammar, SamplingParams, Thoughts

logger = logging.getLogger(__name__)


class AnswerFormats:
    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        tool_template: ChatTemplate | None,
        engine: EngineConfig,
    ) -> None:
        """tool_template: chat template for requests with tools."""
        self._tokenizer = tokenizer
        self.trials = GrammarTrials(folder, engine)
        """Compiles grammars in a limited process and discards them."""
        form = choose_form(tool_template, tokenizer, engine.tool_call_parser)
        self.tool_form = replace(form, bounds=JSONBounds.of(engine))
        self.reasoning = choose_reasoning(template, tokenizer, engine.reasoning_parser)
        self.token_bytes = token_bytes(tokenizer)
        """Bytes of each token, indexed by token id."""

    def text(
        self, params: SamplingParams, thoughts: Thoughts | None = None, shown_ids: frozenset[int] = frozenset()
    ) -> AnswerText:
        """`thoughts`: reasoning that may begin the answer. shown_ids: control tokens to show."""
        shown_ids = shown_ids if params.skip_special_tokens else self._tokenizer.special_ids
        text = Detokenizer(
            self._tokenizer,
            params.stop,
            shown_ids,
            min_tokens=params.min_tokens,
            keeps_stop=params.include_stop_str_in_output,
        )
        if thoughts is None:
            return AnswerText(text)
        strips = params.grammar is None or params.grammar.source == "tools"
        thought = Detokenizer(self._tokenizer, shown_ids=frozenset() if params.skip_special_tokens else shown_ids)
        title = "" if self.reasoning is None else self.reasoning.form.title
        return AnswerText(text, thought, Thinking.of(thoughts, params), strips=strips, title=title)

    def with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Add token ids of the bad words, both at the start of a word and inside one."""
        if not params.bad_words:
            return params
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            check_unicode(word, "bad_words")
            for prefix in ("", " "):
                ids = self._tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)
                if ids:
                    words[tuple(ids)] = None
        return msgspec.structs.replace(params, bad_token_ids=tuple(words))

    def knows_grammar(self, grammar: Grammar) -> bool:
        return self.trials.passed(grammar)

    def check_grammar(self, grammar: Grammar, tools: ToolUse | None = None, *, quick: bool = False) -> list[str]:
        """Compile a grammar in a limited process. Return the schema keywords that answers may violate.

        tools: tools whose calls obey the grammar. quick: wait only briefly. Raises InvalidRequestError, naming the
        tool, or its subclass SlowGrammarError.
        """
        is_new = not self.trials.passed(grammar)
        try:
            self.trials.check(grammar, quick=quick)
        except InvalidRequestError as error:
            is_slow = isinstance(error, SlowGrammarError)
            if quick and is_slow:
                raise
            for one in [] if tools is None else self.tool_form.blame(tools):
                self.trials.check(one, quick=quick or is_slow)
            raise
        grammars = [grammar] if tools is None else self.tool_form.blame(tools)
        relaxed = {one.source: relaxed_keywords(one.text) for one in grammars if _is_loose(one)}
        for source, keywords in relaxed.items() if is_new else ():
            if keywords:
                logger.warning("%s: not enforced: %s (strict would reject them)", source, ", ".join(keywords))
        return sorted(set().union(*relaxed.values()))


def _is_loose(grammar: Grammar) -> bool:
    return grammar.kind == "json_schema" and not grammar.strict

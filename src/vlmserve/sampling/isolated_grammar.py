"""Compiles grammars in isolated processes, which `trials.py` starts."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec

from vlmserve.errors import InvalidRequestError, ModelLoadError
from vlmserve.media.isolated_limits import Answer, RefusedError, address_space, limit, limit_cpu
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.sampling.deep_stack import in_deep_stack, stack_size
from vlmserve.sampling.grammar import LARGE_GRAMMAR, NICENESS, Vocabulary, compile_grammar
from vlmserve.sampling.schemas import UNBOUNDED, JSONBounds
from vlmserve.types import Grammar

_EXAMPLES = (Grammar.json({"type": "object"}), Grammar.regex("a+"), Grammar.lark('root ::= "a"'))
"""Compiling them before the first fork does all imports that grammars need."""


class GrammarDecoder:
    """setup: the checkpoint's folder."""

    def __init__(self, setup: str) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked process has no threads
        try:
            tokenizer = Tokenizer.from_folder(Path(setup))
            self._vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size)
        except (ModelLoadError, InvalidRequestError) as error:
            raise RefusedError("broken", error) from error
        for grammar in _EXAMPLES:
            compile_grammar(grammar, self._vocabulary, UNBOUNDED)

    def open(self, data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the fault of a grammar; empty if it compiles."""
        stack = stack_size(len(data))
        limit("RLIMIT_AS", address_space() + settings["memory"] + stack)
        if not settings["quick"] or len(data) > LARGE_GRAMMAR:
            os.nice(NICENESS)  # small and quick grammars overtake others
        if settings["quick"]:
            signal.setitimer(signal.ITIMER_PROF, settings["seconds"])  # SIGPROF ends the process
        else:
            limit_cpu(settings["seconds"])
        grammar = Grammar(settings["kind"], data.decode(), settings["strict"])
        bounds = msgspec.convert(settings["bounds"], JSONBounds)
        try:
            in_deep_stack(lambda: compile_grammar(grammar, self._vocabulary, bounds), stack)
        except ValueError as error:
            return {"fault": str(error)}
        return {"fault": ""}

    def answer(self, line: str) -> Answer:
        raise RefusedError("broken")  # a process compiles only one grammar

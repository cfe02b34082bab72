"""Grammars of answers, through llguidance (https://github.com/guidance-ai/llguidance). Imports no torch."""

from __future__ import annotations

import codecs
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vlmserve.cores import usable_cores
from vlmserve.errors import InvalidRequestError
from vlmserve.memory import resident_memory
from vlmserve.prompt.detokenize import byte_rule
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.sampling.closing import ClosingTokens
from vlmserve.sampling.deep_stack import in_deep_stack, stack_size
from vlmserve.sampling.fair_workers import FairWorkers
from vlmserve.sampling.faults import fault_of, shortened
from vlmserve.sampling.schemas import UNBOUNDED, JSONBounds, any_object, guided_schema, read_schema
from vlmserve.types import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LIMITS: dict[str, Any] = {
    # A mask takes tens of milliseconds within these limits, seconds within llguidance's own. Nested counted repetitions
    # may take hundreds once, and then the answer fails.
    "initial_lexer_fuel": 50_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
_NEAR = 128
"""With `4 * longest_end + _NEAR` or fewer tokens left, `settle` keeps room to complete the answer."""
_CHECK_EVERY = 32
"""Tokens between two searches for an end of the answer, while many tokens are left."""
_CHECK_AGAIN_AFTER = 8
"""Tokens until the next search after one that found no end."""
_SHORT_END = 32
_LONGEST_END = 1024
"""Maximum tokens of an end to search for. Each takes up to a millisecond."""
_MOST_FORCED = 8
"""Tokens of forced text to try when a grammar has compiled."""
_MOST_FORCED_BYTES = 128
_COMPILE_THREADS = max(2, min(3, usable_cores()))
"""A client may use all but one."""
LARGE_GRAMMAR = 4096
"""Grammars of more bytes compile at lower priority, so small ones overtake them."""
NICENESS = 10
"""Added to the nice value of threads and processes that compile large grammars."""
_MAX_KNOWN = 8192
_BYTES_PER_CHARACTER = 128
"""Estimated minimum memory of a compiled grammar, in bytes for each character of its text."""


Allowed = npt.NDArray[np.bool_]


SPECIAL = b"\xff"
"""Prefix of special tokens in llguidance, so that no text can produce them by name."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens are the bytes that `Detokenizer` writes. Some tokenizers drop an answer's first space; the grammar then
    sees its first token without it.
    """

    tokenizer: LLTokenizer
    size: int
    spaced: npt.NDArray[np.int64]
    """Tokens with a leading space."""
    bare: npt.NDArray[np.int64]
    """For each of `spaced`, the token without the space; `size` if there is none."""
    spaces: npt.NDArray[np.int64]
    """Tokens that are a single space."""
    closing: ClosingTokens
    encode: Callable[[bytes], list[int]]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int) -> Vocabulary:
        """Raises InvalidRequestError if a token's text depends on its context."""
        from llguidance import LLTokenizer, TokenizerWrapper

        rule = byte_rule(tokenizer)
        if rule is None or rule.stripped > 1:
            raise InvalidRequestError("this model's tokenizer does not support structured output", param="grammar")
        texts = [tokenizer.token(id_) for id_ in range(min(size, tokenizer.vocab_size))]
        special = sorted(id_ for id_ in tokenizer.special_ids if id_ < len(texts))
        tokens = [b"" if text is None else rule.to_bytes(text) for text in texts]
        for id_ in special:
            tokens[id_] = SPECIAL + (texts[id_] or "").encode()
        # never sampled: `Matcher.allowed` decides when an answer may end
        tokens += [b""] * (size - len(tokens)) + [b"<end of answer>"]
        source = _Tokens(tokens, [*special, size], size, tokenizer.encode_inside)
        ordinary = {token: id_ for id_, token in enumerate(tokens) if token and id_ not in {*special, size}}
        spaced = [id_ for token, id_ in ordinary.items() if token.startswith(b" ") and len(token) > 1]
        spaces = [id_ for id_, token in enumerate(tokens) if token == b" "]
        if not rule.stripped:
            spaced, spaces = [], []
        return cls(
            tokenizer=LLTokenizer(TokenizerWrapper(source), n_vocab=size + 1, eos_token=[size]),
            size=size,
            spaced=np.asarray(spaced, np.int64),
            bare=np.asarray([ordinary.get(tokens[id_][1:], size) for id_ in spaced], np.int64),
            spaces=np.asarray(spaces, np.int64),
            closing=ClosingTokens.of(tokens, special, size),
            encode=source,
        )


class _Tokens:
    """llguidance's interface. encode: text within an answer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int, encode: Callable[[str], list[int]]) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self._special = frozenset(special)
        self._encode = encode
        self._ids = {token: id_ for id_, token in enumerate(tokens) if token}

    def __call__(self, text: bytes) -> list[int]:
        """Prefer the tokenizer's encoding, which the model has seen."""
        try:
            ids = self._encode(text.decode())
        except UnicodeDecodeError:
            return self._longest_first(text)
        is_known = self._special.isdisjoint(ids) and max(ids, default=0) < len(self.tokens)
        if is_known and b"".join(self.tokens[id_] for id_ in ids) == text:
            return ids
        return self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        """For incomplete characters, text that the tokenizer would change, and tokens that the model lacks."""
        ids = []
        while text:
            length = next((n for n in range(min(len(text), 32), 0, -1) if text[:n] in self._ids), 1)
            ids.append(self._ids.get(text[:length], 0))
            text = text[length:]
        return ids


class Matcher:
    """closes: complete the answer before its token limit."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, *, closes: bool = False) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._begins = len(vocabulary.spaces) + len(vocabulary.spaced) > 0
        self._over = False
        self.error: str | None = None
        """Why no token fits the grammar."""
        self.cut = False
        """True if the answer had to be closed early."""
        self.closes = closes
        self._left = 0
        self._end: list[int] | None = None
        """Tokens that complete the answer from here, near the limit."""
        self._has_none = False
        self._next_end: list[int] | None = None
        """Tokens that complete the answer after the chosen token."""
        self._ends: list[int] = []
        self.longest_end = 0
        """Length of the longest end that a search found, in tokens."""
        self._unseen = _CHECK_EVERY

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        return self.error is None and (self._over or bool(self._matcher.is_stopped()))

    def shortest(self) -> int:
        """Tokens of a short answer from here, or 0 unless `closes`."""
        return len(self._vocabulary.closing.path(self._matcher, _LONGEST_END) or ()) if self.closes else 0

    def allowed(self, end_token_ids: frozenset[int], *, may_end: bool, left: int | None = None) -> Allowed:
        """Return the mask of the next token, ``[vocabulary]``; empty if the answer is finished or `error` is set.

        end_token_ids: allowed if the answer is complete, and either `may_end` or no other token fits. left: tokens
        left.
        """
        vocabulary = self._vocabulary
        if self.closes and left is not None:
            self._find_end(left)
            if self._end and len(self._end) >= left:
                self.cut = True
            if self.cut and self._end:
                only = np.zeros(vocabulary.size, np.bool_)
                only[self._end[0]] = True
                return only
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(packed, count=vocabulary.size + 1, bitorder="little").view(np.bool_)
        if self._matcher.is_error():
            self.error = shortened(self._matcher.get_error())
            bits[:] = False
            return bits[: vocabulary.size]
        bits[vocabulary.size] = False
        self._ends = []
        if self._begins:
            bits[vocabulary.spaced] = bits[vocabulary.bare]
            bits[vocabulary.spaces] = True
        ends = [id_ for id_ in end_token_ids if id_ < vocabulary.size]
        wanted = bits[ends]
        bits[ends] = False
        goes_on = bool(bits.any())
        if self.complete and (may_end or not goes_on):
            bits[ends] = True
            self._ends = ends
        elif not goes_on:
            # only a token that also ends this answer can continue it
            bits[ends] = wanted
        if not bits.any():
            self._over = self.complete
            self.error = None if self._over else "no token of the model goes on from here"
        return bits[: vocabulary.size]

    def forced(self) -> list[int]:
        """Return tokens of text that must follow; other tokens may write it too. Call it after `allowed`."""
        if self.cut:
            return list(self._end or ())
        if self._begins or self.error is not None:
            return []
        text = _whole_characters(self._matcher.compute_ff_bytes()[:_MOST_FORCED_BYTES])
        return self._vocabulary.encode(text) if text else []

    @property
    def searches(self) -> bool:
        """True if `settle` may search, which can be slow."""
        return self._end is not None and not self.cut

    @property
    def has_short_end(self) -> bool:
        return self._end is not None and len(self._end) <= _SHORT_END

    def settle(self, token_id: int) -> int:
        """Return the sampled token, or the first of an end that would not fit after it."""
        entered = self._entered(token_id) if self.searches else None
        if self._end is None or entered is None:
            return token_id
        if self._end and token_id == self._end[0]:
            self._next_end = self._end[1:]
            return token_id
        after = self._matcher.deep_copy()
        if not after.consume_token(entered):  # it ends the answer
            return token_id
        self._next_end = self._vocabulary.closing.path(after, self._left - 1, known=self._end)
        if self._next_end is not None:
            return token_id
        if self._end:
            self.cut = True
            return self._end[0]
        return self._ends[0] if self._ends else token_id

    def advance(self, token_id: int) -> None:
        entered = self._entered(token_id)
        self._begins = False
        self._unseen += 1
        self._end, self._next_end = self._end[1:] if self.cut and self._end else self._next_end, None
        if entered is not None and not self._matcher.consume_token(entered):
            self.error = shortened(self._matcher.get_error())

    def _entered(self, token_id: int) -> int | None:
        """Return the token that the grammar sees; None for a dropped first space."""
        if not self._begins:
            return token_id
        if token_id in self._vocabulary.spaces:
            return None
        place = np.flatnonzero(self._vocabulary.spaced == token_id)
        return int(self._vocabulary.bare[place[0]]) if len(place) else token_id

    def search_is_due(self, left: int | None) -> bool:
        """Return True near the limit, and every `_CHECK_EVERY` tokens."""
        if not self.closes or left is None or self.cut or self._end is not None:
            return False
        near = left <= 4 * self.longest_end + _NEAR
        return self._unseen >= (_CHECK_EVERY if not near else _CHECK_AGAIN_AFTER if self._has_none else 0)

    def _find_end(self, left: int) -> None:
        self._left = left
        if not self.search_is_due(left):
            return
        end = self._vocabulary.closing.path(self._matcher, min(left, _LONGEST_END))
        self._unseen = 0
        self._has_none = end is None
        self.longest_end = max(self.longest_end, len(end or ()))
        self._end = end if left <= 4 * self.longest_end + _NEAR else None


def _whole_characters(text: bytes) -> bytes:
    """Drop an incomplete last character: tokenizers encode only whole ones."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return text[: len(text) - len(decoder.getstate()[0])]


class _Compiled(NamedTuple):
    matcher: LLMatcher
    num_bytes: int


class GrammarCompiler:
    """Caches the last grammars. Thread-safe; holds no lock while it compiles.

    Does not limit time and memory: `GrammarTrials` tries grammars first.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer],
        *,
        max_bytes: int,
        cache_size: int,
        cache_bytes: int = 2**63,
        vocab_size: int | None = None,
        bounds: JSONBounds = UNBOUNDED,
    ) -> None:
        """max_bytes: of a grammar's text. vocab_size: of the model, by default the tokenizer's. bounds: default limits
        of JSON values.
        """
        self._bounds = bounds
        self.tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._cache_size, self._cache_bytes = cache_size, cache_bytes
        self._vocab_size = vocab_size
        self.kept: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        """Keys of grammars that have compiled, cached or not."""
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._workers = FairWorkers("compile-grammars", _COMPILE_THREADS, per_client=_COMPILE_THREADS - 1)

    def is_known(self, grammar: Grammar) -> bool:
        with self._lock:
            return _key(grammar) in self._known

    def check(self, grammar: Grammar) -> None:
        """Compile the grammar unless it is known. Raises like `matcher`."""
        if not self.is_known(grammar):
            self.matcher(grammar)

    def begin(self, grammar: Grammar, client: str = "") -> Future[Matcher]:
        """Start `matcher` in threads that clients share fairly. Cached grammars need none."""
        compiled = self._find(grammar)
        if compiled is None:
            return self._workers.submit(client, lambda: self.matcher(grammar))
        ready: Future[Matcher] = Future()
        ready.set_result(self._matcher(grammar, compiled))
        return ready

    def matcher(self, grammar: Grammar) -> Matcher:
        """Raises InvalidRequestError with the source of a broken or too large grammar."""
        if len(grammar.text.encode(errors="replace")) > self._max_bytes:
            raise InvalidRequestError(
                f"{grammar.source} is longer than {self._max_bytes:,} bytes, the server's limit", param=grammar.source
            )
        compiled = self._find(grammar)
        if compiled is None:
            resident = resident_memory()
            matcher = self.compile_one(grammar)
            num_bytes = max(resident_memory() - resident, _BYTES_PER_CHARACTER * len(grammar.text))
            compiled = _Compiled(matcher, num_bytes)
            self._keep(grammar, compiled)
        return self._matcher(grammar, compiled)

    def _matcher(self, grammar: Grammar, compiled: _Compiled) -> Matcher:
        return Matcher(compiled.matcher.deep_copy(), self._vocabulary, closes=grammar.is_json)

    def _find(self, grammar: Grammar) -> _Compiled | None:
        key = _key(grammar)
        with self._lock:
            compiled = self.kept.get(key)
            if compiled is not None:
                self.kept.move_to_end(key)
        return compiled

    def _keep(self, grammar: Grammar, compiled: _Compiled) -> None:
        key = _key(grammar)
        with self._lock:
            self._known[key] = None
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
            self.kept[key] = compiled
            while len(self.kept) > self._cache_size or self._kept_bytes > self._cache_bytes:
                self.kept.popitem(last=False)

    @property
    def _kept_bytes(self) -> int:
        return sum(compiled.num_bytes for compiled in self.kept.values())

    @property
    def _vocabulary(self) -> Vocabulary:
        with self._vocabulary_lock:
            return self._read_vocabulary

    @cached_property
    def _read_vocabulary(self) -> Vocabulary:
        tokenizer = self.tokenizer()
        return Vocabulary.of(tokenizer, self._vocab_size or tokenizer.vocab_size)

    def compile_one(self, grammar: Grammar) -> LLMatcher:
        try:
            vocabulary = self._vocabulary
        except InvalidRequestError as error:
            error.param = grammar.source
            raise
        stack = stack_size(self._max_bytes)
        try:
            niceness = NICENESS if len(grammar.text) > LARGE_GRAMMAR else 0
            return in_deep_stack(lambda: compile_grammar(grammar, vocabulary, self._bounds), stack, niceness)
        except ValueError as error:
            raise InvalidRequestError(f"{grammar.source}: {error}", param=grammar.source) from None


def _key(grammar: Grammar) -> bytes:
    text = grammar.text.encode(errors="replace")
    return hashlib.blake2b(text, digest_size=32, person=f"{grammar.kind} {grammar.strict:d}".encode()).digest()


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary, bounds: JSONBounds) -> LLMatcher:
    """Compile a grammar. Raises ValueError with the fault."""
    try:
        text = source_text(grammar, bounds)
        try:
            return _compiled(text, vocabulary)
        except ValueError:
            simple = source_text(grammar, bounds, combine=False)
            if simple == text:
                raise
            return _compiled(simple, vocabulary)
    except ValueError as error:
        raise ValueError(fault_of(grammar, str(error))) from None


def _compiled(text: str, vocabulary: Vocabulary) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**_LIMITS)
    compiled = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
    if not compiled.is_error():
        # two limits are checked only at the first mask and after forced text, such as "{"
        probe = compiled.deep_copy()
        probe.compute_bitmask()
        if not probe.is_error():
            probe.try_consume_tokens(probe.compute_ff_tokens()[:_MOST_FORCED])
        compiled = probe if probe.is_error() else compiled
    if compiled.is_error():
        raise ValueError(compiled.get_error())
    return compiled


def source_text(grammar: Grammar, bounds: JSONBounds, *, combine: bool = True) -> str:
    """Raises ValueError for an invalid grammar. bounds, combine: for JSON schemas, see `guided_schema`."""
    from llguidance import LLMatcher, regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    match grammar.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema(any_object(bounds))
        case "json_schema":
            schema = guided_schema(read_schema(grammar.text), strict=grammar.strict, bounds=bounds, combine=combine)
            return LLMatcher.grammar_from_json_schema(schema)
        case "regex":
            # as in JavaScript and JSON Schema, ``\d`` matches ASCII digits only
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(grammar.text, 'dws')}/")
        case "choice":
            choices = json.loads(grammar.text)
            if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
                raise ValueError("choices must be a list of at least one text")
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
        case "lark":
            try:
                lark = any_to_lark(grammar.text)
            except RecursionError:
                raise ValueError("the grammar is nested too deeply") from None
            except Exception as error:  # the GBNF reader has its own errors, and crashes on some texts
                raise ValueError(f"the grammar cannot be read as GBNF: {error}") from None
            return LLMatcher.grammar_from_lark(lark)

"""Parameters of a request's answers: sampling, end of generation, and format."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from vlmserve.errors import InvalidRequestError
from vlmserve.settings.config import MAX_STOP_STRINGS
from vlmserve.settings.validation import did_you_mean

MAX_SEED = 2**63 - 1
GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]
MAX_BIASES = 4096
"""Maximum biased tokens of a request."""
MAX_NGRAM = 1024
"""Maximum size of a non-repeating n-gram."""
MAX_BAD_WORDS = 1024
"""Maximum forbidden words of a request."""
MAX_BAD_WORD = 256
"""Maximum characters of a forbidden word."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Maximum tokens in `logprob_token_ids`, as in vLLM."""
MAX_SAMPLES = 1024
"""Maximum answers to one prompt."""


class Grammar(msgspec.Struct, frozen=True):
    """The format of an answer."""

    kind: GrammarKind
    text: str = ""
    """A JSON schema; a regular expression for the whole answer; a JSON list of strings to choose from; or a grammar in
    llguidance's Lark dialect or GBNF. Empty for "json_object".
    """
    strict: bool = True
    """False ignores unsupported keywords of a JSON schema."""
    source: str = "grammar"
    """The request field that errors name."""
    model: Any = None
    """A pydantic model for `CompletionOutput.parsed`; it stays in this process."""

    @classmethod
    def json(cls, schema: Any, *, strict: bool = True) -> Grammar:
        """JSON that matches a schema: a dict, text, or pydantic model."""
        model = None
        if hasattr(schema, "model_json_schema"):
            model, schema = schema, schema.model_json_schema()
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        return cls("json_schema", text, strict, model=model)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches a regular expression as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of these texts. Raises InvalidRequestError for anything but a list of strings."""
        if isinstance(choices, str) or not all(isinstance(choice, str) for choice in choices):
            raise InvalidRequestError(f"choices must be a list of strings, got {choices!r:.100}", param="grammar")
        return cls("choice", msgspec.json.encode(list(choices)).decode())

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text of a grammar in llguidance's Lark dialect or in GBNF."""
        return cls("lark", text)

    @property
    def is_json(self) -> bool:
        return self.kind in ("json_schema", "json_object")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The format of an answer, in vLLM's form. Set one field; `Grammar` has more formats."""

    json: Any = None
    """A JSON schema as a dict or text, or a pydantic model."""
    regex: str | None = None
    """A regular expression for the whole answer."""
    choice: Sequence[str] | None = None
    """Texts to choose from."""
    grammar: str | None = None
    """In llguidance's Lark dialect or GBNF."""
    json_object: bool | None = None
    """Any JSON object."""


GuidedDecodingParams = StructuredOutputsParams
"""vLLM's older name."""


def grammar_of(wanted: Any, param: str) -> Grammar:
    """Convert a `StructuredOutputsParams`, a dict of its fields, or vLLM's own object.

    Raises InvalidRequestError unless exactly one format is set.
    """
    read = wanted.get if isinstance(wanted, Mapping) else partial(getattr, wanted)
    makers: dict[str, Callable[[Any], Grammar]] = {
        "json": Grammar.json,
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.lark,
        "json_object": lambda _: Grammar.json_object(),
    }
    found = {name: value for name in makers if (value := read(name, None))}
    if len(found) != 1:
        raise InvalidRequestError(
            f"{param} must have one of {', '.join(makers)}, like {{'json': schema}}, got {wanted!r:.100}", param=param
        )
    [(name, value)] = found.items()
    return makers[name](value)


_VLLM_DEFAULTS: Mapping[str, Any] = {"detokenize": True, "logits_processors": None, "extra_args": None}
"""vLLM's parameters that `SamplingParams` lacks, with their neutral values."""


class _NamedParams(type(msgspec.Struct)):  # type: ignore[misc]
    """Explains unknown parameters; drops vLLM's parameters with neutral values."""

    if not TYPE_CHECKING:

        def __call__(cls, *args, **values):
            unknown = [name for name in values if name not in cls.__struct_fields__]
            for name in unknown:
                if name not in _VLLM_DEFAULTS:
                    close = did_you_mean(name, cls.__struct_fields__)
                    raise TypeError(f"{cls.__name__} has no parameter {name}{close}")
                value, default = values.pop(name), _VLLM_DEFAULTS[name]
                if value != default and (value or default):
                    raise TypeError(f"{cls.__name__} takes no other {name} than {default}; leave it out")
            return super().__call__(*args, **values)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_NamedParams):
    """Sampling, returned logprobs, and the end of generation.

    Raises InvalidRequestError, naming the field, for a value of the wrong type or out of range.
    """

    n: int = 1
    """Answers to each prompt. With a seed, answer i uses seed + i."""
    best_of: int | None = None
    """Sampled answers; the `n` with the highest mean log probability are returned (default: `n`)."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep this many tokens; 0: all."""
    top_p: float = 1.0
    """Keep the most likely tokens with this total probability."""
    min_p: float = 0.0
    """Minimum probability relative to the most likely token."""
    logit_bias: dict[int, float] = {}
    """Added to logits, by token id: -100 to 100."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative logits, of tokens in prompt and answer."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each occurrence in the answer."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer."""
    repeat_last_n: int = -1
    """Latest tokens that penalties count, without images; -1: all."""
    no_repeat_ngram_size: int = 0
    """Never repeat n-grams of this size from prompt and answer, without images; 0: off. A token may still repeat if the
    grammar allows no other.
    """
    no_repeat_ngram_window: int = -1
    """Latest tokens in which such n-grams may begin; -1: all."""
    logprobs: int | None = None
    """Alternatives to return with each token; 0: only the token's logprob; None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens. All of them are computed, even if cached."""
    thinking_token_budget: int | None = None
    """End the reasoning after this many tokens; 0: no reasoning; None: no limit. Only for conversations with models
    whose reasoning vlmserve separates.
    """
    seed: int | None = None
    """Makes the request reproducible in any batch; None: a random seed."""
    stop: str | Sequence[str] = ()
    """Strings that end the answer; they are not part of it. No effect before `min_tokens`."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer."""
    ignore_eos: bool = False
    """Continue after the model's end tokens."""
    max_tokens: int | None = None
    """None: up to the end of the context."""
    min_tokens: int = 0
    """Forbid end tokens before this many tokens."""
    grammar: Grammar | None = None
    """The format. The answer ends when the grammar is complete; with `min_tokens` or `ignore_eos`, only when nothing
    can follow.
    """
    structured_outputs: Any = None
    """vLLM's form of `grammar`: a `StructuredOutputsParams` or a dict."""
    guided_decoding: Any = None
    """vLLM's older name of `structured_outputs`."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that an answer may have, including end tokens; None: all. A grammar may still end."""
    bad_words: Sequence[str] = ()
    """Texts that an answer must not contain, with or without a leading space."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids of `bad_words`, filled in by the tokenizer's owner."""
    logprob_token_ids: Sequence[int] | None = None
    """Tokens to return logprobs for, in place of the most likely ones; needs `logprobs`."""
    include_stop_str_in_output: bool = False
    """Include the stop string or token in the text."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text."""
    spaces_between_special_tokens: bool = True
    """No effect."""
    truncate_prompt_tokens: int | None = None
    """Last prompt tokens to keep; -1: as many as fit; None: all."""

    def __post_init__(self) -> None:
        self._read_vllms_form()
        self._check_types()

        def check(holds: bool, param: str, rule: str) -> None:
            if not holds:
                raise InvalidRequestError(f"{param} must be {rule}, got {getattr(self, param)!r:.100}", param=param)

        check(1 <= self.n <= MAX_SAMPLES, "n", f"between 1 and {MAX_SAMPLES}")
        most = f"at least n, which is {self.n}, and at most {MAX_SAMPLES}"
        check(self.best_of is None or self.n <= self.best_of <= MAX_SAMPLES, "best_of", most)
        check(math.isfinite(self.temperature) and 0 <= self.temperature <= 100, "temperature", "between 0 and 100")
        check(self.top_k >= 0, "top_k", "0 (off) or more")
        check(math.isfinite(self.top_p) and 0 < self.top_p <= 1, "top_p", "greater than 0 and at most 1")
        check(math.isfinite(self.min_p) and 0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        check(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "between 0.01 and 100")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
        check(self.repeat_last_n >= -1, "repeat_last_n", "-1 (all tokens) or more")
        size, window = self.no_repeat_ngram_size, self.no_repeat_ngram_window
        check(size == 0 or 2 <= size <= MAX_NGRAM, "no_repeat_ngram_size", f"0 (off), or between 2 and {MAX_NGRAM}")
        check(
            window == -1 or window >= size, "no_repeat_ngram_window", "-1 (all tokens), or no_repeat_ngram_size or more"
        )
        check(self.logprobs is None or self.logprobs >= 0, "logprobs", "0 or more")
        check(self.prompt_logprobs is None or self.prompt_logprobs >= 0, "prompt_logprobs", "0 or more")
        budget = self.thinking_token_budget
        check(budget is None or budget >= 0, "thinking_token_budget", "0 or more")
        self._check_biases()
        check(self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", f"between 0 and {MAX_SEED}")
        check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        check(self.min_tokens >= 0, "min_tokens", "0 or more")
        check(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens")
        check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        check(all(self.stop), "stop", "made of non-empty strings")
        check(self.allowed_token_ids is None or bool(self.allowed_token_ids), "allowed_token_ids", "a non-empty list")
        check(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} words")
        words = f"made of words of 1 to {MAX_BAD_WORD} characters"
        check(all(0 < len(word) <= MAX_BAD_WORD and word.strip() for word in self.bad_words), "bad_words", words)
        has_both = self.logprob_token_ids is None or self.logprobs is not None
        check(has_both, "logprob_token_ids", "left out unless logprobs is set")
        kept = self.truncate_prompt_tokens
        check(kept is None or kept == -1 or kept >= 1, "truncate_prompt_tokens", "-1 (what fits), or 1 or more")

    def _read_vllms_form(self) -> None:
        if self.top_k == -1:  # vLLM's value for off
            msgspec.structs.force_setattr(self, "top_k", 0)
        if self.seed == -1:  # vLLM's value for none
            msgspec.structs.force_setattr(self, "seed", None)
        for name in ("structured_outputs", "guided_decoding"):
            wanted = getattr(self, name)
            if wanted is None:
                continue
            if self.grammar is not None:
                raise InvalidRequestError(f"give either grammar or {name}", param=name)
            msgspec.structs.force_setattr(self, "grammar", grammar_of(wanted, name))
            msgspec.structs.force_setattr(self, name, None)

    def _check_types(self) -> None:
        """Check types; convert other sequences to tuples."""

        def refuse(param: str, rule: str) -> None:
            raise InvalidRequestError(f"{param} must be {rule}, got {getattr(self, param)!r:.100}", param=param)

        for name, (kind, optional) in _NUMBERS.items():
            value = getattr(self, name)
            if optional and value is None:
                continue
            abstract = numbers.Integral if kind is int else numbers.Real
            if isinstance(value, bool) or not isinstance(value, abstract):
                refuse(name, "a whole number" if kind is int else "a number")
            if not isinstance(value, int | float):  # a numpy number
                msgspec.structs.force_setattr(self, name, kind(value))
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(one, str) for one in stop):
            refuse("stop", "a string or a list of strings")
        words = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words or ()
        if not isinstance(words, Sequence) or not all(isinstance(one, str) for one in words):
            refuse("bad_words", "a list of strings")
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            ids = getattr(self, name)
            if ids is None:
                continue
            if isinstance(ids, str | bytes) or not isinstance(ids, Sequence) or not all(map(_is_token_id, ids)):
                refuse(name, "a list of token ids")
            msgspec.structs.force_setattr(self, name, tuple(ids))
        for name in ("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                refuse(name, "True or False")
        biases: Any = self.logit_bias
        if not isinstance(biases, Mapping):
            refuse("logit_bias", "a dict of numbers by token ids")
        grammar: Any = self.grammar
        if grammar is not None and not isinstance(grammar, Grammar):
            refuse("grammar", "a Grammar, like Grammar.json(schema) or Grammar.regex(pattern)")
        msgspec.structs.force_setattr(self, "stop", tuple(stop))
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        msgspec.structs.force_setattr(self, "bad_words", tuple(words))

    def _check_biases(self) -> None:
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidRequestError(
                f"logit_bias must have at most {MAX_BIASES} tokens, got {len(self.logit_bias)}", param="logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            if not _is_token_id(token_id) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise InvalidRequestError(
                    f"logit_bias must have token ids and numbers between -100 and 100, got {token_id!r}: {bias!r}",
                    param="logit_bias",
                )

    @property
    def penalizes(self) -> bool:
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1, 0, 0) and self.repeat_last_n != 0

    @property
    def reads_tokens(self) -> bool:
        """True if sampling needs earlier tokens on the host."""
        has_phrases = any(len(word) > 1 for word in self.bad_token_ids)
        has_rules = has_phrases or self.no_repeat_ngram_size > 0 or self.thinking_token_budget is not None
        return has_rules or self.penalizes or self.grammar is not None

    @property
    def needs_host(self) -> bool:
        """True if the host makes a mask or returns logprobs."""
        return self.grammar is not None or self.allowed_token_ids is not None or self.logprobs is not None

    @property
    def num_samples(self) -> int:
        """Sampled answers per prompt."""
        return self.best_of or self.n

    def without_model(self) -> SamplingParams:
        """Copy without the grammar's pydantic model, which cannot be serialized."""
        if self.grammar is None or self.grammar.model is None:
            return self
        return msgspec.structs.replace(self, grammar=msgspec.structs.replace(self.grammar, model=None))

    def of_sample(self, index: int, *, ranked: bool) -> SamplingParams:
        """Parameters of one answer, with its own seed. ranked: compare answers by likelihood, from logprobs."""
        changes: dict[str, Any] = {}
        if self.num_samples > 1:
            changes |= {"n": 1, "best_of": None}
        if self.seed is not None and index > 0:
            changes["seed"] = (self.seed + index) % (MAX_SEED + 1)
        if ranked and self.logprobs is None:
            changes["logprobs"] = 0
        return msgspec.structs.replace(self, **changes) if changes else self


_NUMBERS: dict[str, tuple[type[int] | type[float], bool]] = {
    **dict.fromkeys(
        ("n", "top_k", "repeat_last_n", "no_repeat_ngram_size", "no_repeat_ngram_window", "min_tokens"), (int, False)
    ),
    **dict.fromkeys(
        (
            "best_of",
            "logprobs",
            "prompt_logprobs",
            "thinking_token_budget",
            "seed",
            "max_tokens",
            "truncate_prompt_tokens",
        ),
        (int, True),
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"), (float, False)
    ),
}
"""Type of each numeric field, and whether it may be None."""


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

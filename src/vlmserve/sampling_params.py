"""What a request asks of its answers: how tokens are sampled, when generation ends, and the format of the text."""

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
"""Tokens that a request may have a bias for."""
MAX_NGRAM = 1024
"""Tokens of an n-gram that must not be repeated."""
MAX_BAD_WORDS = 1024
"""Words that a request may forbid."""
MAX_BAD_WORD = 256
"""Characters of a forbidden word."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Tokens whose logprobs a request may ask for by their ids, as in vLLM."""
MAX_SAMPLES = 1024
"""Answers to one prompt."""


class Grammar(msgspec.Struct, frozen=True):
    """The format of an answer.

    text: a JSON schema; nothing for "json_object"; a regular expression that fits the whole answer; a JSON list of
    strings to choose from; a grammar in llguidance's dialect of Lark, or in GBNF.
    strict: False follows a JSON schema as far as it can be followed, and ignores keywords that cannot be.
    source: the field of a request that it came from, which errors name.
    model: a pydantic model that `CompletionOutput.parsed` is an instance of; it stays in this process.
    """

    kind: GrammarKind
    text: str = ""
    strict: bool = True
    source: str = "grammar"
    model: Any = None

    @classmethod
    def json(cls, schema: Any, *, strict: bool = True) -> Grammar:
        """JSON that fits a schema: a dict, a text, or a pydantic model."""
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
        """Text that the whole of a regular expression fits."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of these texts. Raises InvalidRequestError for what is not a list of strings."""
        if isinstance(choices, str) or not all(isinstance(choice, str) for choice in choices):
            raise InvalidRequestError(f"choices must be a list of strings, got {choices!r:.100}", param="grammar")
        return cls("choice", msgspec.json.encode(list(choices)).decode())

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text that a grammar in llguidance's dialect of Lark, or in GBNF, derives."""
        return cls("lark", text)

    @property
    def is_json(self) -> bool:
        """Whether the answer is JSON."""
        return self.kind in ("json_schema", "json_object")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The format of an answer in vLLM's form, of which one field is set; `Grammar` has more.

    json: a JSON schema as a dict or text, or a pydantic model. regex: fits the whole answer. choice: texts to choose
    from. grammar: in llguidance's dialect of Lark, or in GBNF. json_object: any JSON object.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


GuidedDecodingParams = StructuredOutputsParams
"""vLLM's older name."""


def grammar_of(wanted: Any, param: str) -> Grammar:
    """The format that `StructuredOutputsParams`, a dict with its fields, or vLLM's own object asks for.

    Raises InvalidRequestError unless it asks for exactly one.
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


_VLLM_DEFAULTS: Mapping[str, Any] = {
    "detokenize": True,
    "logits_processors": None,
    "extra_args": None,
}
"""Parameters of vLLM that `SamplingParams` may lack, and the values that change nothing."""


class _NamedParams(type(msgspec.Struct)):  # type: ignore[misc]
    """Explains unknown names, and drops parameters of vLLM that have their default."""

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
    """How tokens are sampled, which logprobs are returned, and when generation ends.

    n: answers to each prompt. best_of: answers that are sampled, of which the `n` with the highest mean log probability
    are returned; None: as many as are returned. With a seed, answer number i has the seed plus i.
    temperature: 0 is greedy. top_k: 0 keeps all. top_p, min_p: probability mass and floor relative to the best token.
    logit_bias: what is added to the logits of tokens, by their ids, -100 to 100.
    repetition_penalty: positive logits of tokens of prompt and answer are divided by it, negative ones multiplied.
    frequency_penalty: subtracted from a token's logit for each time that the answer has it. presence_penalty: for
    having it at all. repeat_last_n: how many of the latest tokens are penalized, images not counted; -1: all.
    no_repeat_ngram_size: no so many tokens in a row come twice, counting the prompt, where an image is no token; 0:
    they may. no_repeat_ngram_window: only those that begin among so many of the latest tokens count; -1: all. Where a
    grammar allows nothing else, a token may repeat them.
    allowed_token_ids: the only tokens that an answer may have, end tokens included; None: all. A grammar may end.
    bad_words: texts that an answer must not have, with or without a space before them.
    logprob_token_ids: tokens whose logprobs are returned in the place of the likeliest; needs `logprobs`.
    logprobs: how many alternatives are returned with each token; 0: only the token's own logprob; None: no logprobs.
    prompt_logprobs: the same for the tokens of the prompt, all of which are computed then, cached or not.
    thinking_token_budget: the thoughts that an answer begins with are ended after so many tokens, 0: it has none; None:
    they may take any number. Only for prompts of conversations, and models whose thoughts are told from answers.
    seed: makes a request reproducible whatever else is in the batch; None draws one.
    stop: a string, or several, that end the answer and are not part of it. stop_token_ids: token ids that do the same.
    include_stop_str_in_output: the text has the stop string or token that ended it. Before `min_tokens`, stop strings
    have no effect. skip_special_tokens: the text has no special tokens. spaces_between_special_tokens: no effect.
    truncate_prompt_tokens: how many tokens the model reads from the prompt's end; -1: as many as fit; None: all.
    max_tokens: None means up to the context's end. min_tokens: end tokens are impossible before that many.
    ignore_eos: keep going after the model's own end tokens.
    grammar: the format of the answer. It ends where the grammar is complete, with `min_tokens` and `ignore_eos`
    only if nothing can follow there. structured_outputs, guided_decoding: the same in vLLM's form, a
    `StructuredOutputsParams` or a dict; they become `grammar`.
    Raises InvalidRequestError, naming the field, for a value out of range or of another type.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: dict[int, float] = {}
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = -1
    no_repeat_ngram_size: int = 0
    no_repeat_ngram_window: int = -1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    grammar: Grammar | None = None
    structured_outputs: Any = None
    guided_decoding: Any = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """The token ids of `bad_words`, which the tokenizer's owner fills in."""
    logprob_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None

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
        if self.top_k == -1:  # vLLM's word for off
            msgspec.structs.force_setattr(self, "top_k", 0)
        if self.seed == -1:  # vLLM's word for none
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
        """Also make tuples of what may be given in other ways."""

        def refuse(param: str, rule: str) -> None:
            raise InvalidRequestError(f"{param} must be {rule}, got {getattr(self, param)!r:.100}", param=param)

        for name, (kind, optional) in _NUMBERS.items():
            value = getattr(self, name)
            if optional and value is None:
                continue
            abstract = numbers.Integral if kind is int else numbers.Real
            if isinstance(value, bool) or not isinstance(value, abstract):
                refuse(name, "a whole number" if kind is int else "a number")
            if not isinstance(value, int | float):  # one of numpy's
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
        """Whether penalties apply."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1, 0, 0) and self.repeat_last_n != 0

    @property
    def reads_tokens(self) -> bool:
        """Whether a token cannot be sampled before the host knows the tokens before it."""
        has_phrases = any(len(word) > 1 for word in self.bad_token_ids)
        has_rules = has_phrases or self.no_repeat_ngram_size > 0 or self.thinking_token_budget is not None
        return has_rules or self.penalizes or self.grammar is not None

    @property
    def needs_host(self) -> bool:
        """Whether the host takes part in sampling a token: it makes a mask, or returns logprobs."""
        return self.grammar is not None or self.allowed_token_ids is not None or self.logprobs is not None

    @property
    def num_samples(self) -> int:
        """How many answers to a prompt are sampled."""
        return self.best_of or self.n

    def without_model(self) -> SamplingParams:
        """The same without the grammar's pydantic model, which cannot be serialized."""
        if self.grammar is None or self.grammar.model is None:
            return self
        return msgspec.structs.replace(self, grammar=msgspec.structs.replace(self.grammar, model=None))

    def of_sample(self, index: int, *, ranked: bool) -> SamplingParams:
        """The params of the answer number `index` alone: with a seed every one gets its own.

        ranked: whether answers are compared by likelihood, which needs logprobs.
        """
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
        (
            "n",
            "top_k",
            "repeat_last_n",
            "no_repeat_ngram_size",
            "no_repeat_ngram_window",
            "min_tokens",
        ),
        (int, False),
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
        ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
        (float, False),
    ),
}
"""What each field that is a number is, and whether it may be None."""


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

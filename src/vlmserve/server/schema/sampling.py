from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from vlmserve.errors import InvalidRequestError
from vlmserve.sampling_params import MAX_BAD_WORDS, MAX_LOGPROB_TOKEN_IDS, MAX_NGRAM
from vlmserve.server.schema.asking import ModelRequest
from vlmserve.server.schema.base import MAX_COUNT, RequestModel
from vlmserve.server.schema.structured import Choices, ResponseFormat, Schema, StructuredOutputs, wanted_grammar
from vlmserve.types import MAX_BIASES, BeamSearch, Grammar, SamplingParams

MAX_CHOICES = 16
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]

_WITH_DEFAULTS = "temperature top_p top_k min_p repetition_penalty repeat_last_n no_repeat_ngram_size".split()
"""Fields of `SamplingParams` for which a model may have defaults."""
_AS_GIVEN = (
    "logit_bias frequency_penalty presence_penalty no_repeat_ngram_window thinking_token_budget seed ignore_eos "
    "min_tokens bad_words include_stop_str_in_output skip_special_tokens spaces_between_special_tokens "
    "truncate_prompt_tokens".split()
)
"""Fields of `SamplingParams` that requests have, too."""
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys("audio chat_template documents logits_processors media_io_kwargs prompt_logprobs".split(), ()),
    **dict.fromkeys("early_stopping return_token_ids return_tokens_as_token_ids use_beam_search".split(), (False,)),
    **dict.fromkeys("dry_multiplier dynatemp_range mirostat smoothing_factor top_a xtc_probability".split(), (0,)),
    **dict.fromkeys("best_of length_penalty n tfs_z typical_p".split(), (1,)),
    "modalities": (["text"],),
    "top_n_sigma": (0, -1),
    "web_search_options": (),
}
"""Unsupported fields of other servers, with the values that have no effect."""
LIMIT_NAMES = ("max_length", "max_new_tokens", "max_tokens_to_sample", "n_predict")
"""Other servers' names for the maximum answer length."""
OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(LIMIT_NAMES, "max_tokens"),
    **dict.fromkeys(("stop_sequences", "stop_strings", "stop_words"), "stop"),
    "random_seed": "seed",
}
"""Other servers' names for fields."""


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """With include_usage: each event has the usage so far, as in vLLM."""
    include_obfuscation: bool | None = None
    """It has no effect."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _by_token_id(value: Any) -> Any:
    """Convert the keys to token ids; JSON keys are strings."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise ValueError(f"must have at most {MAX_BIASES} tokens, not {len(value)}")
    for key in value:
        # int() rejects thousands of digits.
        if not (isinstance(key, str) and len(key) <= 20 and key.isascii() and key.isdigit() and int(key) <= MAX_COUNT):
            raise ValueError(f"must have token ids as keys, not {key!r:.100}")
    return {int(key): bias for key, bias in value.items()}


class SamplingRequest(ModelRequest):
    """A request for generated text."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL_VALUES
    other_names: ClassVar[Mapping[str, str]] = OTHER_NAMES
    renamed_fields: ClassVar[Mapping[str, str]] = {
        "repeat_penalty": "repetition_penalty",
        "json_schema": "guided_json",
        "grammar": "guided_grammar",
    }
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, description="0 is greedy. Default: the model's, else 1.")
    top_p: float | None = Field(None, description="Default: the model's, else 1.")
    top_k: int | None = Field(
        None, ge=-1, le=MAX_COUNT, description="0 or -1 keeps all tokens. Default: the model's, else 0."
    )
    min_p: float | None = Field(None, description="Default: the model's, else 0.")
    logit_bias: Annotated[dict[int, float], BeforeValidator(_by_token_id)] = Field(
        default_factory=dict, description="Added to the logits of tokens, by their ids: -100 to 100."
    )
    presence_penalty: float = Field(0, description="-2 to 2, for tokens that the answer has.")
    frequency_penalty: float = Field(0, description="-2 to 2, for each time that the answer has a token.")
    repetition_penalty: float | None = Field(
        None, description="Divides logits of tokens in prompt and answer. Default: the model's, else 1."
    )
    repeat_last_n: int | None = Field(
        None,
        ge=-1,
        le=MAX_COUNT,
        description="Number of latest tokens that are penalized. Default: the model's, else all (-1).",
    )
    no_repeat_ngram_size: int | None = Field(
        None, ge=0, le=MAX_NGRAM, description="Do not repeat n-grams of this size. Default: the model's, else 0 (off)."
    )
    no_repeat_ngram_window: int = Field(
        -1,
        ge=-1,
        le=MAX_COUNT,
        description="Number of latest tokens to search for repeated n-grams. Default: all (-1).",
    )
    thinking_token_budget: int | None = Field(
        None, ge=0, le=MAX_COUNT, description="Maximum tokens of reasoning. Default: no limit."
    )
    seed: Annotated[int | None, BeforeValidator(lambda seed: None if seed == -1 else seed)] = Field(
        None, description="Makes answers reproducible; -1: none."
    )
    stop: Annotated[list[str], BeforeValidator(_as_list)] = Field(
        default_factory=list, description="A string or a list of them."
    )
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=256)
    include_stop_str_in_output: bool = Field(False, description="Include the stop string or token in the text.")
    ignore_eos: bool = False
    allowed_token_ids: list[TokenId] | None = Field(None, description="The only tokens that answers may have.")
    bad_words: list[str] = Field(
        default_factory=list, max_length=MAX_BAD_WORDS, description="Texts that answers must not have."
    )
    skip_special_tokens: bool = Field(True, description="Omit special tokens from the text.")
    spaces_between_special_tokens: bool = Field(True, description="Has no effect.")
    min_tokens: int = Field(0, ge=0, le=MAX_COUNT)
    response_format: ResponseFormat | None = Field(None, description="The format of the answer: text or JSON.")
    structured_outputs: StructuredOutputs | None = Field(None, description="The same in vLLM's form.")
    guided_json: Schema | None = Field(None, description="A JSON schema; vLLM's older form.")
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = Field(None, description="In Lark or GBNF.")

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def is_streamed(self) -> bool:
        return self.stream

    def with_seed(self, seed: int) -> Self:
        return self if self.seed is not None else self.model_copy(update={"seed": seed})

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives for each token of the answer; None: no logprobs."""
        return None

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """Alternatives for each token of the prompt; None: no logprobs."""
        return None

    @property
    def wanted_logprob_ids(self) -> list[int] | None:
        """Tokens to return logprobs for, instead of the most likely ones."""
        return None

    @property
    def wants_confidence(self) -> bool:
        grammar = None if self.wanted_logprobs is None else self.grammar()
        return grammar is not None and grammar.kind in ("json_schema", "json_object")

    @property
    def prewarms(self) -> bool:
        """True if the prompt is computed and nothing is generated."""
        return False

    def sampling_params(self, defaults: SamplingParams, limit: int | None, default_limit: int) -> SamplingParams:
        """Raises InvalidRequestError for a value out of range.

        limit: maximum tokens of the answer. default_limit: maximum if the request sets none.
        """
        own = {name: getattr(self, name) for name in _AS_GIVEN}
        own |= {name: getattr(defaults if getattr(self, name) is None else self, name) for name in _WITH_DEFAULTS}
        own["top_k"] = max(0, own["top_k"])
        if self.prewarms:
            limit = max(1, self.min_tokens)  # the engine computes at least one token
        return SamplingParams(
            **own,
            logprobs=self.wanted_logprobs,
            prompt_logprobs=self.wanted_prompt_logprobs,
            logprob_token_ids=self.wanted_logprob_ids,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            max_tokens=max(default_limit, self.min_tokens) if limit is None else limit,
            grammar=self.grammar(),
            allowed_token_ids=self.allowed_token_ids or None,
        )

    def grammar(self) -> Grammar | None:
        """The answer's format. Raises InvalidRequestError for more than one grammar."""
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        return wanted_grammar(self.response_format, self.structured_outputs, guided)


class ChoicesRequest(SamplingRequest):
    """A request that may ask for several answers to each prompt, and for beam search."""

    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Answers to each prompt.")
    use_beam_search: bool = Field(False, description="Search the most likely answers; do not sample.")
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="Answers to sample, or beams; the n most likely ones are returned. Default: n.",
    )
    length_penalty: float = Field(1, ge=-10, le=10, description="More than 1 prefers longer answers of a search.")
    early_stopping: bool = Field(False, description="End a search as soon as enough answers have ended.")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_COUNT, description="Return the logprobs of the prompt's tokens and this many alternatives."
    )
    logprob_token_ids: list[TokenId] = Field(
        default_factory=list,
        max_length=MAX_LOGPROB_TOKEN_IDS,
        description="With logprobs: tokens to return in place of the most likely ones.",
    )
    return_token_ids: bool = Field(False, description="Return the token ids of prompt and answer, and of logprobs.")
    return_tokens_as_token_ids: bool = Field(False, description="Tokens of logprobs are named token_id:ID.")

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        if self.num_running < self.n:
            raise InvalidRequestError(f"best_of must be at least n, which is {self.n}", param="best_of")
        if self.logprob_token_ids and self.wanted_logprobs is None:
            raise InvalidRequestError("logprob_token_ids needs logprobs", param="logprob_token_ids")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs cannot be streamed; leave out prompt_logprobs or stream", param="prompt_logprobs"
            )
        if self.use_beam_search:
            return self
        for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
            if getattr(self, name) != neutral:
                raise InvalidRequestError(f"{name} needs use_beam_search", param=name)
        if self.stream and self.num_running > self.n:
            raise InvalidRequestError(
                f"the best of {self.num_running} answers are known only when all have ended, so they cannot be "
                "streamed; leave out best_of or stream",
                param="best_of",
            )
        return self

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def wanted_logprob_ids(self) -> list[int] | None:
        return self.logprob_token_ids or None

    @property
    def num_running(self) -> int:
        return self.best_of or self.n

    @property
    def num_samples(self) -> int:
        """Sampled answers to a prompt; the `n` most likely ones are returned."""
        return self.n if self.use_beam_search else self.num_running

    @property
    def beams(self) -> BeamSearch | None:
        if not self.use_beam_search:
            return None
        return BeamSearch(self.num_running, self.length_penalty, self.early_stopping)

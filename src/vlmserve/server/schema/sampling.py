"""What requests of all kinds may say about sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from vlmserve.errors import InvalidRequestError
from vlmserve.server.schema.base import MAX_COUNT, RequestModel
from vlmserve.server.schema.structured import Choices, ResponseFormat, Schema, StructuredOutputs, wanted_grammar
from vlmserve.types import MAX_CACHE_SALT, Grammar, SamplingParams

MAX_CHOICES = 16


class StreamOptions(RequestModel):
    """What a stream carries besides text. include_obfuscation is accepted and changes nothing."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class SamplingRequest(RequestModel):
    """A body that asks for generated text."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are not supported, and the values with which they change nothing."""
    ignored_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that never change an answer."""
    content_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that hold what is shown and said."""

    model: str | None = Field(None, description="A name that /v1/models lists; default: the only one.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, description="0 is greedy. Default: the model's, else 1.")
    top_p: float | None = Field(None, description="Default: the model's, else 1.")
    top_k: int | None = Field(
        None, ge=-1, le=MAX_COUNT, description="0 or -1 keeps all tokens. Default: the model's, else 0."
    )
    min_p: float | None = Field(None, description="Default: the model's, else 0.")
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_as_list)] = Field([], description="A string or up to 16.")
    stop_token_ids: list[Annotated[int, Field(ge=0, le=MAX_COUNT)]] = Field([], max_length=256)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=MAX_COUNT)
    response_format: ResponseFormat | None = Field(None, description="What the answer looks like: text or JSON.")
    structured_outputs: StructuredOutputs | None = Field(None, description="The same in vLLM's form.")
    guided_json: Schema | None = Field(None, description="A JSON schema; vLLM's older form.")
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = Field(None, description="In Lark or GBNF.")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_CACHE_SALT,
        description="Nothing that is cached is shared with requests of another salt, or of none.",
    )

    @model_validator(mode="before")
    @classmethod
    def _check_other_fields(cls, value: Any) -> Any:
        """Drop what changes nothing; unsupported fields are told apart from unknown ones."""
        if not isinstance(value, dict):
            return value
        kept = {}
        for name, field in value.items():
            if name in cls.model_fields:
                kept[name] = field
            elif name in cls.neutral_values:
                if field is not None and field not in cls.neutral_values[name]:
                    raise InvalidRequestError(f"{name} is not supported here; leave it out", param=name)
            elif name not in cls.ignored_fields:
                raise InvalidRequestError(f"{name} is not a field of this request; is it misspelt?", param=name)
        return kept

    def without_content(self) -> Self:
        """The same without what the request shows and says, which may be large."""
        return self.model_copy(update=dict.fromkeys(self.content_fields))

    def sampling_params(self, defaults: SamplingParams, limit: int | None, default_limit: int) -> SamplingParams:
        """What to sample. limit: the longest answer, in tokens; default_limit: that of requests which set none. Raises
        InvalidRequestError, naming the field, for a value out of range."""
        return SamplingParams(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else 0 if self.top_k == -1 else self.top_k,
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            max_tokens=max(default_limit, self.min_tokens) if limit is None else limit,
            min_tokens=self.min_tokens,
            grammar=self.grammar(),
        )

    def grammar(self) -> Grammar | None:
        """What the answer has to look like. Raises InvalidRequestError, naming the field, for more than one grammar."""
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        return wanted_grammar(self.response_format, self.structured_outputs, guided)

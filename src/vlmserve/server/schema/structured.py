"""Formats of answers: https://platform.openai.com/docs/guides/structured-outputs"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import BeforeValidator, Field, model_validator

from vlmserve.errors import InvalidRequestError
from vlmserve.server.schema.base import ByType, RequestModel
from vlmserve.types import Grammar, GrammarKind


def _check_schema(value: Any) -> Any:
    if not isinstance(value, dict | str | bool):
        raise ValueError("must be a JSON schema")
    return value


Schema = Annotated[Any, BeforeValidator(_check_schema)]
Choices = Annotated[list[str], Field(min_length=1)]


class TextFormat(RequestModel):
    type: Literal["text"]


class ObjectFormat(RequestModel):
    """Any JSON object, or one that matches a schema (the form of llama.cpp, Together and Fireworks)."""

    type: Literal["json_object"]
    schema_: Annotated[Schema | None, Field(alias="schema")] = None


class NamedSchema(RequestModel):
    """A JSON schema. name and description have no effect. strict: reject unsupported keywords, do not ignore them."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool = False


class SchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    @model_validator(mode="before")
    @classmethod
    def _take_flat_form(cls, value: Any) -> Any:
        """Nest a schema that is next to the type, the form of llama.cpp and Together."""
        if isinstance(value, dict) and "json_schema" not in value and "schema" in value:
            return {"type": value.get("type"), "json_schema": {k: v for k, v in value.items() if k != "type"}}
        return value


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, ByType()]


class StructuredOutputs(RequestModel):
    """A format of answers, in vLLM's form."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"structural_tag": ()}

    json_: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool = False
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class FlatSchemaFormat(NamedSchema):
    """A schema in the form of the Responses API."""

    type: Literal["json_schema"]

    @model_validator(mode="after")
    def _has_a_schema(self) -> Self:
        if self.schema_ is None:
            raise ValueError("schema is missing")
        return self


class MessagesFormat(RequestModel):
    """A schema in Anthropic's form. Unsupported keywords are always rejected."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]

    @property
    def grammar(self) -> Grammar:
        """The answer's format."""
        return _grammar("json_schema", self.schema_, "output_config.format.schema")


OutputFormat = Annotated[TextFormat | ObjectFormat | FlatSchemaFormat, ByType()]


def output_grammar(output: TextFormat | ObjectFormat | FlatSchemaFormat | None) -> Grammar | None:
    if isinstance(output, ObjectFormat):
        return _object_grammar(output, "text.format")
    if isinstance(output, FlatSchemaFormat):
        return _grammar("json_schema", output.schema_, "text.format.schema", output.strict)
    return None


def either_grammar(own: Grammar | None, other: Grammar | None) -> Grammar | None:
    """Return either of two grammars. Raises InvalidRequestError if there are both."""
    if own is not None and other is not None:
        raise InvalidRequestError(
            f"an answer cannot obey both {own.source} and {other.source}; leave one out", param=other.source
        )
    return own or other


def wanted_grammar(
    response_format: TextFormat | ObjectFormat | SchemaFormat | None,
    structured: StructuredOutputs | None,
    guided: Mapping[str, Any],
) -> Grammar | None:
    """guided: vLLM's older fields by kind.

    Raises InvalidRequestError for more than one grammar.
    """
    found: list[Grammar] = []
    if isinstance(response_format, ObjectFormat):
        found.append(_object_grammar(response_format, "response_format"))
    elif isinstance(response_format, SchemaFormat):
        wanted = response_format.json_schema
        source = "response_format.json_schema.schema"
        if wanted.schema_ is None:
            found.append(Grammar("json_object", source=source))
        else:
            found.append(_grammar("json_schema", wanted.schema_, source, wanted.strict))
    if structured is None and not found and not any(value is not None for value in guided.values()):
        return None
    fields = {f"guided_{name}": value for name, value in guided.items()}
    if structured is not None:
        if structured.json_object:
            found.append(Grammar("json_object", source="structured_outputs.json_object"))
        fields |= {
            "structured_outputs.json": structured.json_,
            "structured_outputs.regex": structured.regex,
            "structured_outputs.choice": structured.choice,
            "structured_outputs.grammar": structured.grammar,
        }
    kinds: dict[str, GrammarKind] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
    for field, value in fields.items():
        if value is not None:
            found.append(_grammar(kinds[field.replace(".", "_").rpartition("_")[2]], value, field))
    if structured is not None and not any(one.source.startswith("structured_outputs") for one in found):
        raise InvalidRequestError(
            "structured_outputs must have one of json, json_object, regex, choice and grammar",
            param="structured_outputs",
        )
    return functools.reduce(either_grammar, found, None)


def _object_grammar(wanted: ObjectFormat, source: str) -> Grammar:
    if wanted.schema_ is None:
        return Grammar("json_object", source=source)
    return _grammar("json_schema", wanted.schema_, f"{source}.schema", strict=False)


def _grammar(kind: GrammarKind, value: Any, source: str, strict: bool = True) -> Grammar:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return Grammar(kind, text, strict, source)

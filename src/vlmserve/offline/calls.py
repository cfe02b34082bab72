"""Turns callers' arguments into prompts, and answers with a schema into objects."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar, cast

import msgspec

from vlmserve.errors import AnswerError, InvalidRequestError, InvalidRequestsError, VLMServeError
from vlmserve.media.arrays import frames_of
from vlmserve.offline.inputs import (
    Conversation,
    Conversations,
    TextPrompt,
    TextPrompts,
    are_token_ids,
    has_roles,
    is_conversation,
    is_prompt,
    sides_of,
)
from vlmserve.offline.outputs import PoolingRequestOutput, RequestOutput, ScoringOutput, ScoringRequestOutput
from vlmserve.offline.requests import LoRARequest, Prepared
from vlmserve.sampling_params import Grammar
from vlmserve.tasks import Prefill, Task
from vlmserve.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from vlmserve.frontend.deciding import Question
    from vlmserve.frontend.requests import RequestPreparer
    from vlmserve.frontend.scoring import Side

Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Adapters: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None
OnError: TypeAlias = Literal["raise", "return"]
Outcome: TypeAlias = RequestOutput | PoolingRequestOutput | InvalidRequestError
Embeddable: TypeAlias = TextPrompt | Conversation
"""Inputs of `embed`."""


class ChatOptions(TypedDict, total=False):
    """Options that `OfflineModel.chat` documents."""

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None
    cache_salt: str | None
    mm_processor_kwargs: Mapping[str, Any] | None
    lora_request: Adapters


class ParsedModel(Protocol):
    @classmethod
    def model_validate_json(cls, json_data: str) -> Any: ...


Model = TypeVar("Model", bound=ParsedModel)


@dataclass(frozen=True)
class Call:
    kind: str
    """The word for its items in error messages."""
    items: Iterable[Any]
    is_one: bool
    """The caller gave one item instead of a list."""
    prepare: Callable[[Any], Prepared]
    """Makes an item's prompt."""
    check: Callable[[Any], None]
    """Checks an item without preparing it."""
    check_grammar: Callable[[Grammar], object]
    sampling_params: Params
    on_error: OnError
    lora_request: Adapters
    schema: Any = None
    """A JSON schema or pydantic model, if results are objects."""
    convert: Callable[[Any], list[Any]] | None = None
    """Turns an item's outcome into the caller's results, possibly none."""
    before: Call | None = None
    """A call to compute first, so that the items find it cached."""
    is_prepared: bool = False
    """Items already hold their prompts, so no thread prepares them."""

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "return"):
            raise InvalidRequestError(f"on_error must be raise or return, got {self.on_error!r}", param="on_error")

    def prepare_for(self, adapter: str, item: Any, params: SamplingParams) -> Prepared:
        if params.grammar is not None:
            self.check_grammar(params.grammar)
        return self.prepare(item)._replace(adapter=adapter)

    def params_of(self, default: SamplingParams) -> Iterable[SamplingParams]:
        """Parameters of each item. Raises InvalidRequestError if the numbers differ."""
        params = default if self.sampling_params is None else self.sampling_params
        if isinstance(params, SamplingParams):
            return repeat(self._with_schema(params))
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams or a list of them, got {params!r:.200}",
                param="sampling_params",
            )
        if not isinstance(self.items, Sequence):
            raise InvalidRequestError(
                "inputs from an iterator take one SamplingParams for all", param="sampling_params"
            )
        if len(params) != len(self.items):
            raise InvalidRequestError(
                f"there are {len(self.items)} {self.kind} and {len(params)} sampling parameters",
                param="sampling_params",
            )
        return [self._with_schema(one) for one in params]

    def adapters(self) -> Sequence[LoRARequest | None] | None:
        """Adapters of each item; None if all share one. Raises like `params_of`."""
        wanted = self.lora_request
        if wanted is None or isinstance(wanted, LoRARequest):
            return None
        if not isinstance(self.items, Sequence) or len(self.items) != len(wanted):
            raise InvalidRequestError("give one lora_request for all, or one or None for each", param="lora_request")
        return wanted

    def _with_schema(self, params: SamplingParams) -> SamplingParams:
        if self.schema is None:
            return params
        if params.grammar is not None:
            raise InvalidRequestError("give either schema or SamplingParams(grammar=...)", param="schema")
        if params.n > 1:
            raise InvalidRequestError("with a schema each result is one object; leave n out", param="n")
        return msgspec.structs.replace(params, grammar=Grammar.json(self.schema))

    def results_of(self, outcome: Outcome, number: int) -> list[Any]:
        return [self._result_of(outcome, number)] if self.convert is None else self.convert(outcome)

    def _result_of(self, outcome: Outcome, number: int) -> Any:
        if self.schema is None or not isinstance(outcome, RequestOutput):
            return outcome
        try:
            return object_in(outcome, self.schema)
        except AnswerError as error:
            if not self.is_one:
                error.args = (f"{self.kind}[{number}]: {error}",)
            if self.on_error == "raise":
                raise
            return error

    def check_all(self) -> None:
        """Check without preparing, unless items come from an iterator or errors are returned."""
        if self.on_error != "raise" or not isinstance(self.items, Sequence):
            return
        errors: list[InvalidRequestError] = []
        for number, item in enumerate(self.items):
            try:
                self.check(item)
            except InvalidRequestError as error:
                self.name(error, number)
                errors.append(error)
        if errors:
            raise errors[0] if len(errors) == 1 else InvalidRequestsError(errors)

    def name(self, error: Exception, number: int) -> None:
        place = None if self.is_one else f"{self.kind}[{number}]"
        if isinstance(error, InvalidRequestError):
            error.locate(place)
        elif place is not None:
            error.add_note(f"This is about {place}.")


def object_in(output: RequestOutput, schema: Any) -> Any:
    [answer] = output.outputs
    if answer.finish_reason == "error":
        raise AnswerError(answer.error or "the request failed", output)
    if answer.finish_reason == "length":
        raise AnswerError("the answer was cut off at its limit of tokens; raise max_tokens", output)
    try:
        if hasattr(schema, "model_validate_json"):
            return schema.model_validate_json(answer.text)
        return json.loads(answer.text)
    except ValueError as error:  # a stop string cut it, or a validator rejects it
        raise AnswerError(f"the answer does not match the schema: {error}", output) from error


class Prompts:
    def __init__(self, preparer: RequestPreparer) -> None:
        self.preparer = preparer

    def chat_call(
        self,
        messages: Conversations,
        sampling_params: Params,
        on_error: OnError = "raise",
        schema: Any = None,
        lora_request: Adapters = None,
        cache_salt: str | None = None,
        **options: Any,
    ) -> Call:
        """options: of `RequestPreparer.chat`. Raises InvalidRequestError."""
        from vlmserve.frontend.messages import check_conversations, with_kwargs

        check_conversations(messages)
        if not isinstance(options["template_settings"], Mapping | None):
            raise InvalidRequestError("chat_template_kwargs must be a dict", param="chat_template_kwargs")
        salt = _checked(cache_salt)
        with_kwargs((), options["mm_processor_kwargs"])
        given = [sampling_params] if isinstance(sampling_params, SamplingParams) else sampling_params or ()
        if options["continue_final_message"] and (schema is not None or any(one.grammar is not None for one in given)):
            raise InvalidRequestError(
                "continue_final_message cannot be combined with the format of a whole answer", param="schema"
            )
        preparer, is_one = self.preparer, is_conversation(messages)

        def prepare(conversation: Any) -> Prepared:
            return Prepared(preparer.chat(conversation, allow_local=True, cache_salt=salt, **options), salt)

        return Call(
            "conversations",
            [messages] if is_one else messages,
            is_one,
            prepare,
            preparer.check_files,
            preparer.answers.check_grammar,
            sampling_params,
            on_error,
            lora_request,
            schema,
        )

    def text_call(
        self, prompts: TextPrompts, sampling_params: Params, on_error: OnError, lora_request: Adapters
    ) -> Call:
        is_one = is_prompt(prompts)
        return Call(
            "prompts",
            [prompts] if is_one else prompts,
            is_one,
            self._text_prompt,
            self._check_prompt,
            self.preparer.answers.check_grammar,
            sampling_params,
            on_error,
            lora_request,
        )

    def embed_call(
        self,
        prompts: Embeddable | Iterable[Embeddable],
        dimensions: int | None,
        truncate_prompt_tokens: int | None,
        on_error: OnError,
        lora_request: Adapters,
        cache_salt: str | None,
        add_generation_prompt: bool | None,
        **options: Any,
    ) -> Call:
        vectors, salt = self.preparer.vectors, _checked(cache_salt)
        task = vectors.embed(dimensions)
        begins = vectors.begins_answers if add_generation_prompt is None else add_generation_prompt
        options["add_generation_prompt"] = begins and not options["continue_final_message"]
        is_one = is_prompt(prompts) or has_roles(prompts)

        def prepare(item: Any) -> Prepared:
            if isinstance(item, str):
                return self._embedded(item, salt, task)
            if not has_roles(item):
                return self._text_prompt(item, salt)._replace(task=task)
            return Prepared(self.preparer.chat(item, allow_local=True, cache_salt=salt, **options), salt, task=task)

        def check(item: Any) -> None:
            (self.preparer.check_files if has_roles(item) else self._check_prompt)(item)

        return Call(
            "prompts",
            [prompts] if is_one else cast("Iterable[Embeddable]", prompts),
            is_one,
            prepare,
            check,
            self.preparer.answers.check_grammar,
            SamplingParams(truncate_prompt_tokens=truncate_prompt_tokens),
            on_error,
            lora_request,
        )

    def score_call(
        self,
        queries: Side | Mapping[str, Any] | Sequence[Any],
        documents: Side | Mapping[str, Any] | Sequence[Any],
        instruction: str | None,
        truncate_prompt_tokens: int | None,
        lora_request: Adapters,
        cache_salt: str | None,
        **options: Any,
    ) -> Call:
        from vlmserve.frontend.scoring import make_scorer, shortened

        scorer, preparer, salt = make_scorer(self.preparer), self.preparer, _checked(cache_salt)
        first, second = sides_of(queries), sides_of(documents)
        second = [*shortened(scorer, preparer, first, second, instruction, truncate_prompt_tokens)]

        def prepare(item: Any) -> Prepared:
            if isinstance(item, Prompt):
                return Prepared(item, salt, task=scorer.task)
            if isinstance(item, str):
                return self._embedded(item, salt, scorer.task)
            prompt = preparer.chat(item, allow_local=True, cache_salt=salt, **scorer.chat_options, **options)
            return Prepared(prompt, salt, task=scorer.task)

        take = scorer.tally(len(first))

        def convert(outcome: Any) -> list[Any]:
            return [ScoringRequestOutput(ScoringOutput(score)) for score in take(_value(outcome))]

        return Call(
            "prompts",
            scorer.prompts(first, second, instruction),
            False,
            prepare,
            lambda item: None if isinstance(item, str | Prompt) else preparer.check_files(item),
            preparer.answers.check_grammar,
            SamplingParams(truncate_prompt_tokens=truncate_prompt_tokens if scorer.compares else None),
            "raise",
            lora_request,
            convert=convert,
        )

    def decide_call(
        self,
        messages: Conversation,
        questions: Sequence[Question],
        temperature: float | None,
        lora_request: Adapters,
        cache_salt: str | None,
        **options: Any,
    ) -> Call:
        from vlmserve.frontend.conversations import thinking_settings
        from vlmserve.frontend.deciding import Decider, probabilities, with_shared
        from vlmserve.frontend.requests import chats_of

        if not questions:
            raise InvalidRequestError("ask at least one question", param="questions")
        decider, preparer = Decider(self.preparer), self.preparer
        switches = thinking_settings(False, preparer.template_settings)
        options["template_settings"] = switches | dict(options["template_settings"] or {})
        asked = [one.after(messages) for one in questions]
        salt = _checked(cache_salt)
        shared, prompts = with_shared(chats_of(preparer, asked, allow_local=True, cache_salt=salt, **options))

        def convert(outcome: Any) -> list[Any]:
            return [probabilities(_value(outcome), temperature or decider.temperature)]

        def prepare(pair: tuple[Prompt, Question]) -> Prepared:
            prompt, question = pair
            return Prepared(prompt, salt, task=decider.task(question.answers))

        call = Call(
            "questions",
            [*zip(prompts, questions, strict=True)],
            False,
            prepare,
            lambda pair: None,
            preparer.answers.check_grammar,
            SamplingParams(),
            "raise",
            lora_request,
            convert=convert,
            is_prepared=True,
        )
        if shared is None:
            return call
        return replace(
            call,
            before=replace(
                call,
                items=[shared],
                prepare=lambda one: Prepared(one, salt, task=Prefill()),
                convert=lambda outcome: [_value(outcome)],
            ),
        )

    def _embedded(self, text: str, salt: str, task: Task) -> Prepared:
        from vlmserve.frontend.requests import embedded_text

        return Prepared(embedded_text(self.preparer, text), salt, text, task=task)

    def _text_prompt(self, prompt: TextPrompt, salt: str = "") -> Prepared:
        """salt: for prompts without a salt."""
        if isinstance(prompt, str):
            return Prepared(self.preparer.text(prompt), salt, prompt)
        if are_token_ids(prompt):
            return Prepared(Prompt(list(prompt)), salt)
        images, videos = self._media_of(prompt)
        assert isinstance(prompt, Mapping)
        salt = _checked(prompt.get("cache_salt")) or salt
        if "prompt" in prompt:
            text = self.preparer.text(
                prompt["prompt"],
                images,
                videos,
                allow_local=True,
                cache_salt=salt,
                mm_processor_kwargs=prompt.get("mm_processor_kwargs"),
            )
            return Prepared(text, salt, prompt["prompt"])
        if images or videos:
            raise InvalidRequestError('images and videos need a text "prompt", not token ids', param="prompt")
        if not are_token_ids(prompt["prompt_token_ids"]):
            raise InvalidRequestError("prompt_token_ids must be a list of token ids", param="prompt")
        return Prepared(Prompt(list(prompt["prompt_token_ids"])), salt)

    def _media_of(self, prompt: object) -> tuple[list[Any], list[Any]]:
        if not isinstance(prompt, Mapping):
            raise InvalidRequestError(
                f"a prompt is a text, a dict or a list of token ids, not {type(prompt).__name__}", param="prompt"
            )
        unknown = set(prompt) - _PROMPT_KEYS
        if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise InvalidRequestError(
                'a prompt is a text or a dict with "prompt" or "prompt_token_ids", optionally "multi_modal_data", '
                f'"mm_processor_kwargs" and "cache_salt"; got {sorted(map(str, prompt))}',
                param="prompt",
            )
        data = prompt.get("multi_modal_data") or {}
        if not isinstance(data, Mapping) or set(data) - {"image", "video"}:
            known = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise InvalidRequestError(
                f'multi_modal_data must be a dict with "image" or "video", got {known}', param="prompt"
            )
        images, videos = data.get("image", []), data.get("video", [])
        videos = [frames_of(one) for one in videos] if isinstance(videos, list | tuple) else frames_of(videos)
        if isinstance(videos, list | tuple) and videos and not any(isinstance(one, _FILES) for one in videos):
            videos = [videos]  # the frames of one video
        return _listed(images), _listed(videos)

    def _check_prompt(self, prompt: TextPrompt) -> None:
        from vlmserve.frontend.media_preparer import check_sources

        if not isinstance(prompt, str) and not are_token_ids(prompt):
            images, videos = self._media_of(prompt)
            named = [(f"images[{index}]", image) for index, image in enumerate(images)]
            check_sources(named + [(f"videos[{index}]", video) for index, video in enumerate(videos)])


_PROMPT_KEYS = frozenset(
    ("prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs", "cache_salt", "multi_modal_uuids")
)
"""Keys of a prompt dict. vLLM's media uuids have no effect: vlmserve identifies media by content."""
_FILES = (str, bytes, os.PathLike, list, tuple)
"""Types that make a list a list of videos, not of frames: a file, or a list of frames."""


def _value(result: PoolingRequestOutput) -> Any:
    """Raises VLMServeError if it failed."""
    if result.outputs.error is not None:
        raise VLMServeError(result.outputs.error)
    return result.outputs.data


def _checked(cache_salt: str | None) -> str:
    from vlmserve.frontend.messages import check_cache_salt

    return check_cache_salt(cache_salt)


def _listed(one_or_many: Any) -> list[Any]:
    return list(one_or_many) if isinstance(one_or_many, list | tuple) else [one_or_many]

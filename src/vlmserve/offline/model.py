"""The calls that `LLM` and `AsyncLLM` share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from vlmserve.errors import InvalidRequestError, ModelLoadError
from vlmserve.offline.calls import Adapters, Call, Embeddable, OnError, Params, Prompts
from vlmserve.offline.inputs import Conversation, Conversations, TextPrompts
from vlmserve.offline.options import set_up
from vlmserve.offline.requests import LoRARequest
from vlmserve.settings.validation import did_you_mean
from vlmserve.types import SamplingParams

if TYPE_CHECKING:
    from vlmserve.frontend.deciding import Question

Texts = TypeVar("Texts")

_OF_VLLM = "encode classify reward beam_search apply_model collective_rpc sleep wake_up".split()
"""Methods of vLLM that are not implemented here."""


class OfflineModel(ABC, Generic[Texts]):
    """A model that answers callers in this process. `Texts` is the iterator that `stream` returns."""

    def __init__(self, model: str, options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self._setup = set_up(model, options, defaults)
        self.config, self.preparer = self._setup.engine, self._setup.preparer
        self.default_sampling_params = self._setup.params
        self._prompts = Prompts(self.preparer)

    @property
    def template_settings(self) -> frozenset[str]:
        """Names that `chat_template_kwargs` can set."""
        return self.preparer.template_settings

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if name in _OF_VLLM:
            raise AttributeError(f"{kind} has no {name}; use chat, generate, stream, embed or score")
        raise AttributeError(f"{kind} has no attribute {name!r}{did_you_mean(name, dir(type(self)))}")

    def get_default_sampling_params(self) -> SamplingParams:
        return self.default_sampling_params

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer from Transformers. Raises ModelLoadError if Transformers cannot load it."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._setup.folder, local_files_only=True)
        except Exception as error:  # Transformers raises anything
            message = f"transformers cannot load the tokenizer of {self.config.model}: {error}"
            raise ModelLoadError(message) from error

    def chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        stream: bool = False,
        on_error: OnError = "raise",
        schema: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        lora_request: Adapters = None,
        **others: Any,
    ) -> Any:
        """Answer one conversation (a list of messages) or many (a list of conversations). Results keep the order.

        Messages have OpenAI's form, with these additional content parts:

        - ``{"type": "image", "image": x}``: x is a `PIL.Image.Image`, a path, a file's bytes or a URL.
        - ``{"type": "video", "video": x}``: x is a file or a list of such images.
        - ``{"type": "document", "document": x, "pages": "1-3"}``: x is a file; each page becomes an image.

        Arguments:

        - sampling_params: one for all, or a list with one for each.
        - use_tqdm: show a progress bar (only `LLM`).
        - stream: return an iterator of results in order. It prepares as many ahead as `OfflineConfig` says.
          Conversations may be an iterator. Closing it aborts all.
        - on_error: "raise" answers nothing and raises all errors. "return" answers the valid conversations and returns
          an InvalidRequestError for each other one.
        - schema: a JSON schema (dict) or pydantic model. Results are parsed JSON or instances of the model; for an
          answer cut off by the token limit, an AnswerError, raised or returned as `on_error` says.
        - add_generation_prompt: end the prompt with the beginning of an answer.
        - continue_final_message: continue the assistant's last message.
        - chat_template_kwargs: variables of the chat template, such as ``enable_thinking``.
        - cache_salt: requests share caches only with requests of equal salt.
        - mm_processor_kwargs: budget of images, such as ``{"max_pixels": 500_000}``, and ``fps`` of videos.
        - lora_request: the adapter for all, or a list with an adapter or None for each; needs ``enable_lora=True``.

        Raises InvalidRequestError, naming place and file or URL, or InvalidRequestsError for several conversations. A
        request that fails while running has finish_reason "error"; others continue.
        """
        check_arguments(OfflineModel.chat, others)
        call = self._prompts.chat_call(
            messages,
            sampling_params,
            on_error,
            schema,
            lora_request,
            cache_salt,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_settings=chat_template_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self._answer(call, stream=stream, use_tqdm=use_tqdm)

    def generate(
        self,
        prompts: TextPrompts,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        stream: bool = False,
        on_error: OnError = "raise",
        lora_request: Adapters = None,
        **others: Any,
    ) -> Any:
        """Continue one prompt or many, without a chat template. Results keep the order.

        A prompt is one of:

        - text
        - ``{"prompt": text, "multi_modal_data": {"image": image or list of images, "video": …}}``; the text contains
          the model's image or video token for each
        - a list of token ids, or ``{"prompt_token_ids": [...]}``

        Dicts may have "cache_salt" and "mm_processor_kwargs". A video is a file or a list of frames: a list of
        `PIL.Image.Image` or arrays is one video, any other list is several. Other arguments: as in `chat`.
        """
        check_arguments(OfflineModel.generate, others)
        call = self._prompts.text_call(prompts, sampling_params, on_error, lora_request)
        return self._answer(call, stream=stream, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Embeddable | Iterable[Embeddable],
        use_tqdm: bool = True,
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        stream: bool = False,
        on_error: OnError = "raise",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        lora_request: Adapters = None,
        cache_salt: str | None = None,
        **others: Any,
    ) -> Any:
        """Return the embedding of one prompt or of many, as `PoolingRequestOutput`. Results keep the order.

        A prompt is a prompt of `generate` or a conversation of `chat`. The checkpoint's ``modules.json``, or the option
        ``pooling``, says how hidden states become an embedding.

        - dimensions: leading elements to keep, before normalization.
        - truncate_prompt_tokens: last prompt tokens to keep.
        - add_generation_prompt: None means as the checkpoint says, else True.

        Other arguments: as in `chat`.
        """
        check_arguments(OfflineModel.embed, others)
        call = self._prompts.embed_call(
            prompts,
            dimensions,
            truncate_prompt_tokens,
            on_error,
            lora_request,
            cache_salt,
            add_generation_prompt,
            continue_final_message=continue_final_message,
            template_settings=chat_template_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self._answer(call, stream=stream, use_tqdm=use_tqdm)

    def score(
        self,
        queries: Any,
        documents: Any,
        use_tqdm: bool = True,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        lora_request: Adapters = None,
        cache_salt: str | None = None,
        **others: Any,
    ) -> Any:
        """Return how well documents fit a query, as `ScoringRequestOutput` in the order of the documents.

        - queries: one, or one for each document. Queries and documents are texts, lists of message parts, or
          ``{"content": parts}``.
        - instruction: the task of a model that judges pairs (default: web search).
        - truncate_prompt_tokens: maximum tokens of a prompt; a pair loses the end of its document.

        An embedding model compares vectors (cosine), a classifier reads pairs, other models judge each pair: the score
        is the probability of "yes". Other arguments: as in `chat`.

        Raises InvalidRequestError for a model that cannot score, and VLMServeError if a request fails.
        """
        check_arguments(OfflineModel.score, others)
        call = self._prompts.score_call(
            queries,
            documents,
            instruction,
            truncate_prompt_tokens,
            lora_request,
            cache_salt,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self._answer(call, stream=False, use_tqdm=use_tqdm)

    def decide(
        self,
        messages: Conversation,
        questions: Sequence[Question],
        use_tqdm: bool = True,
        *,
        temperature: float | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        lora_request: Adapters = None,
        cache_salt: str | None = None,
    ) -> Any:
        """Return the probabilities of the answers to questions about one conversation: a list for each question.

        questions: from `vlmserve.frontend.deciding`. temperature: replaces the checkpoint's, see ``vlmserve eval
        calibration``. Other arguments: as in `chat`. Raises as `score` does.
        """
        call = self._prompts.decide_call(
            messages,
            questions,
            temperature,
            lora_request,
            cache_salt,
            template_settings=chat_template_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self._answer(call, stream=False, use_tqdm=use_tqdm)

    def stream(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
        on_thought: Callable[[str], None] | None = None,
    ) -> Texts:
        """Return an iterator over the text of one answer while it is generated. Closing it aborts the request.

        on_thought: called with the text of the reasoning. Other arguments: as in `chat`.
        Raises as `chat` does, and VLMServeError from the iterator if the running request fails.
        """
        params = sampling_params or self.default_sampling_params
        if params.num_samples > 1:
            raise InvalidRequestError("a stream has one answer; leave n and best_of out", param="n")
        call = self._prompts.chat_call(
            messages,
            params,
            lora_request=lora_request,
            cache_salt=cache_salt,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_settings=chat_template_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self._texts(call, messages, params, on_thought or _ignore)

    @abstractmethod
    def _answer(self, call: Call, *, stream: bool, use_tqdm: bool) -> Any: ...

    @abstractmethod
    def _texts(
        self, call: Call, messages: Conversation, params: SamplingParams, on_thought: Callable[[str], None]
    ) -> Texts: ...


def _ignore(thought: str) -> None:
    pass


def check_arguments(method: Callable[..., Any], others: Mapping[str, Any]) -> None:
    """Raise TypeError with a suggestion for unknown arguments. Arguments that are None pass."""
    known = [name for name in signature(method).parameters if name not in ("self", "others")]
    for name, value in others.items():
        if value is not None and name not in _HARMLESS:
            instead = _INSTEAD.get(name) or did_you_mean(name, known)
            raise TypeError(f"{method.__name__}() has no argument {name}{instead}")


_HARMLESS = ("use_tqdm", "priority", "chat_template_content_format")
"""Arguments of other methods or libraries that change no answer."""
_INSTEAD: Mapping[str, str] = {
    "chat_template": "; give chat_template to LLM",
    "prompt_token_ids": '; give the prompt as {"prompt_token_ids": [...]}',
    "multi_modal_data": '; give the prompt as {"prompt": text, "multi_modal_data": {...}}',
    "images": '; give the prompt as {"prompt": text, "multi_modal_data": {"image": images}}',
    "tools": "; serve the model to call tools",
}
"""Advice for arguments of other libraries and older versions of vLLM."""

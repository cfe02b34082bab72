"""The calls of `LLM` and `AsyncLLM`: each is declared here, once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from vlmserve.errors import InvalidRequestError, ModelLoadError
from vlmserve.offline.arguments import check_arguments
from vlmserve.offline.calls import (
    Adapters,
    Call,
    Embeddable,
    OnError,
    Params,
    Prompts,
)
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
    """A model that answers callers in this process.

    `default_sampling_params` is what calls without sampling parameters use: the checkpoint's own. `Texts` is the
    iterator that `stream` returns.
    """

    def __init__(self, model: str, options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        """defaults: options that differ from the settings' own defaults."""
        self._setup = set_up(model, options, defaults)
        self.config, self.preparer = self._setup.engine, self._setup.preparer
        self.default_sampling_params = self._setup.params
        self._prompts = Prompts(self.preparer)

    @property
    def template_settings(self) -> frozenset[str]:
        """Names of what `chat_template_kwargs` can set."""
        return self.preparer.template_settings

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if name in _OF_VLLM:
            raise AttributeError(f"{kind} has no {name}; use chat, generate, stream, embed or score")
        raise AttributeError(f"{kind} has no attribute {name!r}{did_you_mean(name, dir(type(self)))}")

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's own parameters, which calls without any use."""
        return self.default_sampling_params

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer as transformers loads it. Raises ModelLoadError if transformers cannot."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._setup.folder, local_files_only=True)
        except Exception as error:  # transformers raises anything
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
        """Answer one conversation (a list of messages) or many (a list of lists); results are in the same order.

        Messages have OpenAI's form; an image is a part ``{"type": "image", "image": x}`` where x is a
        `PIL.Image.Image`, a path, a file's bytes or a URL, or a part ``{"type": "image_url", …}``. A video is a part
        ``{"type": "video", "video": x}`` where x is a file or a list of such images, or ``{"type": "video_url", …}``. A
        document is a part ``{"type": "document", "document": x, "pages": "1-3"}`` where x is a path, a file's bytes or
        a URL, and each of its pages is an image.
        sampling_params: one for all, or one each. use_tqdm: whether `LLM` shows a progress bar.
        stream: return an iterator instead of a list. It gives results in order, each as soon as it and all before it
        have finished, and only prepares as many ahead as `OfflineConfig` says; conversations may come from an iterator
        as well. Closing it ends all requests.
        on_error: "raise" ends the call with what is wrong in all conversations and answers none; "return" answers the
        others, and has an InvalidRequestError in the place of a result.
        schema: a JSON schema (dict) or a pydantic model that answers fit. Results are then parsed JSON or instances of
        the model. An answer that the limit of tokens cut off cannot be parsed: it is an AnswerError, which is raised,
        or takes the place of a result. `SamplingParams(grammar=Grammar.json(schema))` returns
        `RequestOutput` with the same objects in `parsed`.
        add_generation_prompt: whether the prompt ends with the beginning of an answer (True). continue_final_message:
        whether the answer continues the last message, which is text of the assistant (False). chat_template_kwargs:
        values for the model's chat template by name, such as ``enable_thinking``. cache_salt: only requests with the
        same salt share what is cached. mm_processor_kwargs: the budget of images that have none of their own, such as
        ``{"max_pixels": 500_000, "max_tokens": 512}``, and the ``fps`` of videos. lora_request: the adapter that
        answers, one for all, or one or None each. With ``enable_lora=True`` it is loaded at its first use.

        Raises InvalidRequestError for a conversation that cannot be answered, naming its place and its file or URL, and
        InvalidRequestsError for several. A request that fails while it runs ends with finish_reason "error"; the others
        go on.
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
        """Continue one prompt or many, without a chat template; results are in the same order.

        A prompt is text, ``{"prompt": text, "multi_modal_data": {"image": image or list of images, "video": …}}`` with
        the model's image or video token in the text for each, a list of token ids, or ``{"prompt_token_ids": [...]}``;
        the dicts may have a "cache_salt" and "mm_processor_kwargs". A video is a file or a list of frames; a list of
        `PIL.Image.Image` or arrays is one video, any other list several. For the rest see `chat`.
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
        """Return the vector of one prompt or of many, as `PoolingRequestOutput`; results are in the same order.

        A prompt is what `generate` takes, or a conversation, which shows images, videos and documents as in `chat`.
        Nothing is generated. The checkpoint's ``modules.json``, or the option ``pooling``, says how hidden states
        become a vector. dimensions: keep that many leading elements, before normalization. truncate_prompt_tokens:
        keep that many of a prompt's last tokens. add_generation_prompt: None means what the checkpoint says, else True.
        For the rest see `chat`.
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

        queries: one, or one for each document. Each query and document is a text, a list of parts as in a message, or
        ``{"content": parts}``. An embedding model compares vectors (cosine), a classifier reads pairs, others judge
        each pair: the score is the probability of "yes". instruction: what they judge; default: web search.
        truncate_prompt_tokens: tokens of a prompt; of a pair, the end of the document is left out. For the rest see
        `chat`.

        Raises InvalidRequestError for a model that has no way to judge, and VLMServeError if a request fails.
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

        questions: of `vlmserve.frontend.deciding`. temperature: instead of the checkpoint's, see ``vlmserve eval
        calibration``. For the rest see `chat`. Raises as `score` does.
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
        """Return an iterator that yields the text of one answer during generation. Closing it ends the request.

        on_thought: gets the text of what the model thinks before it answers, as it is generated. For the rest see
        `chat`. Raises as `chat` does, and VLMServeError if the request fails while it runs, when the iterator advances.
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
    def _answer(self, call: Call, *, stream: bool, use_tqdm: bool) -> Any:
        """Return the results of `chat` or `generate`."""

    @abstractmethod
    def _texts(
        self, call: Call, messages: Conversation, params: SamplingParams, on_thought: Callable[[str], None]
    ) -> Texts:
        """Return the iterator of `stream`."""


def _ignore(thought: str) -> None:
    pass

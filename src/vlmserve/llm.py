"""Offline use: the engine in your own process, lists in, lists out.

from vlmserve import LLM, SamplingParams

llm = LLM("pixie")
[result] = llm.generate({"prompt": "...", "multi_modal_data": {"image": "photo.png"}})
print(result.text)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, cast, overload

from vlmserve.config import BUILT_IN_MODEL
from vlmserve.errors import InvalidRequestError, ModelLoadError, VLMServeError
from vlmserve.offline import LoRARequest
from vlmserve.offline_batch import OfflineBatch
from vlmserve.offline_calls import (
    Adapters,
    Call,
    ChatOptions,
    Conversation,
    OnError,
    Outcome,
    Params,
    ParsedModel,
    Prompts,
    TextPrompt,
    adapters_of,
    check_arguments,
    is_conversation,
    is_prompt,
)
from vlmserve.offline_engine import SharedEngine
from vlmserve.offline_options import LLMOptions, set_up
from vlmserve.outputs import RequestOutput
from vlmserve.types import SamplingParams
from vlmserve.validation import did_you_mean

if TYPE_CHECKING:
    from vlmserve.engine.protocol import VLMEngine

Model = TypeVar("Model", bound=ParsedModel)

_OF_VLLM = "encode embed classify score reward beam_search apply_model collective_rpc sleep wake_up".split()
"""Methods of vLLM's that there are none of here."""


class LLM:
    """A model that answers in this process.

    model: short name, local folder or .gguf file, or Hugging Face repository id. Further options are the fields of
    `EngineConfig`, `MediaConfig` and `OfflineConfig` (``dtype="float32"``, ``kv_cache_memory="2GiB"``,
    ``max_images=4``, ``prepare_ahead=64``…). `default_sampling_params` is what calls without sampling parameters use:
    the checkpoint's own.

    Several threads may use one LLM: the engine batches their requests. A process that is forked from one with a loaded
    LLM needs an LLM of its own; calls raise ForkError there. `close` gives back the memory, and so does deleting the
    last reference.

    Raises ConfigurationError for an unknown or impossible option, ModelLoadError for a checkpoint that cannot be
    served.
    """

    def __init__(self, model: str = BUILT_IN_MODEL, **options: Unpack[LLMOptions]) -> None:
        # Callers wait for whole answers: with images first, requests generate together.
        setup = set_up(model, options, {"encoder_step_share": math.inf, "step_seconds": math.inf})
        self.config, self._preparer = setup.engine, setup.preparer
        self.default_sampling_params = setup.params
        self._setup = setup
        self._prompts = Prompts(setup.preparer)
        self._engine = SharedEngine(setup.engine, setup.folder, setup.preparer)
        if self.config.load == "eager":
            self.load()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def template_settings(self) -> frozenset[str]:
        """Names of what `chat_template_kwargs` can set."""
        return self._preparer.template_settings

    def __getattr__(self, name: str) -> Any:
        if name in _OF_VLLM:
            raise AttributeError(f"LLM has no {name}: models generate text here; use chat, generate or stream")
        raise AttributeError(f"LLM has no attribute {name!r}{did_you_mean(name, dir(type(self)))}")

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

    def load(self) -> None:
        """Load the model now if it is not loaded. Raises ModelLoadError and ConfigurationError."""
        assert self.engine is not None

    def close(self) -> None:
        """Give back the model's memory. Requests that are not finished, and later calls, raise UnavailableError."""
        self._engine.close()

    @property
    def engine(self) -> VLMEngine:
        """The engine with its model. With ``load="lazy"`` its first use loads it, and raises what that raises.

        Use it from one thread, while no other call of this LLM runs.
        """
        return self._engine.engine

    @overload
    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        stream: Literal[False] = False,
        on_error: Literal["raise"] = "raise",
        schema: None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        stream: Literal[True],
        on_error: Literal["raise"] = "raise",
        schema: None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        stream: bool = False,
        on_error: OnError,
        schema: None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterable[Outcome]: ...

    @overload
    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        stream: Literal[False] = False,
        on_error: Literal["raise"] = "raise",
        schema: type[Model],
        **options: Unpack[ChatOptions],
    ) -> list[Model]: ...

    @overload
    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        stream: Literal[True],
        on_error: Literal["raise"] = "raise",
        schema: type[Model],
        **options: Unpack[ChatOptions],
    ) -> Iterator[Model]: ...

    @overload
    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        stream: bool = False,
        on_error: OnError = "raise",
        schema: Any,
        **options: Unpack[ChatOptions],
    ) -> Iterable[Any]: ...

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
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
        sampling_params: one for all, or one each. use_tqdm: whether to show a progress bar.
        stream: return an iterator instead of a list. It gives results in order, each as soon as it and all before it
        have finished, and only prepares as many ahead as `OfflineConfig` says; conversations may come from an iterator
        as well. Closing it ends all requests.
        on_error: "raise" ends the call with what is wrong in all conversations and answers none; "return" answers the
        others, and has an InvalidRequestError in the place of a result.
        schema: a JSON schema (dict) or a pydantic model that answers fit. Results are objects then: what the JSON says,
        or instances of the model. An answer that is none, because its limit of tokens cut it off, is an AnswerError,
        which is raised, or is in the place of a result. `SamplingParams(grammar=Grammar.json(schema))` returns
        `RequestOutput` with the same objects in `parsed`.
        add_generation_prompt: whether the prompt ends with the beginning of an answer (True). continue_final_message:
        whether the answer continues the last message, which is text of the assistant (False). chat_template_kwargs:
        values that the model's chat template may know by name, such as ``enable_thinking``. cache_salt: nothing that is
        cached is shared with requests of another salt, or of none. mm_processor_kwargs: the budget of all images that
        say nothing themselves, such as ``{"max_pixels": 500_000, "max_tokens": 512}``, and the ``fps`` of videos.
        lora_request: the adapter that answers, one for all,
        or one or None each; an LLM with ``enable_lora=True`` loads it if it is not served yet.

        Raises InvalidRequestError for a conversation that cannot be answered, naming its place and its file or URL, and
        InvalidRequestsError for several. A request that fails while it runs ends with finish_reason "error"; the others
        go on.
        """
        from vlmserve.frontend.messages import check_conversations

        check_arguments(LLM.chat, others)
        check_conversations(messages)
        call = self._prompts.chat_call(
            sampling_params,
            on_error,
            schema=schema,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            cache_salt=cache_salt,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        adapters = partial(self._adapters_of, lora_request)
        if is_conversation(messages):
            return self._answer(call, adapters, [messages], stream=stream, use_tqdm=use_tqdm, is_one=True)
        return self._answer(call, adapters, messages, stream=stream, use_tqdm=use_tqdm)

    @overload
    def generate(
        self,
        prompts: TextPrompt | Iterable[TextPrompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        stream: Literal[False] = False,
        on_error: Literal["raise"] = "raise",
        lora_request: Adapters = None,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: TextPrompt | Iterable[TextPrompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        stream: Literal[True],
        on_error: Literal["raise"] = "raise",
        lora_request: Adapters = None,
    ) -> Iterator[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: TextPrompt | Iterable[TextPrompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        stream: bool = False,
        on_error: OnError,
        lora_request: Adapters = None,
    ) -> Iterable[Outcome]: ...

    def generate(
        self,
        prompts: TextPrompt | Iterable[TextPrompt],
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
        check_arguments(LLM.generate, others)
        call = self._prompts.text_call(sampling_params, on_error)
        adapters = partial(self._adapters_of, lora_request)
        if is_prompt(prompts):
            return self._answer(call, adapters, [prompts], stream=stream, use_tqdm=use_tqdm, is_one=True)
        return self._answer(call, adapters, prompts, stream=stream, use_tqdm=use_tqdm)

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
    ) -> Iterator[str]:
        """Yield the text of the answer to one conversation as it is generated. Closing the iterator ends the request.

        add_generation_prompt, continue_final_message, chat_template_kwargs, cache_salt, mm_processor_kwargs,
        lora_request: as in `chat`.
        on_thought: gets the text of what the model thinks before it answers, as it is generated. Raises as `chat` does,
        and VLMServeError if the request fails while it runs, when the iterator is advanced.
        """
        params = sampling_params or self.default_sampling_params
        if params.num_samples > 1:
            raise InvalidRequestError("a stream has one answer; leave n and best_of out", param="n")
        call = self._prompts.chat_call(
            params,
            "raise",
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            cache_salt=cache_salt,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        adapter = "" if lora_request is None else self._engine.load_adapter(lora_request)
        try:
            prepared = call.prepare_for(adapter, messages, params)
        except InvalidRequestError as error:
            error.locate()
            raise
        request = self._engine.add(prepared, params)
        [generation] = request.generations
        try:
            sent = 0
            while generation.finish_reason is None or sent < len(generation.said):
                if sent == len(generation.said):
                    self._engine.step()
                    continue
                said = generation.said[sent]
                sent += 1
                if said.thought and on_thought is not None:
                    on_thought(said.thought)
                if said.text:
                    yield said.text
            if generation.error is not None:
                raise VLMServeError(generation.error)
        finally:
            self._engine.forget([request])

    def _adapters_of(self, wanted: Adapters, items: Iterable[Any]) -> Iterable[str]:
        """The names of the adapters that answer each of the items, all of them served.

        Raises InvalidRequestError unless there are as many, AdapterError for one that cannot be loaded.
        """
        several = adapters_of(wanted, items)
        if several is not None:
            return ["" if one is None else self._engine.load_adapter(one) for one in several]
        return repeat("" if wanted is None else self._engine.load_adapter(cast(LoRARequest, wanted)))

    def _answer(
        self,
        call: Call,
        adapters: Callable[[Iterable[Any]], Iterable[str]],
        items: Iterable[Any],
        *,
        stream: bool,
        use_tqdm: bool,
        is_one: bool = False,
    ) -> Any:
        """What `chat` and `generate` return. is_one: whether the caller gave one item and no list."""
        self._engine.check()
        call.check_options()
        params, names = call.params_of(self.default_sampling_params, items), adapters(items)
        if call.on_error == "raise" and isinstance(items, Sequence):
            call.check_all(items, is_one=is_one)

        def results() -> Iterator[Any]:
            total = len(items) if isinstance(items, Sequence) else None
            with _progress(total, use_tqdm) as advance:
                batch = OfflineBatch(
                    self._engine,
                    (
                        (partial(call.prepare_for, adapter, item, param), param)
                        for item, param, adapter in zip(items, params, names, strict=False)
                    ),
                    bounds=self._setup.offline,
                    num_threads=self._setup.media.threads,
                    window=self._setup.window if stream else None,
                    raises=call.on_error == "raise",
                    name=partial(call.name, is_one=is_one),
                    advance=advance,
                )
                with closing(batch.results()) as outcomes:
                    for number, outcome in enumerate(outcomes):
                        yield call.result_of(outcome, number, is_one=is_one)

        return results() if stream else list(results())


@contextmanager
def _progress(total: int | None, enabled: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on the error stream; yields what to call with each step: requests that finished, new tokens."""
    if not enabled:
        yield lambda num_finished, num_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("Answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, tokens=0)
        tokens = 0

        def advance(num_finished: int, num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            progress.update(task, advance=num_finished, tokens=tokens)

        yield advance

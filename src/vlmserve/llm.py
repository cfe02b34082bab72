"""Offline use: the engine in your own process, lists in, lists out.

from vlmserve import LLM, SamplingParams

llm = LLM("pixie")
[result] = llm.generate({"prompt": "...", "multi_modal_data": {"image": "photo.png"}})
print(result.text)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeGuard, Unpack, overload

from vlmserve.config import BUILT_IN_MODEL, EngineConfig, MediaConfig, OfflineConfig, check_names, read_settings
from vlmserve.errors import InvalidRequestError, InvalidRequestsError, UnknownModelError, VLMServeError
from vlmserve.offline import LoRARequest, OfflineBatch, OfflineRequests, Prepared
from vlmserve.outputs import RequestOutput
from vlmserve.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from vlmserve.engine.protocol import VLMEngine

Message: TypeAlias = Mapping[str, Any]
Conversation: TypeAlias = Sequence[Message]
TextPrompt: TypeAlias = str | Mapping[str, Any] | Sequence[int]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Adapters: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None
OnError: TypeAlias = Literal["raise", "return"]
Outcome: TypeAlias = RequestOutput | InvalidRequestError

UNBOUNDED_QUEUE = 2**31
"""Offline, all requests come from one caller who waits for them, so the queue needs no limit."""
_LOAD_INTERVAL = 0.002
WINDOWS = 4
"""Finished results may wait for an earlier, slow one, up to this many times the running requests."""


class ChatOptions(TypedDict, total=False):
    """Further options of `LLM.chat`, which describes them."""

    add_generation_prompt: bool
    chat_template_kwargs: Mapping[str, Any] | None
    cache_salt: str | None
    lora_request: Adapters


class LLM:
    """A model that answers in this process.

    model: built-in name, local folder or .gguf file, or Hugging Face repository id. Further options are the fields of
    `EngineConfig`, `MediaConfig` and `OfflineConfig` (``dtype="float32"``, ``kv_cache_memory="2GiB"``,
    ``max_images=4``, ``prepare_ahead=64``…). `default_sampling_params` is what calls without sampling parameters use:
    the checkpoint's own.

    Raises ConfigurationError for an unknown or impossible option, ModelLoadError for a checkpoint that cannot be
    served. Not thread-safe: use one LLM from one thread.
    """

    def __init__(self, model: str = BUILT_IN_MODEL, **options: Any) -> None:
        from vlmserve.frontend.defaults import default_sampling
        from vlmserve.frontend.requests import RequestPreparer
        from vlmserve.models.hub import resolve_model

        check_names(options, (EngineConfig, MediaConfig, OfflineConfig))
        media = {name: options.pop(name) for name in list(options) if name in MediaConfig.model_fields}
        offline = {name: options.pop(name) for name in list(options) if name in OfflineConfig.model_fields}
        self._media = read_settings(MediaConfig, media)
        self._offline = read_settings(OfflineConfig, offline)
        self.config = read_settings(EngineConfig, {"max_waiting": UNBOUNDED_QUEUE, **options, "model": model})
        folder = resolve_model(self.config.model, self.config.revision)
        self.default_sampling_params = default_sampling(folder)
        self._preparer = RequestPreparer(
            folder, self._media, self.config.model_impl, self.config.chat_template, engine=self.config
        )
        self._folder = folder
        self._adapter_paths: dict[str, str] = {}
        if self.config.load == "eager":
            self.load()
        self._requests = OfflineRequests(lambda: self.engine, self._preparer)

    def load(self) -> None:
        """Load the model now if it is not loaded. Raises ModelLoadError and ConfigurationError."""
        assert self.engine is not None

    @cached_property
    def engine(self) -> VLMEngine:
        """The engine with its model. With ``load="lazy"`` its first use loads it, and raises what that raises."""
        from vlmserve.engine import create_engine

        engine = create_engine(self.config, self._folder)
        self._preparer.fit(engine.info)
        return engine

    @overload
    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        stream: Literal[False] = False,
        on_error: Literal["raise"] = "raise",
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
        **options: Unpack[ChatOptions],
    ) -> Iterable[Outcome]: ...

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        stream: bool = False,
        on_error: OnError = "raise",
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        lora_request: Adapters = None,
    ) -> Any:
        """Answer one conversation (a list of messages) or many (a list of lists); results are in the same order.

        Messages have OpenAI's form; an image is a part ``{"type": "image", "image": x}`` where x is a
        `PIL.Image.Image`, a path, a file's bytes or a URL, or a part ``{"type": "image_url", …}``. A video is a part
        ``{"type": "video", "video": x}`` where x is a file or a list of such images, or ``{"type": "video_url", …}``.
        sampling_params: one for all, or one each. use_tqdm: whether to show a progress bar.
        stream: return an iterator instead of a list. It gives results in order, each as soon as it and all before it
        have finished, and only prepares as many ahead as `OfflineConfig` says; conversations may come from an iterator
        as well. Closing it ends all requests.
        on_error: "raise" ends the call with what is wrong in all conversations and answers none; "return" answers the
        others, and has an InvalidRequestError in the place of a result.
        add_generation_prompt: whether the prompt ends with the beginning of an answer (True). chat_template_kwargs:
        values that the model's chat template may know by name, such as ``enable_thinking``. cache_salt: nothing that is
        cached is shared with requests of another salt, or of none. lora_request: the adapter that answers, one for all,
        or one or None each; an LLM with ``enable_lora=True`` loads it if it is not served yet.

        Raises InvalidRequestError for a conversation that cannot be answered, naming its place and its file or URL, and
        InvalidRequestsError for several. A request that fails while it runs ends with finish_reason "error"; the others
        go on.
        """
        from vlmserve.frontend.messages import check_cache_salt, check_conversations

        check_conversations(messages)
        if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
            raise InvalidRequestError("chat_template_kwargs must be a dict", param="chat_template_kwargs")
        salt = check_cache_salt(cache_salt)

        def prepare(conversation: Any) -> Prepared:
            prompt = self._preparer.chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                allow_local=True,
                cache_salt=salt,
                template_settings=chat_template_kwargs,
            )
            return Prepared(prompt, salt)

        adapters = partial(self._adapters_of, lora_request)
        check = self._preparer.check_files
        call = _Call("conversations", prepare, check, sampling_params, use_tqdm, on_error, adapters)
        if _is_conversation(messages):
            return self._answer(call, [messages], stream=stream, is_one=True)
        return self._answer(call, messages, stream=stream)

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
    ) -> Any:
        """Continue one prompt or many, without a chat template; results are in the same order.

        A prompt is text, ``{"prompt": text, "multi_modal_data": {"image": image or list of images}}`` with the model's
        image token in the text for every image, a list of token ids, or ``{"prompt_token_ids": [...]}``; the dicts may
        have a "cache_salt". For the rest see `chat`.
        """
        adapters = partial(self._adapters_of, lora_request)
        call = _Call("prompts", self._text_prompt, self._check_prompt, sampling_params, use_tqdm, on_error, adapters)
        if isinstance(prompts, str | bytes | Mapping) or _are_token_ids(prompts):
            return self._answer(call, [prompts], stream=stream, is_one=True)
        return self._answer(call, prompts, stream=stream)

    def stream(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[str]:
        """Yield the text of the answer to one conversation as it is generated. Closing the iterator ends the request.

        Raises as `chat` does, and VLMServeError if the request fails while it runs, when the iterator is advanced.
        """
        from vlmserve.frontend.messages import check_cache_salt

        params = sampling_params or self.default_sampling_params
        if params.num_samples > 1:
            raise InvalidRequestError("a stream has one answer; leave n and best_of out", param="n")
        salt = check_cache_salt(cache_salt)
        try:
            prompt = self._preparer.chat(messages, allow_local=True, cache_salt=salt)
        except InvalidRequestError as error:
            error.locate()
            raise
        adapter = "" if lora_request is None else self._load_adapter(lora_request)
        request = self._requests.add(Prepared(prompt, salt, adapter=adapter), params)
        [generation] = request.generations
        try:
            sent = 0
            while generation.finish_reason is None or sent < len(generation.pieces):
                if sent == len(generation.pieces):
                    self._requests.step()
                    continue
                piece = generation.pieces[sent]
                sent += 1
                if piece:
                    yield piece
            if generation.error is not None:
                raise VLMServeError(generation.error)
        finally:
            self._requests.forget([request])

    def _adapters_of(self, wanted: Adapters, items: Iterable[Any]) -> Iterable[str]:
        """The names of the adapters that answer each of the items, all of them served.

        Raises InvalidRequestError unless there are as many, AdapterError for one that cannot be loaded.
        """
        if wanted is None:
            return repeat("")
        if isinstance(wanted, LoRARequest):
            return repeat(self._load_adapter(wanted))
        if not isinstance(items, Sequence) or len(items) != len(wanted):
            raise InvalidRequestError("give one lora_request for all, or one or None for each", param="lora_request")
        return ["" if one is None else self._load_adapter(one) for one in wanted]

    def _load_adapter(self, wanted: LoRARequest) -> str:
        """The name of an adapter that is served now. Raises AdapterError, UnknownModelError."""
        served = {adapter.name: adapter.path for adapter in self.engine.adapters}
        name, path = wanted.lora_name, wanted.lora_path
        if path and self._adapter_paths.get(name, served.get(name)) != path:
            self.engine.load_adapter(0, name, path)
            while not (finished := self.engine.finished_loads()):
                time.sleep(_LOAD_INTERVAL)
            if finished[0].error is not None:
                raise finished[0].error
            self._adapter_paths[name] = path
        elif name not in served:
            raise UnknownModelError(f"there is no adapter {name!r:.100} here; give its lora_path", param="lora_request")
        return name

    def _text_prompt(self, prompt: TextPrompt) -> Prepared:
        from vlmserve.frontend.messages import check_cache_salt

        if isinstance(prompt, str):
            return Prepared(self._preparer.text(prompt), text=prompt)
        if _are_token_ids(prompt):
            return Prepared(Prompt(list(prompt)))
        images = self._images(prompt)
        assert isinstance(prompt, Mapping)
        salt = check_cache_salt(prompt.get("cache_salt"))
        if "prompt" in prompt:
            text = self._preparer.text(prompt["prompt"], images, allow_local=True, cache_salt=salt)
            return Prepared(text, salt, prompt["prompt"])
        if images:
            raise InvalidRequestError('images need a text "prompt", not token ids', param="prompt")
        if not _are_token_ids(prompt["prompt_token_ids"]):
            raise InvalidRequestError("prompt_token_ids must be a list of token ids", param="prompt")
        return Prepared(Prompt(list(prompt["prompt_token_ids"])), salt)

    def _images(self, prompt: object) -> list[Any]:
        """The images of a prompt that is a dict. Raises InvalidRequestError for what is no prompt."""
        if not isinstance(prompt, Mapping):
            raise InvalidRequestError(
                f"a prompt is a text, a dict or a list of token ids, not {type(prompt).__name__}", param="prompt"
            )
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "multi_modal_data", "cache_salt"}
        if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise InvalidRequestError(
                'a prompt is a text or a dict with either "prompt" or "prompt_token_ids", and with "multi_modal_data" '
                f'if it has images and "cache_salt" if it has one; got the keys {sorted(map(str, prompt))}',
                param="prompt",
            )
        data = prompt.get("multi_modal_data") or {}
        if not isinstance(data, Mapping) or set(data) - {"image"}:
            known = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise InvalidRequestError(f'multi_modal_data must be a dict with "image", got {known}', param="prompt")
        images = data.get("image", [])
        return list(images) if isinstance(images, list | tuple) else [images]

    def _check_prompt(self, prompt: TextPrompt) -> None:
        """As `RequestPreparer.check_files`."""
        if not isinstance(prompt, str) and not _are_token_ids(prompt):
            images = self._images(prompt)
            self._preparer.check_sources([(f"images[{index}]", image) for index, image in enumerate(images)])

    def _answer(self, call: _Call, items: Iterable[Any], *, stream: bool, is_one: bool = False) -> Any:
        """What `chat` and `generate` return. is_one: whether the caller gave one item and no list."""
        if call.on_error not in ("raise", "return"):
            raise InvalidRequestError(f"on_error must be raise or return, got {call.on_error!r}", param="on_error")
        params = call.params_of(self.default_sampling_params, items)
        adapters = call.adapters(items)
        if call.on_error == "raise" and isinstance(items, Sequence):
            call.check_all(items, is_one=is_one)

        def results() -> Iterator[Outcome]:
            total = len(items) if isinstance(items, Sequence) else None
            with _progress(total, call.use_tqdm) as advance:
                batch = OfflineBatch(
                    self._requests,
                    (
                        (partial(call.prepare_for, adapter, item), param)
                        for item, param, adapter in zip(items, params, adapters, strict=False)
                    ),
                    bounds=self._offline,
                    num_threads=self._media.threads,
                    window=WINDOWS * (self.config.max_num_seqs + self._offline.prepare_ahead) if stream else None,
                    raises=call.on_error == "raise",
                    name=partial(call.name, is_one=is_one),
                    advance=advance,
                )
                yield from batch.results()

        return results() if stream else list(results())


@dataclass(frozen=True)
class _Call:
    """What `chat` or `generate` was asked for. kind: what its items are called. prepare, check: of one item.
    adapters: the names of those that answer the items."""

    kind: str
    prepare: Callable[[Any], Prepared]
    check: Callable[[Any], None]
    sampling_params: Params
    use_tqdm: bool
    on_error: OnError
    adapters: Callable[[Iterable[Any]], Iterable[str]]

    def prepare_for(self, adapter: str, item: Any) -> Prepared:
        """An item that an adapter answers."""
        return self.prepare(item)._replace(adapter=adapter)

    def params_of(self, default: SamplingParams, items: Iterable[Any]) -> Iterable[SamplingParams]:
        """For each of the items. Raises InvalidRequestError unless there are as many."""
        params = default if self.sampling_params is None else self.sampling_params
        if isinstance(params, SamplingParams):
            return repeat(params)
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams or a list of them, got {params!r:.200}",
                param="sampling_params",
            )
        if not isinstance(items, Sequence):
            raise InvalidRequestError(
                "inputs from an iterator take one SamplingParams for all", param="sampling_params"
            )
        if len(params) != len(items):
            raise InvalidRequestError(
                f"there are {len(items)} {self.kind} and {len(params)} sampling parameters", param="sampling_params"
            )
        return params

    def check_all(self, items: Sequence[Any], *, is_one: bool) -> None:
        """Find what is wrong before anything runs, as far as that is possible without preparing it."""
        errors: list[InvalidRequestError] = []
        for number, item in enumerate(items):
            try:
                self.check(item)
            except InvalidRequestError as error:
                self.name(error, number, is_one=is_one)
                errors.append(error)
        if errors:
            raise errors[0] if len(errors) == 1 else InvalidRequestsError(errors)

    def name(self, error: Exception, number: int, *, is_one: bool) -> None:
        """Add an item's place in the list to what is said of it."""
        place = None if is_one else f"{self.kind}[{number}]"
        if isinstance(error, InvalidRequestError):
            error.locate(place)
        elif place is not None:
            error.add_note(f"This is about {place}.")


def _is_conversation(messages: object) -> TypeGuard[Conversation]:
    return isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], Mapping)


def _are_token_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and len(prompt) > 0
        and all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in prompt)
    )


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

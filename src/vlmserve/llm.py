"""Offline use: the engine in your own process, lists in, lists out.

from vlmserve import LLM, SamplingParams

llm = LLM("pixie")
[result] = llm.generate({"prompt": "...", "multi_modal_data": {"image": "photo.png"}})
print(result.outputs[0].text)
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

from vlmserve.config import BUILT_IN_MODEL, EngineConfig, MediaConfig, check_names, read_settings
from vlmserve.errors import InvalidRequestError, VLMServeError
from vlmserve.types import EngineOutput, EngineRequest, FinishReason, Prompt, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from vlmserve.engine.protocol import VLMEngine
    from vlmserve.prompt.detokenize import Detokenizer

Message = Mapping[str, Any]
Conversation = Sequence[Message]
TextPrompt = str | Mapping[str, Any]
Item = TypeVar("Item")

UNBOUNDED_QUEUE = 2**31
"""Offline, all requests come from one caller who waits for them, so a full queue would only be in the way."""


@dataclass(frozen=True)
class Logprob:
    """How likely a token was. rank: 1 for the likeliest one. decoded_token: its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class Completion:
    """One answer. token_ids: without the end token that finished it. error: what went wrong, if something did.

    logprobs: for each of `token_ids`, if they were asked for: that token first, then the likeliest ones in order, by
    their ids.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    error: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The log probability of all tokens together."""
        if self.logprobs is None:
            return None
        return sum(told[token_id].logprob for token_id, told in zip(self.token_ids, self.logprobs, strict=True))


@dataclass(frozen=True)
class RequestResult:
    """What came of one prompt.

    prompt_token_ids: with the placeholders of pictures expanded. num_cached_tokens: how many of them were found in the
    prefix cache. num_images_encoded: pictures that went through the vision tower for it. prompt_logprobs: for each of
    `prompt_token_ids`, if they were asked for; None for the first one and for those of pictures.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0
    num_images_encoded: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class _Prepared(NamedTuple):
    prompt: Prompt
    cache_salt: str = ""


@dataclass(eq=False)
class _Generation:
    """A request in the engine and the text that it has brought so far."""

    request: EngineRequest
    detokenizer: Detokenizer
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_images_encoded: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def take(self, output: EngineOutput) -> None:
        self.num_cached_tokens, self.num_images_encoded = output.cached_tokens, output.images_encoded
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.pieces.append(self.detokenizer.push(output.token_ids))
        if self.detokenizer.stopped:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            self.pieces.append(self.detokenizer.finish())
            self.finish_reason = "stop" if self.detokenizer.stopped else output.finish_reason
            self.error = output.error

    def result(self, token_bytes: Callable[[int], bytes]) -> RequestResult:
        assert self.finish_reason is not None
        logprobs = prompt_logprobs = None
        if self.request.params.logprobs is not None:
            logprobs = [_by_id(told, token_bytes) for told in self.logprobs]
        if self.prompt_logprobs is not None:
            prompt_logprobs = [told if told is None else _by_id(told, token_bytes) for told in self.prompt_logprobs]
        completion = Completion(
            0,
            "".join(self.pieces),
            self.token_ids,
            self.finish_reason,
            self.error,
            logprobs,
        )
        return RequestResult(
            self.request.request_id,
            self.request.prompt.token_ids,
            [completion],
            self.num_cached_tokens,
            self.num_images_encoded,
            prompt_logprobs,
        )


def _by_id(told: TokenLogprobs, token_bytes: Callable[[int], bytes]) -> dict[int, Logprob]:
    others = [(token_id, score, rank) for rank, (token_id, score) in enumerate(told.top, start=1)]
    return {
        token_id: Logprob(score, rank, token_bytes(token_id).decode(errors="replace"))
        for token_id, score, rank in [(told.token_id, told.logprob, told.rank), *others]
    }


class LLM:
    """A model that answers in this process.

    model: built-in name, local folder or .gguf file, or Hugging Face repository id. Further options are the fields of
    `EngineConfig` and `MediaConfig` (``dtype="float32"``, ``kv_cache_memory="2GiB"``, ``max_images=4``…).
    `default_sampling_params` is what calls without sampling parameters use: the checkpoint's own.

    Raises ConfigurationError for an unknown or impossible option, ModelLoadError for a checkpoint that cannot be
    served. Not thread-safe: use one LLM from one thread.
    """

    def __init__(self, model: str = BUILT_IN_MODEL, **options: Any) -> None:
        from vlmserve.frontend.defaults import default_sampling
        from vlmserve.frontend.requests import RequestPreparer
        from vlmserve.models.hub import resolve_model

        check_names(options, (EngineConfig, MediaConfig))
        media = {name: options.pop(name) for name in list(options) if name in MediaConfig.model_fields}
        self._media = read_settings(MediaConfig, media)
        self.config = read_settings(EngineConfig, {"max_waiting": UNBOUNDED_QUEUE, **options, "model": model})
        folder = resolve_model(self.config.model, self.config.revision)
        self.default_sampling_params = default_sampling(folder)
        self._preparer = RequestPreparer(
            folder, self._media, self.config.model_impl, self.config.chat_template, engine=self.config
        )
        self._folder = folder
        if self.config.load == "eager":
            self.load()
        self._generations: dict[str, _Generation] = {}
        self._ids = itertools.count()

    def load(self) -> None:
        """Load the model now if it is not loaded. Raises ModelLoadError and ConfigurationError."""
        assert self.engine is not None

    @cached_property
    def engine(self) -> VLMEngine:
        """The engine with its model. With ``load="lazy"`` its first use loads it, and raises what that raises."""
        from vlmserve.engine import create_engine

        engine = create_engine(self.config, self._folder)
        self._preparer.max_prompt_len = engine.info.max_prompt_len
        return engine

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestResult]:
        """Answer one conversation (a list of messages) or many (a list of lists); results are in the same order.

        Messages have OpenAI's form; a picture is a part ``{"type": "image", "image": x}`` where x is a
        `PIL.Image.Image`, a path, a file's bytes or a URL, or a part ``{"type": "image_url", …}``. A video is a part
        ``{"type": "video", "video": x}`` where x is a file or a list of such pictures, or ``{"type": "video_url", …}``.
        sampling_params: one for all, or one each. use_tqdm: whether to show a progress bar. chat_template_kwargs:
        values that the model's chat template may know by name, such as ``enable_thinking``. cache_salt: nothing that is
        cached is shared with requests of another salt, or of none.

        All requests are checked before the first one runs. Raises InvalidRequestError for one that cannot be
        answered. A request that fails while it runs ends with finish_reason "error"; the others go on.
        """
        from vlmserve.frontend.messages import check_cache_salt, check_conversations

        check_conversations(messages)
        conversations: list[Any] = [messages] if _is_conversation(messages) else list(messages)

        salt = check_cache_salt(cache_salt)

        def prepare(conversation: Any) -> _Prepared:
            prompt = self._preparer.chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                allow_local=True,
                cache_salt=salt,
                template_settings=chat_template_kwargs,
            )
            return _Prepared(prompt, salt)

        return self._run(self._prepare(prepare, conversations), sampling_params, use_tqdm)

    def generate(
        self,
        prompts: TextPrompt | Sequence[TextPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestResult]:
        """Continue one prompt or many, without a chat template; results are in the same order.

        A prompt is text, ``{"prompt": text, "multi_modal_data": {"image": picture or list of pictures}}`` with the
        model's image token in the text for every picture, or ``{"prompt_token_ids": [...]}``; the dicts may have a
        "cache_salt". For the rest see `chat`.
        """
        several = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        return self._run(self._prepare(self._text_prompt, several), sampling_params, use_tqdm)

    def stream(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Iterator[str]:
        """Answer one conversation, piece by piece as the text comes. Closing the iterator ends the request.

        Raises as `chat` does, and VLMServeError if the request fails while it runs, when the iterator is advanced.
        """
        from vlmserve.frontend.messages import check_cache_salt

        salt = check_cache_salt(cache_salt)
        prompt = self._preparer.chat(messages, allow_local=True, cache_salt=salt)
        [generation] = self._add([_Prepared(prompt, salt)], [sampling_params or self.default_sampling_params])
        try:
            sent = 0
            while generation.finish_reason is None or sent < len(generation.pieces):
                if sent == len(generation.pieces):
                    self._step()
                    continue
                piece = generation.pieces[sent]
                sent += 1
                if piece:
                    yield piece
            if generation.error is not None:
                raise VLMServeError(generation.error)
        finally:
            self._forget([generation])

    def _text_prompt(self, prompt: TextPrompt) -> _Prepared:
        from vlmserve.frontend.messages import check_cache_salt

        if isinstance(prompt, str):
            return _Prepared(self._preparer.text(prompt))
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "multi_modal_data", "cache_salt"}
        if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise InvalidRequestError(
                'a prompt is a text or a dict with either "prompt" or "prompt_token_ids", and with "multi_modal_data" '
                f'if it has pictures and "cache_salt" if it has one; got the keys {sorted(prompt)}',
                param="prompt",
            )
        salt = check_cache_salt(prompt.get("cache_salt"))
        data = prompt.get("multi_modal_data") or {}
        if set(data) - {"image"}:
            raise InvalidRequestError(f'only "image" is known in multi_modal_data, got {sorted(data)}', param="prompt")
        images = data.get("image", [])
        images = list(images) if isinstance(images, list | tuple) else [images]
        if "prompt" in prompt:
            text = self._preparer.text(prompt["prompt"], images, allow_local=True, cache_salt=salt)
            return _Prepared(text, salt)
        if images:
            raise InvalidRequestError('pictures need a "prompt" in words, not token ids', param="prompt")
        return _Prepared(Prompt(list(prompt["prompt_token_ids"])), salt)

    def _prepare(self, prepare: Callable[[Item], _Prepared], items: Sequence[Item]) -> list[_Prepared]:
        """Prompts of all items, in worker threads. Raises the error of the first item that is wrong, naming it."""
        if len(items) == 1:
            return [prepare(items[0])]
        prompts = []
        with ThreadPoolExecutor(self._media.threads) as executor:
            futures = [executor.submit(prepare, item) for item in items]
            for number, future in enumerate(futures):
                try:
                    prompts.append(future.result())
                except BaseException as error:
                    executor.shutdown(wait=True, cancel_futures=True)
                    _name(error, number)
                    raise
        return prompts

    def _run(
        self,
        prompts: list[_Prepared],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestResult]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise InvalidRequestError(
                f"there are {len(prompts)} prompts and {len(sampling_params)} sampling parameters",
                param="sampling_params",
            )
        generations = self._add(prompts, sampling_params)
        unfinished = set(generations)
        try:
            with _progress(len(generations), use_tqdm) as advance:
                while unfinished:
                    for generation, num_tokens in self._step():
                        finished = generation in unfinished and generation.finish_reason is not None
                        unfinished -= {generation} if finished else set()
                        advance(finished, num_tokens)
        finally:
            self._forget(generations)
        return [generation.result(self._preparer.token_bytes) for generation in generations]

    def _add(self, prompts: Sequence[_Prepared], params: Sequence[SamplingParams]) -> list[_Generation]:
        """Queue all of them, or none if one is refused."""
        generations: list[_Generation] = []
        try:
            for (prompt, salt), param in zip(prompts, params, strict=True):
                request = EngineRequest(f"offline-{next(self._ids)}", prompt, param, salt)
                self.engine.add(request)
                generation = _Generation(request, self._preparer.detokenizer(param))
                self._generations[request.request_id] = generation
                generations.append(generation)
        except BaseException as error:
            if len(prompts) > 1:
                _name(error, len(generations))
            self._forget(generations)
            raise
        return generations

    def _step(self) -> list[tuple[_Generation, int]]:
        """One step of the engine; what it brings goes to whoever waits for it, a suspended stream as well.

        Returns which requests got how many tokens.
        """
        advanced, stopped = [], []
        with _interrupts_held_back():
            for output in self.engine.step():
                generation = self._generations.get(output.request_id)
                if generation is None:
                    continue
                generation.take(output)
                advanced.append((generation, len(output.token_ids)))
                if generation.finish_reason is not None and output.finish_reason is None:
                    stopped.append(output.request_id)
            self.engine.abort(stopped)
        return advanced

    def _forget(self, generations: Sequence[_Generation]) -> None:
        with _interrupts_held_back():
            unfinished = [one.request.request_id for one in generations if one.finish_reason is None]
            self.engine.abort(unfinished)
            for generation in generations:
                del self._generations[generation.request.request_id]


def _name(error: BaseException, number: int) -> None:
    error.add_note(f"This is about number {number} of the list, counted from 0.")


def _is_conversation(messages: Conversation | Sequence[Conversation]) -> TypeGuard[Conversation]:
    return len(messages) > 0 and isinstance(messages[0], Mapping)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Raise KeyboardInterrupt after the block, not in it: an engine left in the middle of a step is of no use."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    interrupted = False

    def remember(_signal: int, _frame: object) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt


@contextmanager
def _progress(total: int, enabled: bool) -> Iterator[Callable[[bool, int], None]]:
    """A progress bar on the error stream; yields what to call with each request's step: finished?, new tokens."""
    if not enabled:
        yield lambda finished, num_tokens: None
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

        def advance(finished: bool, num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            progress.update(task, advance=int(finished), tokens=tokens)

        yield advance

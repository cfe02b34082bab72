"""Offline use: the engine in your own process, lists in, lists out."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, cast, overload

from vlmserve.errors import InvalidRequestError, VLMServeError
from vlmserve.offline.batch import OfflineBatch
from vlmserve.offline.calls import Call
from vlmserve.offline.engine import SharedEngine
from vlmserve.offline.inputs import Conversation
from vlmserve.offline.model import OfflineModel
from vlmserve.offline.options import LLMOptions
from vlmserve.offline.requests import LoRARequest
from vlmserve.settings.config import BUILT_IN_MODEL
from vlmserve.types import SamplingParams

if TYPE_CHECKING:
    from vlmserve.engine.protocol import VLMEngine
    from vlmserve.offline.calls import Adapters, ChatOptions, Model, OnError, Outcome, Params
    from vlmserve.offline.inputs import Conversations, TextPrompts
    from vlmserve.offline.outputs import RequestOutput


class LLM(OfflineModel[Iterator[str]]):
    """A model in this process.

    model: short name, local folder or .gguf file, or Hugging Face repository id. Options are the fields of
    `EngineConfig`, `MediaConfig` and `OfflineConfig`, such as ``dtype="float32"``, ``kv_cache_memory="2GiB"``,
    ``max_images=4``.

    Threads may share an LLM; the engine batches their requests. A forked process needs its own LLM: calls raise
    ForkError. `close`, or deleting the last reference, frees the memory.

    Raises ConfigurationError for an unknown or impossible option, ModelLoadError for an unusable checkpoint.
    """

    def __init__(self, model: str = BUILT_IN_MODEL, **options: Unpack[LLMOptions]) -> None:
        # Callers wait for whole answers, so encode all images first.
        super().__init__(model, options, {"encoder_step_share": math.inf, "step_seconds": math.inf})
        self._engine = SharedEngine(self.config, self._setup.folder, self.preparer)
        if self.config.load == "eager":
            self.load()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self) -> None:
        """Load the model unless it is loaded. Raises ModelLoadError and ConfigurationError."""
        assert self.engine is not None

    def close(self) -> None:
        """Free the model's memory. Unfinished requests and later calls raise UnavailableError."""
        self._engine.close()

    @property
    def engine(self) -> VLMEngine:
        """The engine. With ``load="lazy"``, its first use loads the model and may raise what `load` raises.

        Use it from one thread, while no other call runs.
        """
        return self._engine.engine

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def chat(
            self,
            messages: Conversations,
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
            messages: Conversations,
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
            messages: Conversations,
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
            messages: Conversations,
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
            messages: Conversations,
            sampling_params: Params = None,
            use_tqdm: bool = True,
            *,
            stream: bool = False,
            on_error: OnError,
            **options: Unpack[ChatOptions],
        ) -> Iterable[Outcome]: ...

        @overload
        def chat(
            self,
            messages: Conversations,
            sampling_params: Params = None,
            use_tqdm: bool = True,
            *,
            stream: bool = False,
            on_error: OnError = "raise",
            schema: Any,
            **options: Unpack[ChatOptions],
        ) -> Iterable[Any]: ...

        def chat(self, *args: Any, **options: Any) -> Any: ...

        @overload  # type: ignore[override]
        def generate(
            self,
            prompts: TextPrompts,
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
            prompts: TextPrompts,
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
            prompts: TextPrompts,
            sampling_params: Params = None,
            use_tqdm: bool = True,
            *,
            stream: bool = False,
            on_error: OnError,
            lora_request: Adapters = None,
        ) -> Iterable[Outcome]: ...

        def generate(self, *args: Any, **options: Any) -> Any: ...

    def _texts(
        self, call: Call, messages: Conversation, params: SamplingParams, on_thought: Callable[[str], None]
    ) -> Iterator[str]:
        adapter = self._load_adapter(cast(LoRARequest | None, call.lora_request))
        try:
            prepared = call.prepare_for(adapter, messages, params)
        except InvalidRequestError as error:
            error.locate()
            raise
        request = self._engine.add(prepared, params)
        [generation] = request.generations
        try:
            while generation.has_text or generation.finish_reason is None:
                if generation.has_text:
                    yield from generation.take_text(on_thought)
                else:
                    self._engine.step()
            if generation.error is not None:
                raise VLMServeError(generation.error)
        finally:
            self._engine.forget([request])

    def _load_adapter(self, wanted: LoRARequest | None) -> str:
        """Return the served name; "" is the model itself. Raises AdapterError, UnknownModelError."""
        return "" if wanted is None else self._engine.load_adapter(wanted)

    def _answer(self, call: Call, *, stream: bool, use_tqdm: bool) -> Any:
        self._engine.check()
        if call.before is not None:
            self._answer(call.before, stream=False, use_tqdm=False)
        params, several = call.params_of(self.default_sampling_params), call.adapters()
        one = cast(LoRARequest | None, call.lora_request)
        names = repeat(self._load_adapter(one)) if several is None else [self._load_adapter(each) for each in several]
        call.check_all()

        def results() -> Generator[Any, None, None]:
            total = len(call.items) if isinstance(call.items, Sequence) else None
            with _progress(total, use_tqdm) as advance:
                batch = OfflineBatch(
                    self._engine,
                    call,
                    zip(call.items, params, names, strict=False),
                    bounds=self._setup.offline,
                    num_threads=self._setup.media.threads,
                    window=self._setup.window if stream else None,
                    advance=advance,
                )
                with closing(batch.results()) as outcomes:
                    for number, outcome in enumerate(outcomes):
                        yield from call.results_of(outcome, number)

        if stream:
            return results()
        with closing(results()) as found:
            return list(found)


@contextmanager
def _progress(total: int | None, enabled: bool) -> Iterator[Callable[[int, int], None]]:
    if not enabled:
        yield lambda num_finished, num_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("Answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, tokens="0 tokens")
        tokens = 0

        def advance(num_finished: int, num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            progress.update(task, advance=num_finished, tokens=f"{tokens:,} token{'' if tokens == 1 else 's'}")

        yield advance

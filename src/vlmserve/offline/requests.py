"""Requests of callers in this process, and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vlmserve.engine.admission import check_min_tokens
from vlmserve.frontend.best import mean_logprob
from vlmserve.offline.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    logprobs_by_id,
)
from vlmserve.prompt.expand import truncate
from vlmserve.tasks import GENERATE, Embed, Generate, Task, TaskResult
from vlmserve.types import EngineOutput, EngineRequest, FinishReason, ModelInfo, Prompt, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from vlmserve.frontend.reasoning import AnswerText, Said
    from vlmserve.frontend.requests import RequestPreparer


class LoRARequest(NamedTuple):
    """An adapter to answer with, by vLLM's names.

    - lora_name: the name to serve it under.
    - lora_int_id: vLLM's number; no effect.
    - lora_path: folder or repository to load it from, unless it is served; "": it is already served.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


class Prepared(NamedTuple):
    prompt: Prompt
    cache_salt: str = ""
    text: str | None = None
    """As the caller wrote it; None: the prompt was not text."""
    adapter: str = ""
    """The adapter's name; "": the model itself."""
    task: Task = GENERATE

    @property
    def num_bytes(self) -> int:
        return 8 * len(self.prompt.token_ids) + sum(image.pixels.nbytes for image in self.prompt.image_inputs)


@dataclass(eq=False)
class Generation:
    """One answer in the engine, and its text so far.

    The stepping thread sets `finish_reason` last, because the caller's thread reads meanwhile.
    """

    request_id: str
    params: SamplingParams
    answer_text: AnswerText
    token_ids: list[int] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    num_taken: int = 0
    """Entries of `said` that `take_text` has returned."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_images_encoded: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    result: TaskResult | None = None

    def take(self, output: EngineOutput) -> None:
        """Add a step's output. Drop text after a stop string."""
        self.num_cached_tokens, self.num_images_encoded = output.cached_tokens, output.images_encoded
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.said.append(self.answer_text.push(output.token_ids))
        count = self.answer_text.num_tokens - len(self.token_ids)
        self.token_ids += output.token_ids[:count]
        self.logprobs += (output.logprobs or [])[:count]
        if self.answer_text.stopped:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            keeps_end = self.params.include_stop_str_in_output
            self.said.append(self.answer_text.finish(output.stop_token_id if keeps_end else None))
            self.stop_token_id, self.error = output.stop_token_id, output.error
            self.result = output.result
            self.finish_reason = "stop" if self.answer_text.stopped else output.finish_reason

    @property
    def has_text(self) -> bool:
        return self.num_taken < len(self.said)

    def take_text(self, on_thought: Callable[[str], None]) -> Iterator[str]:
        while self.has_text:
            said = self.said[self.num_taken]
            self.num_taken += 1
            if said.thought:
                on_thought(said.thought)
            if said.text:
                yield said.text

    def fail(self, error: str) -> None:
        self.error, self.finish_reason = error, "error"

    @property
    def likelihood(self) -> float:
        return mean_logprob(self.logprobs[self.answer_text.num_reasoning_tokens :])

    @property
    def stop_reason(self) -> int | str | None:
        if self.answer_text.stop_string is not None:
            return self.answer_text.stop_string
        return self.stop_token_id if self.stop_token_id in self.params.stop_token_ids else None


class OfflineRequest:
    """A prompt and its `n` answers."""

    def __init__(self, request_id: str, prepared: Prepared, params: SamplingParams, preparer: RequestPreparer) -> None:
        self.request_id = request_id
        self.params = params
        self._text = prepared.text
        self._prompt: Prompt | None = prepared.prompt
        self._prompt_text = preparer.prompt_text
        self._token_bytes = preparer.answers.token_bytes
        several, ranked = params.num_samples > 1, params.num_samples > params.n
        self.requests: list[EngineRequest] = []
        self.generations: list[Generation] = []
        for index in range(params.num_samples):
            own = preparer.answers.with_bad_words(params.without_model()).of_sample(index, ranked=ranked)
            own_id = f"{request_id}-{index}" if several else request_id
            adapter = prepared.adapter
            self.requests.append(
                EngineRequest(own_id, prepared.prompt, own, prepared.cache_salt, adapter=adapter, task=prepared.task)
            )
            self.generations.append(Generation(own_id, own, preparer.answers.text(own, prepared.prompt.thoughts)))

    @property
    def has_begun(self) -> bool:
        return any(one.token_ids or one.finish_reason is not None for one in self.generations)

    @property
    def num_tokens(self) -> int:
        return sum(len(one.token_ids) for one in self.generations)

    @property
    def finished(self) -> bool:
        return all(one.finish_reason is not None for one in self.generations)

    def result(self) -> RequestOutput | PoolingRequestOutput:
        prompt, task = self.requests[0].prompt, self.requests[0].task
        first = self.generations[0]
        if not isinstance(task, Generate):
            values = np.frombuffer(b"" if first.result is None else first.result.data, "<f4")
            if isinstance(task, Embed) and first.error is None:
                values = values.reshape(task.shape(len(prompt.token_ids)))
            return PoolingRequestOutput(
                self.request_id,
                PoolingOutput(values, first.error),
                prompt.token_ids,
                first.num_cached_tokens,
                first.num_images_encoded,
            )
        best = self.generations
        if self.params.num_samples > self.params.n:
            best = sorted(best, key=lambda one: one.likelihood, reverse=True)[: self.params.n]
        prompt_logprobs = first.prompt_logprobs
        by_id = None
        if prompt_logprobs is not None:
            by_id = [one if one is None else logprobs_by_id(one, self._token_bytes) for one in prompt_logprobs]
        return RequestOutput(
            self.request_id,
            self._prompt_text(prompt) if self._text is None else self._text,
            prompt.token_ids,
            [self._completion(index, one) for index, one in enumerate(best)],
            first.num_cached_tokens,
            sum(one.num_images_encoded for one in self.generations),
            by_id,
            image_sizes=prompt.image_sizes,
        )

    def _completion(self, index: int, generation: Generation) -> CompletionOutput:
        assert generation.finish_reason is not None
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = [logprobs_by_id(one, self._token_bytes) for one in generation.logprobs]
        return CompletionOutput(
            index,
            "".join(said.text for said in generation.said),
            generation.token_ids,
            generation.finish_reason,
            generation.stop_reason,
            generation.error,
            logprobs,
            self.params.grammar,
            "".join(said.thought for said in generation.said) or None,
        )


def fitted(prepared: Prepared, params: SamplingParams, info: ModelInfo) -> Prepared:
    """Truncate the prompt as requested. Raises InvalidRequestError if the answer does not fit."""
    prompt = truncate(prepared.prompt, params.truncate_prompt_tokens, info.max_prompt_len)
    check_min_tokens(params.min_tokens, prompt, info)
    return prepared._replace(prompt=prompt)

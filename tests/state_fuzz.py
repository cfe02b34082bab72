"""Requests of several users to models with states, in caches that are far too small, against a quiet engine.

    .venv/bin/python -m tests.state_fuzz --requests 20000

Conversations mix texts, images and videos, go on, repeat and part anywhere. Requests have salts, LoRA and X-LoRA
adapters, priorities and several answers, and end at stop tokens; some are sampled with seeds, some are aborted, others
preempted. Half of the engines plan steps ahead, and some have room for blocks and states in host memory.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from msgspec.msgpack import encode
from msgspec.structs import replace
from transformers import AutoModelForImageTextToText

from tests.engine.image_parity import user
from tests.engine.test_qwen_vl import IMAGE_TOKEN, SIDE, make_oracle
from tests.lfm2_checkpoints import make_lfm2_vl
from tests.minicpmv_checkpoints import make_minicpmv
from tests.peft_adapters import make_adapter, make_xlora
from tests.static_device import StaticDevice, replace_cpus
from tests.waiting import wait_until
from vlmserve.cache.costs import CostModel
from vlmserve.engine.engine import Engine
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.layer_specs import CHUNK
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.types import (
    EngineOutput,
    EngineRequest,
    ImageInput,
    ImageSpan,
    Prompt,
    SamplingParams,
    TokenLogprobs,
)

ADAPTERS = ("", "", "", "one", "other", "mixed")
SALTS = ("", "", "", "tenant")
ADAPTED = r".*language_model.*(q_proj|v_proj|gate_proj|w1)"
SIZES = ((2, 3), (4, 4), (1, 2))
"""Embeddings of an image each way."""
MAX_LEN = 400
"""Tokens of a prompt and its answer. The KV cache holds little more."""
MAX_MIXED = 120
"""Tokens of a prompt with X-LoRA, which takes twice the blocks."""
TIE = 1e-3
"""Difference of two logprobs that rounding may reverse."""
TOP = 5
"""Likeliest tokens, the only ones that are sampled."""
STYLES: dict[str, dict[str, object]] = {
    "scored": {"temperature": 0, "ignore_eos": True, "logprobs": 2},
    "plain": {"temperature": 0, "ignore_eos": True},
    "stopped": {"temperature": 0, "stop_token_ids": tuple(range(0, 300, 3))},
    "sampled": {"temperature": 0.9, "top_k": TOP, "ignore_eos": True, "seed": 5},
    "sampled and scored": {"temperature": 0.9, "top_k": TOP, "stop_token_ids": tuple(range(1, 300, 3)), "seed": 6,
                           "logprobs": TOP},
}  # fmt: skip
"""Parameters of requests. Steps of those without logprobs may be planned ahead."""


class Turn(NamedTuple):
    """A part of a prompt. Images begin at numbers of its own tokens."""

    prompt: Prompt
    is_text: bool = False


@dataclass
class Answer:
    """Tokens, and logprobs if they were asked for, one more of them where a stop token ended the answer."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def hear(self, output: EngineOutput) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        if output.stop_logprobs is not None:
            self.logprobs.append(output.stop_logprobs)


@dataclass
class Model:
    """A tiny random checkpoint, turns with images for it, and what a quiet engine answers."""

    folder: Path
    pictures: list[Turn]
    known: dict[tuple[object, ...], Answer] = field(default_factory=dict)
    ranks: int = 1
    """Ranks of its engines but the quiet one. Several have no adapters."""

    def __post_init__(self) -> None:
        whole = AutoModelForImageTextToText.from_pretrained(self.folder)
        for seed, name in enumerate(("one", "other")):
            make_adapter(whole, self.folder / name, seed=seed, target_modules=ADAPTED)
        configs = [{"target_modules": ADAPTED}, {"target_modules": ADAPTED, "r": 2}]
        make_xlora(whole, self.folder / "mixed", configs, seed=2, softmax_temperature=3.0, scaling_pass_value=0.3)
        self.quiet = self.engine(enable_prefix_caching=False)
        [*self.ends] = self.quiet.info.end_token_ids or (2,)

    def engine(self, **settings: object) -> Engine:
        adapters = {"enable_lora": True, "max_loras": 3} if settings.get("tensor_parallel_size", 1) == 1 else {}
        fixed = {"dtype": "float32", "device": "cpu", "num_threads": 1, **adapters}
        config = EngineConfig(model=str(self.folder), **{**fixed, "kv_cache_memory": "8MiB", **settings})
        engine = Engine(config, self.folder)
        for name in ("one", "other", "mixed") if adapters else ():
            engine.adapter_store.load(name, self.folder / name)
        return engine

    def expected(self, request: EngineRequest) -> Answer:
        """The answer of an engine that runs nothing else and caches nothing, with logprobs."""
        params = replace(request.params, logprobs=TOP)
        images = tuple((span.image.key, span.start) for span in request.prompt.images)
        key = (tuple(request.prompt.token_ids), images, request.adapter, encode(params))
        if key not in self.known:
            self.quiet.add(replace(request, params=params))
            self.known[key] = answer = Answer()
            for output in drain(self.quiet):
                answer.hear(output)
        return self.known[key]


def drain(engine: Engine) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def video() -> Turn:
    """Two pairs of frames of 2 x 3 embeddings each, and a time between them."""
    pixels = np.random.default_rng(9).standard_normal((4, 3, 2 * SIDE, 3 * SIDE)).astype(np.float32)
    key = hashlib.sha256(pixels.tobytes()).digest()
    frames = ImageInput(key, pixels, 13, (2, 2, 3), text=((6, 17),))
    pair = [IMAGE_TOKEN] * 6
    return Turn(Prompt([8, 9, *pair, 17, *pair, 10, 11], (ImageSpan(frames, 2),)))


def made_up(kind: str) -> Callable[[Path], Model]:
    """Return a maker of a checkpoint whose images and videos have random pixels."""

    def make(folder: Path) -> Model:
        oracle = make_oracle(folder, kind)
        return Model(folder, [Turn(oracle.prompt(seed, 3, size, 5)) for seed, size in enumerate(SIZES)] + [video()])

    return make


def with_files(write: Callable[[Path], Path]) -> Callable[[Path], Model]:
    """Return a maker of a checkpoint with an image processor and a chat template."""

    def make(folder: Path) -> Model:
        preparer = RequestPreparer(write(folder), MediaConfig())
        messages = [user((8 * height, 8 * width), "What is this?", seed=height) for height, width in SIZES]
        return Model(folder, [Turn(preparer.chat([message], allow_local=True)) for message in messages])

    return make


FAMILIES = {
    "qwen3_5": made_up("qwen3_5"),
    "lfm2_vl": with_files(make_lfm2_vl),
    "lfm3_vl": made_up("lfm3_vl"),
    "minicpmv": with_files(make_minicpmv),
}


def joined(turns: Sequence[Turn]) -> Prompt:
    token_ids: list[int] = []
    spans = []
    for turn in turns:
        spans += [ImageSpan(span.image, len(token_ids) + span.start) for span in turn.prompt.images]
        token_ids += turn.prompt.token_ids
    return Prompt(token_ids, tuple(spans))


class Crowd:
    """Users who send requests at random."""

    def __init__(self, model: Model, seed: int) -> None:
        self.model, self.random = model, random.Random(seed)
        self.conversations: list[list[Turn]] = []
        # Steps are planned ahead only while no request is scored.
        self.styles = self.random.choice([[*STYLES], [name for name in STYLES if "scored" not in name]])

    def text(self, length: int, seed: int) -> list[int]:
        generator = random.Random(seed)
        return [generator.randrange(5, 200) for _ in range(length)]

    def turn(self) -> Turn:
        if self.random.random() < 0.4:
            return self.random.choice(self.model.pictures)
        length = self.random.choice([1, 9, 40, 150])
        return Turn(Prompt([*self.text(length, self.random.randrange(3)), self.random.choice(self.model.ends)]), True)

    def conversation(self) -> list[Turn]:
        """Return a new one, the next turn of one, the same again, or one that parts from another within a text."""
        kind = self.random.choice(["new", "next", "next", "same", "part"])
        if kind == "new" or not self.conversations:
            return [self.turn() for _ in range(self.random.randint(1, 4))]
        turns = list(self.random.choice(self.conversations[-8:]))
        last = turns[-1]
        if kind == "part" and last.is_text:
            place = self.random.randrange(len(last.prompt.token_ids))
            other = self.text(self.random.randint(1, 90), self.random.randrange(3, 6))
            turns[-1] = Turn(Prompt([*last.prompt.token_ids[:place], *other]), True)
        elif kind == "next":
            turns.append(self.turn())
        return turns if len(turns) < 7 else turns[-2:]

    def requests(self, name: str) -> list[EngineRequest]:
        """Return a request for each answer."""
        turns = self.conversation()
        self.conversations.append(turns)
        style = STYLES[self.random.choice(self.styles)]
        params = SamplingParams(max_tokens=self.random.choice([1, 2, 5, 9, 20]), **style)
        salt, adapter = self.random.choice(SALTS), self.random.choice(ADAPTERS)
        if self.model.ranks > 1:
            adapter = ""
        prompt, priority = joined(turns), self.random.choice([0, 0, 1])
        if len(prompt.token_ids) > MAX_MIXED and adapter == "mixed":
            adapter = "one"
        count = self.random.choice([1, 1, 1, 3])
        return [
            EngineRequest(f"{name}.{n}", prompt, params, salt, adapter=adapter, priority=priority) for n in range(count)
        ]

    def heard(self, request: EngineRequest, answer: Sequence[int]) -> None:
        """Let a later turn begin with an answer."""
        turns = self.conversations[-1]
        if joined(turns).token_ids == request.prompt.token_ids and self.random.random() < 0.5:
            self.conversations.append([*turns, Turn(Prompt([*answer, self.model.ends[0]]), True)])


@dataclass
class Tally:
    """Counts of a run."""

    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    found_tokens: int = 0
    planned_ahead: int = 0
    states_loaded: int = 0
    disk_hits: int = 0
    disk_broken: int = 0
    ties: int = 0
    flips: int = 0
    """Samples of another token with the same probabilities: rounding has moved the border between two tokens."""
    different: list[str] = field(default_factory=list)


def differs(found: Answer, expected: Answer, params: SamplingParams, tally: Tally) -> bool:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(found.token_ids, expected.token_ids, strict=False))
    place = len([*same])
    for own, other in zip(found.logprobs[:place], expected.logprobs, strict=False):
        if abs(own.logprob - other.logprob) > TIE:
            return True
    if found.token_ids == expected.token_ids:
        return False
    likeliest = expected.logprobs[place].top
    if params.temperature == 0:
        is_tie = likeliest[0][1] - likeliest[1][1] < TIE
        tally.ties += is_tie
        return not is_tie
    own = found.logprobs[place] if len(found.logprobs) > place else None
    is_flip = own is None or abs(own.logprob - dict(likeliest).get(own.token_id, 0.0)) < TIE
    tally.flips += is_flip
    return not is_flip


class Disk(NamedTuple):
    """A disk cache's folder and size, and what happens to its files after each request."""

    folder: Path
    memory: int
    act: Callable[[], None]


def fuzz(model: Model, num_requests: int, seed: int, tally: Tally, disk: Disk | None = None) -> None:
    """Send requests to one engine with few slots and blocks, and compare every answer."""
    crowd = Crowd(model, seed)
    choice = crowd.random.choice
    slots = choice([3, 3, 4, 8])
    block, budget = choice([4, 16]), choice([48, 130, 600])
    of_tokens = model.quiet.runner.model.language_model.cache_bytes(block)
    pages = choice([11, 16, 25]) * of_tokens.pages(MAX_LEN, budget + CHUNK) // 10
    devices: list[StaticDevice] = []
    with pytest.MonkeyPatch.context() as patch:
        # Tiny models compute faster than they copy.
        patch.setattr(CostModel, "worth_saving", lambda _: True)
        if choice([True, False]) and model.ranks == 1:
            devices = replace_cpus(patch)
        busy = model.engine(
            state_cache_memory=(1 + slots) * model.quiet.sizes.state_bytes,
            max_num_seqs=4,
            block_size=block,
            max_num_batched_tokens=budget,
            kv_cache_memory=pages * of_tokens.page,
            kv_offload_memory=choice([0, "256KiB", "4MiB"]),
            max_model_len=MAX_LEN,
            tensor_parallel_size=model.ranks,
            **({} if disk is None else {"disk_cache": str(disk.folder), "disk_cache_memory": disk.memory}),
        )
        act = None if disk is None else disk.act
        send(model, busy, crowd, num_requests, tally, f"{model.folder.name}, seed {seed}", act)
    tally.planned_ahead += sum(device.num_ahead for device in devices)
    wait_until(lambda: busy.stats().disk_queued_bytes == 0)  # the next engine finds all
    stats = busy.stats()
    tally.preempted += stats.preemptions
    tally.states_loaded += stats.states_loaded
    tally.disk_hits += stats.disk_hits
    tally.disk_broken += stats.disk_broken
    assert (stats.kv_blocks_used, stats.state_slots_used) == (0, 0)


def send(
    model: Model,
    busy: Engine,
    crowd: Crowd,
    num_requests: int,
    tally: Tally,
    title: str,
    act: Callable[[], None] | None = None,
) -> None:
    """act: called after each request is sent."""
    choice = crowd.random.choice
    sent: dict[str, EngineRequest] = {}
    answers: dict[str, Answer] = {}

    def step() -> None:
        for output in busy.step():
            name = output.request_id
            assert output.error is None, output.error
            answers[name].hear(output)
            if output.finish_reason is None:
                tally.found_tokens += output.cached_tokens
                continue
            request = sent.pop(name)
            answer = answers.pop(name)
            tally.finished += 1
            if differs(answer, model.expected(request), request.params, tally):
                tally.different.append(f"{title}: {name}")
            crowd.heard(request, answer.token_ids)

    for number in itertools.count():
        if tally.finished >= num_requests:
            break
        for request in crowd.requests(str(number)):
            if len(request.prompt.token_ids) < MAX_LEN - 20:
                sent[request.request_id], answers[request.request_id] = request, Answer()
                busy.add(request)
        if act is not None:
            act()
        for _ in range(crowd.random.choice([0, 1, 2, 6, 15])):
            step()
        while len(sent) > 8:
            step()
        if sent and crowd.random.random() < 0.05:
            name = choice(sorted(sent))
            busy.abort([name])
            tally.aborted += 1
            del sent[name], answers[name]
    while busy.has_work():
        step()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.state_fuzz", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=20_000, help="requests in all (default 20000)")
    parser.add_argument("--round", type=int, default=250, help="requests of each engine (default 250)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first engine (default 0)")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="default: all")
    options = parser.parse_args()
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        models = []
        for name in options.families:
            (place := Path(folder) / name).mkdir()
            models.append(FAMILIES[name](place))
        for seed, model in enumerate(itertools.cycle(models), start=options.seed):
            if tally.finished >= options.requests:
                break
            fuzz(model, tally.finished + options.round, seed, tally)
            model.known.clear()
            print(f"{model.folder.name}, seed {seed}: {tally}", flush=True)
    raise SystemExit(1 if tally.different or tally.flips > 1 + tally.finished // 2000 else 0)


if __name__ == "__main__":
    main()

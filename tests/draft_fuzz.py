"""Random requests to engines that draft in caches that are far too small, against an engine that drafts nothing.

    .venv/bin/python -m tests.draft_fuzz --requests 2000

Prompts repeat. Requests have salts, adapters, grammars, penalties, thoughts, predictions, priorities, beams and several
answers; some are aborted, others preempted. Steps take few prompt tokens, and some engines have two ranks.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import vlmserve.engine.ranks
from tests.assistants import make_assistant, make_counting
from tests.checkpoints import change_config, make_llama
from tests.engine.test_drafts import logprobs, whole
from tests.engine.test_parity import Oracle, bytes_of_4, llava_oracle, text_oracle
from tests.engine.test_structured import PERSON, engine_of, run, tokens
from tests.gguf_files import write_gguf
from tests.models.test_families import make
from tests.mtp_checkpoints import add_glm_mtp, add_mtp
from tests.peft_adapters import make_adapter
from tests.ranks import RankThreads
from tests.static_device import replace_cpus
from vlmserve.engine import drafting, loading
from vlmserve.engine.engine import Engine
from vlmserve.types import BeamSearch, EngineOutput, EngineRequest, Grammar, Prompt, SamplingParams, Thoughts

MAX_LEN = 160
"""Tokens of a prompt and its answer. The KV cache holds little more."""
NEAR = 1e-3
"""Difference of two logprobs that the shape of a batch may make."""
COSTS = ([(1, 1.0), (32, 1.001)], [(1, 1.0), (32, 1.3)], [(1, 1.0), (8, 2.0), (32, 6.0)])
"""Assumed times of steps by their rows."""
OF_LAYER = (
    [(0, 1.0), (1, 1.0), (2, 1.004), (3, 1.0), (4, 1.0)],
    [(0, 1.0), (1, 1.1), (2, 1.5), (3, 1.0), (4, 1.2)],
    [(0, 1.0), (1, 1.01), (2, 1.02), (3, 1.0), (4, 1.1)],
)
"""Assumed times of steps with and without a layer for multi-token prediction."""
AHEAD = ([(1, 1.0)], [(1, 0.7), (8, 0.8)])
"""Assumed times of decodes that are planned ahead."""
GRAMMARS = (None, None, None, Grammar.json(PERSON), Grammar.regex("(ab|cd|ef){1,20}!"), Grammar.choice(["left", "up"]))
PENALTIES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "repeat_last_n": 9},
    {"no_repeat_ngram_size": 2},
    {"logit_bias": {7: 3.0, 9: -100.0}, "frequency_penalty": 0.3},
    {"stop_token_ids": tuple(range(5, 250, 9)), "min_tokens": 1},
    {"allowed_token_ids": tuple(range(20, 90))},
    {"bad_token_ids": ((31,), (32, 40))},
)


@dataclass
class Model:
    """A tiny random checkpoint, and the answers of an engine without drafts that runs one request at a time."""

    oracle: Oracle
    settings: dict[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ("",)
    static: bool = False
    """Run the data flow of a GPU, see `tests.static_device`."""

    def __post_init__(self) -> None:
        self.plain = self.engine(enable_prefix_caching=False)

    def engine(self, **settings: Any) -> Engine:
        fixed = {"kv_cache_memory": "4MiB", "max_model_len": MAX_LEN, **self.settings}
        with pytest.MonkeyPatch.context() as patch:
            if self.static:
                replace_cpus(patch)
            engine = engine_of(self.oracle.folder, **{**fixed, **settings})
        for name in self.adapters[1:]:
            engine.adapter_store.load(name, self.oracle.folder / name)
        return engine

    def expected(self, request: EngineRequest) -> list[EngineOutput]:
        return run(self.plain, [request])[request.request_id]


def text(kind: str, *, static: bool = False, **settings: Any) -> Callable[[Path], Model]:
    return lambda folder: Model(text_oracle(make(folder, kind)), settings, static=static)


def predicting(folder: Path) -> Model:
    return Model(text_oracle(add_mtp(make(folder, "qwen3.5 with shared keys"))))


def assisted(folder: Path, *, counting: bool = False) -> Model:
    """counting: drafts are right, and greedy answers count."""
    target = make(folder, "gemma4")
    own = {"hidden_size": 48} if counting else {}
    assistant = make_assistant(folder / "assistant", target, clusters=not counting, **own)
    if counting:
        make_counting(target, assistant)
        change_config(target, tie_word_embeddings=False)
    return Model(text_oracle(target), {"draft_model": str(assistant)})


def in_gguf(folder: Path) -> Model:
    oracle = text_oracle(add_mtp(make(folder, "qwen3.5")))
    return Model(replace(oracle, folder=write_gguf(folder, folder / "model.gguf")))


def adapted(folder: Path, make: Callable[[Path], Path] = make_llama, *, static: bool = False) -> Model:
    oracle = text_oracle(make(folder))
    base = AutoModelForCausalLM.from_pretrained(folder)
    for seed, name in enumerate(("one", "other")):
        make_adapter(base, folder / name, seed=seed, target_modules=["q_proj", "v_proj"])
    return Model(oracle, {"enable_lora": True, "max_loras": 2}, ("", "one", "other"), static)


FAMILIES: dict[str, Callable[[Path], Model]] = {
    "llama with adapters": adapted,
    "llava": lambda folder: Model(llava_oracle(folder)),
    "phi3 with longrope, short": text("phi3 with longrope, short"),
    "gemma3": text("gemma3"),
    "two ranks": text("qwen2"),
    "lfm2": text("lfm2"),
    "qwen3.5": text("qwen3.5 with shared keys"),
    "lfm3": text("lfm3"),
    "qwen3.5 with torch": text("qwen3.5 with shared keys", kernels="torch"),
    "two ranks of qwen3.5": text("qwen3.5 with shared keys"),
    "qwen3.5 with MTP": predicting,
    "qwen3.5 in GGUF with MTP": in_gguf,
    "glm4_moe with MTP": lambda folder: Model(text_oracle(add_glm_mtp(make(folder, "glm4_moe")))),
    "qwen3.5 with MTP and adapters": lambda folder: adapted(folder, lambda place: add_mtp(make(place, "qwen3.5"))),
    "gemma4 with an assistant": assisted,
    "gemma4 that counts with an assistant": lambda folder: assisted(folder, counting=True),
    "static llama with adapters": lambda folder: adapted(folder, static=True),
    "static llava": lambda folder: Model(llava_oracle(folder), static=True),
    "static gemma3": text("gemma3", static=True),
    "static phi3 with longrope": text("phi3 with longrope, short", static=True),
    "static lfm2": text("lfm2", static=True),
    "static qwen3.5": text("qwen3.5 with shared keys", static=True),
}


class Crowd:
    """Users who send requests at random."""

    def __init__(self, model: Model, seed: int) -> None:
        self._model, self.chance = model, random.Random(seed)
        self._asked: list[tuple[Prompt, dict[str, Any]]] = []

    def _prompt(self) -> Prompt:
        number = self.chance.randrange(8)
        oracle, length = self._model.oracle, 5 + 9 * number
        if oracle.image_token is not None and number % 2:
            return oracle.prompt(number, 4, "image", length // 3)
        prompt = oracle.prompt(number, length)
        return Prompt(prompt.token_ids * 2) if number < 4 else prompt

    def _params(self) -> dict[str, Any]:
        chance = self.chance
        params: dict[str, Any] = {
            "temperature": chance.choice([0.0, 0.0, 0.7, 1.5]),
            "max_tokens": chance.choice([1, 2, 9, 30, 60]),
            "ignore_eos": chance.random() < 0.6,
        }
        if chance.random() < 0.3:
            params |= {"logprobs": chance.randint(0, 3)}
        if chance.random() < 0.1:
            params |= {"prompt_logprobs": 1}
        if chance.random() < 0.3:
            params |= chance.choice(PENALTIES)
        elif (grammar := chance.choice(GRAMMARS)) is not None:
            params |= {"grammar": grammar}
        return params

    def _new(self) -> tuple[Prompt, dict[str, Any]]:
        chance, prompt, params = self.chance, self._prompt(), self._params()
        thoughts = None
        if chance.random() < 0.2:
            thoughts = Thoughts(7, 9, begun=chance.random() < 0.5)
            params |= {"thinking_token_budget": chance.choice([None, 0, 4, 20])}
        prediction = chance.choices(range(5, 250), k=30) if chance.random() < 0.2 else []
        return Prompt(prompt.token_ids, prompt.images, thoughts=thoughts, prediction=prediction), params

    def requests(self, name: str) -> list[EngineRequest]:
        """Return a request for each answer."""
        chance = self.chance
        if not self._asked or chance.random() < 0.4:
            self._asked.append(self._new())
        (prompt, params), first = chance.choice(self._asked[-5:]), chance.randrange(2)
        beams = None
        if chance.random() < 0.05:
            beams, prompt = BeamSearch(2), Prompt(prompt.token_ids, prompt.images)
            params = {"max_tokens": params["max_tokens"], "ignore_eos": True, "temperature": 0.0}
        salt, adapter = chance.choice(["", "", "tenant"]), chance.choice(self._model.adapters)
        priority = chance.choice([0, 0, 1])
        return [
            EngineRequest(
                f"{name}.{number}", prompt, SamplingParams(seed=first + number, **params), salt,
                beams=beams, adapter=adapter, priority=priority,
            )
            for number in range(1 if beams else chance.choice([1, 1, 1, 3]))
        ]  # fmt: skip


@dataclass
class Tally:
    """Counts of a run."""

    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    drafted: int = 0
    accepted: int = 0
    different: list[str] = field(default_factory=list)


def differs(actual: list[EngineOutput], expected: list[EngineOutput]) -> bool:
    told, wanted = logprobs(actual), logprobs(expected)
    return (
        whole(actual) != whole(expected)
        or actual[-1].beams != expected[-1].beams
        or [one[:2] for one in told] != [one[:2] for one in wanted]
        or any(abs(one[2] - other[2]) > NEAR for one, other in zip(told, wanted, strict=True))
    )


def fuzz(model: Model, num_requests: int, seed: int, tally: Tally, *, ranks: int = 1) -> None:
    """Send requests to one engine that drafts, and compare every answer."""
    crowd = Crowd(model, seed)
    choice = crowd.chance.choice
    block = bytes_of_4(model.oracle.folder)

    def costs(key: str, _: object) -> Sequence[tuple[int, float]]:
        return choice(OF_LAYER if key.endswith(" layer") else AHEAD if " ahead " in key else COSTS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "known_costs", costs)
        # a layer of a tiny model is a large share of it
        patch.setattr(drafting, "share_of_layer", lambda _: 0.0)
        patch.setattr(loading, "MAX_DRAFT_PLACES", choice([2, 8]))
        patch.setattr(vlmserve.engine.ranks, "RankProcesses", RankThreads)
        busy = model.engine(
            speculation="auto",
            tensor_parallel_size=ranks,
            max_num_seqs=choice([3, 8]),
            max_num_batched_tokens=choice([9, 48, 600]),
            block_size=4,
            kv_cache_memory=choice([11, 15, 40]) * (MAX_LEN // 4) * block // 10 + 8 * block,
        )
    sent: dict[str, tuple[EngineRequest, list[EngineOutput]]] = {}

    def step() -> None:
        for output in busy.step():
            request, outputs = sent[output.request_id]
            outputs.append(output)
            if output.finish_reason is not None:
                del sent[output.request_id]
                tally.finished += 1
                if differs(outputs, model.expected(request)):
                    tally.different.append(f"seed {seed}: {request.request_id} {request.params}")

    done = tally.finished + num_requests
    for number in itertools.count():
        if tally.finished >= done:
            break
        for request in crowd.requests(str(number)):
            sent[request.request_id] = request, []
            busy.add(request)
        for _ in range(choice([0, 1, 2, 6, 15])):
            step()
        while len(sent) > 8:
            step()
        if sent and crowd.chance.random() < 0.05:
            name = choice(sorted(sent))
            request, outputs = sent.pop(name)
            busy.abort([name])
            tally.aborted += 1
            answer = tokens(outputs)
            if answer != tokens(model.expected(request))[: len(answer)]:
                tally.different.append(f"seed {seed}: {name} {request.params}, aborted")
    while busy.has_work():
        step()
    stats = busy.stats()
    tally.preempted += stats.preemptions
    tally.drafted += stats.drafted_tokens
    tally.accepted += stats.accepted_drafts
    assert stats.kv_blocks_used == 0


def ranks_of(family: str) -> int:
    return 2 if family.startswith("two ranks") else 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.draft_fuzz", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=2000, help="requests in all (default 2000)")
    parser.add_argument("--round", type=int, default=60, help="requests of each engine (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first engine (default 0)")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="default: all")
    options = parser.parse_args()
    tally = Tally()
    with tempfile.TemporaryDirectory() as place:
        models = {}
        for name in options.families:
            (folder := Path(place) / name).mkdir()
            models[name] = FAMILIES[name](folder)
        for seed, name in enumerate(itertools.cycle(models), start=options.seed):
            if tally.finished >= options.requests:
                break
            fuzz(models[name], options.round, seed, tally, ranks=ranks_of(name))
            print(f"{name}, seed {seed}: {tally}", flush=True)
    raise SystemExit(1 if tally.different else 0)


if __name__ == "__main__":
    main()

"""Never the wrong image: hundreds of requests that look alike but for their images, in caches that are far too
small, with aborts. pixie says what is in an image, so a mix-up is a wrong answer."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from tests.engine.kinds import by_kernels
from vlmserve.engine.engine import Engine
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.models.hub import resolve_model
from vlmserve.pixie.drawing import draw_scene
from vlmserve.pixie.scenes import sample_scene
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.types import EngineRequest, Prompt, SamplingParams

SIDE = 160
QUESTIONS = ("Describe the picture.", "How many objects are there?", "What is in the picture?")
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@dataclass(frozen=True)
class Case:
    """A prompt and the answer that it gets alone, without any cache."""

    prompt: Prompt
    answer: list[int]


def engine(**settings) -> Engine:
    return Engine(EngineConfig(model="pixie", device="cpu", dtype="float32", **settings), resolve_model("pixie"))


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    preparer = RequestPreparer(resolve_model("pixie"), MediaConfig())
    images = [draw_scene(sample_scene(seed, "grid")).resize((SIDE, SIDE)) for seed in range(12)]
    touched = images[0].copy()
    touched.putpixel((3, 3), tuple(255 - level for level in touched.getpixel((3, 3))))
    images.append(touched)

    def ask(text: str, *shown) -> Prompt:
        parts = [{"type": "image", "image": image} for image in shown]
        content = [*parts, {"type": "text", "text": text}]
        return preparer.chat([{"role": "user", "content": content}], allow_local=True)

    asked = [ask(question, image) for question in QUESTIONS for image in images]
    pair = "Which picture has more objects?"
    for one, other in itertools.pairwise(images[:6]):
        asked += [ask(pair, one, other), ask(pair, other, one), ask(pair, one, one)]
    return asked


@pytest.fixture(scope="module")
def cases(prompts: list[Prompt]) -> list[Case]:
    alone = engine(max_num_seqs=1, enable_prefix_caching=False, kv_cache_memory="64MiB")
    found = []
    for number, prompt in enumerate(prompts):
        alone.add(EngineRequest(str(number), prompt, GREEDY))
        answer: list[int] = []
        while alone.has_work():
            answer += [token for output in alone.step() for token in output.token_ids]
        found.append(Case(prompt, answer))
    return found


def test_the_images_make_the_answers(cases):
    assert len({tuple(case.answer) for case in cases[:12]}) == 12, "or a mix-up could go unseen"


@pytest.mark.usefixtures("saving_pays")
@by_kernels("seed, num_requests", native=[(0, 80)], static=[(0, 12)])
def test_every_answer_equals_the_one_alone(cases, seed, num_requests):
    random_ = random.Random(seed)
    probe = engine(kv_cache_memory="64MiB", block_size=4)
    block_bytes = probe.info.kv_cache_bytes // probe.stats().kv_blocks_total
    longest = max(len(case.prompt.token_ids) for case in cases) + 24
    picture_bytes = 81 * probe.info.image_token_bytes
    tiny = engine(
        block_size=4,
        kv_cache_memory=2 * (longest // 4) * block_bytes,
        kv_offload_memory=40 * block_bytes,
        encoder_cache_memory=3 * picture_bytes,
        max_num_seqs=6,
        max_num_batched_tokens=random_.choice([50, 150]),
        max_encoded_images=2,
    )
    salts = ("", "one", "other")
    open_requests: dict[str, tuple[Case, list[int]]] = {}
    unique: set[str] = set()
    sent = finished = hits = 0
    most = num_requests

    def all_has_happened() -> bool:
        stats = tiny.stats()
        return min(stats.preemptions, stats.kv_evictions, stats.blocks_loaded, stats.encoder_hits) > 0

    while sent < most or open_requests:
        # How many steps an image takes depends on how fast it is encoded, and with it what else happens.
        most = num_requests if sent < num_requests or all_has_happened() else 4 * num_requests
        while sent < most and len(open_requests) < 12:
            # Neighbours often ask about the same image, and now and then somebody has a salt of their own.
            case = cases[(sent // 2 + random_.choice([0, 0, 0, random_.randrange(len(cases))])) % len(cases)]
            name = f"request {sent}"
            salt = name if random_.random() < 0.05 else random_.choice(salts)
            if salt == name:
                unique.add(name)
            tiny.add(EngineRequest(name, case.prompt, GREEDY, salt))
            open_requests[name] = (case, [])
            sent += 1
        for output in tiny.step():
            case, tokens = open_requests[output.request_id]
            tokens += output.token_ids
            assert output.error is None
            assert tokens == case.answer[: len(tokens)]
            assert not (output.cached_tokens and output.request_id in unique), "a hit across salts"
            hits += output.cached_tokens > 0
            if output.finish_reason is not None:
                assert tokens == case.answer
                del open_requests[output.request_id]
                finished += 1
        if open_requests and random_.random() < 0.02:
            name = random_.choice(list(open_requests))
            tiny.abort([name])
            del open_requests[name]
    stats = tiny.stats()
    assert finished > 0.7 * sent
    assert hits > 0
    assert all_has_happened()
    assert (stats.kv_blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)

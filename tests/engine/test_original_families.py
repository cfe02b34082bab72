"""Models that transformers does not have in the engine: the tokens of their architecture written out in float64, alone,
batched, in chunks that cut through images, with prefix hits and after preemption."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.engine.kinds import with_budgets
from tests.engine.test_parity import NEW_TOKENS, assert_answers, engine_for, generate, tight_cache
from tests.normalized import normalized
from tests.oracles.original_decoders import ChatGLM, OriginalDecoder, Qwen
from tests.oracles.qwen_vl_vision import QwenVLVision
from tests.original_checkpoints import VISUAL, make_chatglm, make_qwen, make_qwen_vl
from tests.prompt.test_convert import IMG
from tests.prompt.test_convert import qwen as write_tokenizer
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.offline.llm import LLM
from vlmserve.settings.config import MediaConfig
from vlmserve.types import ImageInput, ImageSpan, Prompt, SamplingParams

pytestmark = pytest.mark.usefixtures("native_kernels")

Part = int | str
SMALL = {"image_size": 32, "layers": 1}
IMAGE_TOKEN = VISUAL["image_start_id"] + 2


@dataclass
class Oracle:
    """A checkpoint and what its architecture makes of prompts."""

    folder: Path
    decoder: OriginalDecoder
    vision: QwenVLVision | None = None
    embeddings: dict[bytes, torch.Tensor] = field(default_factory=dict)

    def make_image(self, seed: int) -> ImageInput:
        side = SMALL["image_size"]
        pixels = np.random.default_rng(seed).standard_normal((1, 3, side, side)).astype(np.float32)
        return ImageInput(hashlib.sha256(pixels.tobytes()).digest(), pixels, VISUAL["n_queries"])

    def prompt(self, seed: int, *parts: Part) -> Prompt:
        """Numbers are that many random text tokens, "image" is a new random image between its two tokens."""
        random = np.random.default_rng(seed)
        token_ids: list[int] = []
        spans = []
        for part in parts:
            if isinstance(part, int):
                token_ids += random.integers(3, 290, part).tolist()
                continue
            image = self.make_image(seed * 100 + len(spans))
            spans.append(ImageSpan(image, len(token_ids) + 1))
            token_ids += [IMAGE_TOKEN - 2, *[IMAGE_TOKEN] * image.num_tokens, IMAGE_TOKEN - 1]
        return Prompt(token_ids, tuple(spans))

    def greedy(self, prompt: Prompt, count: int = NEW_TOKENS) -> list[int]:
        return self.decoder.greedy(prompt.token_ids, count, [(span.start, self._seen(span)) for span in prompt.images])

    def _seen(self, span: ImageSpan) -> torch.Tensor:
        assert self.vision is not None
        if span.image.key not in self.embeddings:
            self.embeddings[span.image.key] = self.vision.encode(torch.from_numpy(normalized(span.image))[0])
        return self.embeddings[span.image.key]


# Lengths on both sides of 32, 64 and 128 tokens, at which the base of Qwen's wavelengths grows.
TEXTS: list[tuple[Part, ...]] = [(40,), (1,), (29,), (62,), (70,), (33,), (131,)]
IMAGES: list[tuple[Part, ...]] = [
    (5, "image", 9), ("image", 3), (7, "image"), (4,), ("image", 2, "image", 3, "image", 1), (33,), (60, "image", 16),
    (55, "image"), (1,),
]  # fmt: skip
KINDS: dict[str, tuple[type[OriginalDecoder], Callable[..., Path], dict[str, Any], list[tuple[Part, ...]]]] = {
    "chatglm3": (ChatGLM, make_chatglm, {"num_layers": 2}, TEXTS),
    "qwen": (Qwen, make_qwen, {"num_hidden_layers": 2}, TEXTS),
    "qwen_vl": (Qwen, make_qwen_vl, {"num_hidden_layers": 2, "visual": SMALL}, IMAGES),
}


@pytest.fixture(scope="module", params=KINDS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    decoder_class, make, overrides, _ = KINDS[request.param]
    folder = make(tmp_path_factory.mktemp(request.param), **overrides)
    decoder = decoder_class(folder)
    visual = decoder.config.get("visual")
    return Oracle(folder, decoder, QwenVLVision(decoder.tensors, visual) if visual else None)


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[Prompt]:
    parts = next(parts for kind, _, _, parts in KINDS.values() if _matches(oracle, kind, parts))
    return [oracle.prompt(seed, *part) for seed, part in enumerate(parts)]


def _matches(oracle: Oracle, kind: type[OriginalDecoder], parts: list[tuple[Part, ...]]) -> bool:
    return isinstance(oracle.decoder, kind) and (parts is IMAGES) == (oracle.vision is not None)


@pytest.fixture(scope="module")
def expected(oracle: Oracle, prompts: list[Prompt]) -> list[list[int]]:
    return [oracle.greedy(prompt) for prompt in prompts]


@with_budgets
def test_tokens_are_those_of_the_architecture(
    oracle: Oracle, prompts: list[Prompt], expected: list[list[int]], budget: int
) -> None:
    assert len({tuple(answer) for answer in expected}) > 5, "answers that are alike would prove little"
    engine = engine_for(oracle, block_size=4, max_num_batched_tokens=budget)
    assert_answers(engine, prompts, expected)
    assert engine.stats().prefix_cached_tokens > 0


def test_preempted_requests_give_the_same(oracle: Oracle, prompts: list[Prompt], expected: list[list[int]]) -> None:
    tight = tight_cache(oracle, prompts, max_num_batched_tokens=100)
    assert generate(tight, prompts) == expected
    assert tight.stats().preemptions > 0


def test_prompts_of_other_ropes_share_no_prefix(tmp_path: Path) -> None:
    """A longer base makes other keys of the same tokens."""
    folder = make_qwen(tmp_path)
    oracle = Oracle(folder, Qwen(folder))
    long = oracle.prompt(0, 60)
    short = Prompt(long.token_ids[:30])
    engine = engine_for(oracle, block_size=4)
    assert generate(engine, [short]) == [oracle.greedy(short)]
    assert generate(engine, [long]) == [oracle.greedy(long)]
    assert engine.stats().prefix_cached_tokens == 0
    assert generate(engine, [short, long]) == [oracle.greedy(short), oracle.greedy(long)]
    assert engine.stats().prefix_cached_tokens > 80
    # The same tokens computed as part of the longer prompt would have given something else.
    shortest = oracle.decoder.logits(short.token_ids)
    assert (oracle.decoder.logits(short.token_ids, prompt_len=60) - shortest).abs().max() > 0.1


def test_another_image_gives_another_answer(tmp_path: Path) -> None:
    folder = make_qwen_vl(tmp_path, visual=SMALL)
    decoder = Qwen(folder)
    oracle = Oracle(folder, decoder, QwenVLVision(decoder.tensors, decoder.config["visual"]))
    one = oracle.prompt(1, 3, "image", 5)
    other = Prompt(one.token_ids, (ImageSpan(oracle.make_image(77), one.images[0].start),))
    first, second = generate(engine_for(oracle), [one, other])
    assert (first, second) == (oracle.greedy(one), oracle.greedy(other))
    assert first != second


def test_image_question_from_files_to_answer(tmp_path: Path) -> None:
    """From the checkpoint's own files: tokenizer, template, image, tower and decoder."""
    folder = make_qwen_vl(
        write_tokenizer(tmp_path, takes_images=True),
        visual={"image_size": 84, "image_start_id": IMG, "n_queries": 9},
        num_hidden_layers=1,
    )
    decoder = Qwen(folder)
    vision = QwenVLVision(decoder.tensors, decoder.config["visual"])
    levels = np.random.default_rng(0).integers(0, 256, (84, 84, 3), np.uint8)
    question = [{"type": "image", "image": Image.fromarray(levels)}, {"type": "text", "text": "the picture"}]
    model = LLM(str(folder), dtype="float32", device="cpu", kv_cache_memory="16MiB")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (result,) = model.chat([[{"role": "user", "content": question}]], params, use_tqdm=False)
    prompt = RequestPreparer(folder, MediaConfig()).chat([{"role": "user", "content": question}], allow_local=True)
    mean, deviation = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    seen = vision.encode(torch.from_numpy(((levels / 255 - mean) / deviation).transpose(2, 0, 1)))
    expected = decoder.greedy(prompt.token_ids, 6, [(prompt.images[0].start, seen)])
    assert result.outputs[0].token_ids == expected

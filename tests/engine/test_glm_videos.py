"""Videos of GLM-OCR against transformers' processor and model: frames two by two, each pair with its time behind it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor

from tests.engine.image_parity import Oracle, make_image, open_oracle, shown
from tests.engine.test_parity import NEW_TOKENS, engine_for, first_logits, generate, tight_cache
from tests.media.glm_videos import smart_resize
from tests.models.test_qwen_vision import patches
from tests.normalized import normalized
from tests.ocr_checkpoints import BOUNDS, load_processor, make_glm_ocr
from vlmserve.models.grid_positions import grid_positions
from vlmserve.types import ImageSpan, Prompt

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

FPS = 1.5


def film(count: int, width: int = 40, height: int = 24) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "video", "video": [make_image(width, height, seed) for seed in range(count)], "fps": FPS}


def user(*parts: str | tuple[int, int] | dict[str, Any]) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, dict):
            content.append(part)
        elif isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            content.append({"type": "image", "image": make_image(*part)})
    return {"role": "user", "content": content}


CONVERSATIONS = [
    user(film(4), "What moves?"),
    user("Odd:", film(5, 30, 50), "?"),
    user(film(2, 64, 20), film(3), "which one?"),
    user((40, 30), film(9), "both", (20, 60)),
    user((16, 16), "no video"),
    user("nor an image"),
]


class Videos:
    """What transformers makes of a conversation, of whose videos it needs torchvision to resize frames."""

    def __init__(self, oracle: Oracle, message: dict[str, Any]) -> None:
        self.model = oracle.model
        self._processor = oracle.processor
        images, films = shown(message), [part["video"] for part in message["content"] if part["type"] == "video"]
        self.images = self._processor.image_processor(images=images, return_tensors="pt") if images else {}
        made = [self._video(frames) for frames in films]
        self.videos: dict[str, Tensor] = {}
        if made:
            rows, grids = zip(*made, strict=True)
            self.videos = {"pixel_values_videos": torch.cat(rows), "video_grid_thw": torch.cat(grids)}
        self.token_ids = self._write(message, films)
        self.kinds = torch.tensor(self._processor.create_mm_token_type_ids([self.token_ids]))

    def _video(self, frames: Sequence[Image.Image]) -> tuple[Tensor, Tensor]:
        """Patches and grid: of each two frames the first and the second half of what the image processor makes of them,
        which shows an image twice."""
        width, height = frames[0].size
        rows, columns = smart_resize()(len(frames), height, width, 2, 8, *(2 * bound for bound in BOUNDS))
        resized = [frame.resize((columns, rows), Image.Resampling.BICUBIC) for frame in frames]
        resized += resized[-1:] * (len(resized) % 2)
        made = [self._processor.image_processor(images=[one], do_resize=False, return_tensors="pt") for one in resized]
        halves = [one["pixel_values"].view(len(one["pixel_values"]), 3, 2, -1) for one in made]
        pairs = [torch.stack((a[:, :, 0], b[:, :, 1]), 2) for a, b in zip(halves[::2], halves[1::2], strict=True)]
        grid = made[0]["image_grid_thw"].clone()
        grid[0, 0] = len(pairs)
        return torch.cat(pairs).flatten(1), grid

    def _write(self, message: dict[str, Any], films: Sequence[Sequence[Image.Image]]) -> list[int]:
        text = self._processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        for grid in self.images["image_grid_thw"] if self.images else []:
            text = text.replace("<|image|>", "<|one|>" * (int(grid.prod()) // 4), 1)
        own: Any = SimpleNamespace(image_token="<|one|>", video_processor=SimpleNamespace(merge_size=2))
        own.replace_frame_token_id = lambda *given, **named: Glm46VProcessor.replace_frame_token_id(
            own, *given, **named
        )
        metadata = [
            SimpleNamespace(fps=FPS, timestamps=[index / FPS for index in range(len(frames))]) for frames in films
        ]
        for index in range(len(films)):
            given = {**self.videos, "video_metadata": metadata}
            text = text.replace("<|video|>", Glm46VProcessor.replace_video_token(own, given, index), 1)
        return list(self._processor.tokenizer(text.replace("<|one|>", "<|image|>"))["input_ids"])

    def positions(self, token_ids: list[int]) -> Tensor:
        kinds = torch.cat((self.kinds, torch.zeros(1, len(token_ids) - self.kinds.shape[1], dtype=torch.long)), 1)
        inputs = {**self.images, **self.videos}
        grids = {name: inputs[name] for name in ("image_grid_thw", "video_grid_thw") if name in inputs}
        found, _ = self.model.model.get_rope_index(torch.tensor([token_ids]), kinds, **grids)
        return found

    @torch.inference_mode()
    def logits(self, answer: Sequence[int] = ()) -> Tensor:
        """With images and videos in one prompt, which its own forward pass takes for each other."""
        whole = [*self.token_ids, *answer]
        embedded = self.model.get_input_embeddings()(torch.tensor([whole]))
        for kind, name, inputs in ((1, "image", self.images), (2, "video", self.videos)):
            if inputs:
                features = getattr(self.model.model, f"get_{name}_features")(**inputs).pooler_output
                embedded[0, : self.kinds.shape[1]][self.kinds[0] == kind] = torch.cat(features)
        outputs = self.model(inputs_embeds=embedded, position_ids=self.positions(whole), use_cache=False)
        return outputs.logits[0, -1]

    def greedy(self) -> list[int]:
        answer: list[int] = []
        for _ in range(NEW_TOKENS):
            answer.append(int(self.logits(answer).argmax()))
        return answer


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = make_glm_ocr(tmp_path_factory.mktemp("glm"))
    return open_oracle(folder, load_processor(folder))


@pytest.fixture(scope="module")
def theirs(oracle: Oracle) -> list[Videos]:
    return [Videos(oracle, message) for message in CONVERSATIONS]


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[Prompt]:
    return [oracle.prompt(message) for message in CONVERSATIONS]


@pytest.fixture(scope="module")
def expected(theirs: list[Videos]) -> list[list[int]]:
    return [one.greedy() for one in theirs]


def of_kind(prompt: Prompt, videos: bool) -> list[ImageSpan]:
    return [span for span in prompt.images if bool(span.image.text) == videos]


def test_prompts_pixels_and_positions_are_those_of_transformers(
    oracle: Oracle, prompts: list[Prompt], theirs: list[Videos]
) -> None:
    for prompt, other in zip(prompts, theirs, strict=True):
        assert prompt.token_ids == other.token_ids
        placements = [span.placement for span in prompt.images]
        ours = grid_positions(placements, np.arange(len(prompt.token_ids)))
        assert torch.equal(torch.from_numpy(ours)[:, None], other.positions(prompt.token_ids))
        spans = of_kind(prompt, videos=True)
        grids = other.videos.get("video_grid_thw", torch.empty(0, 3, dtype=torch.long)).tolist()
        assert [span.image.grid for span in spans] == [
            (frames, down // 2, across // 2) for frames, down, across in grids
        ]
        if spans:
            config = oracle.model.config.vision_config
            rows = torch.cat([patches(torch.from_numpy(normalized(span.image)), config)[0] for span in spans])
            torch.testing.assert_close(rows, other.videos["pixel_values_videos"], atol=1e-5, rtol=0)


@torch.inference_mode()
def test_logits_are_those_of_transformers(oracle: Oracle, prompts: list[Prompt], theirs: list[Videos]) -> None:
    actual = first_logits(engine_for(oracle, block_size=4), prompts)
    expected = torch.stack([one.logits() for one in theirs])
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    alone = theirs[0]
    inputs = {"input_ids": torch.tensor([alone.token_ids]), "mm_token_type_ids": alone.kinds, **alone.videos}
    torch.testing.assert_close(oracle.model(**inputs).logits[0, -1], expected[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("budget", [5, 2048])
def test_tokens_are_those_of_transformers(
    oracle: Oracle, prompts: list[Prompt], expected: list[list[int]], budget: int
) -> None:
    engine = engine_for(oracle, block_size=4, max_num_batched_tokens=budget)
    assert generate(engine, prompts) == expected
    assert generate(engine, prompts[:2]) == expected[:2], "after hits"


def test_preempted_requests_give_the_same(oracle: Oracle, prompts: list[Prompt], expected: list[list[int]]) -> None:
    chosen = [2, 4, 5]
    some = [prompts[number] for number in chosen]
    tight = tight_cache(oracle, some, max_num_batched_tokens=100)
    assert generate(tight, some) == [expected[number] for number in chosen]
    assert tight.stats().preemptions > 0

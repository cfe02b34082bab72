"""The published files of families of models: all tensors that are used are found under their names, and prompts are
what their processors write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.normalized import normalized
from tests.published import chat_template, tensor_shapes, write_published
from vlmserve.errors import InvalidRequestError, ModelLoadError
from vlmserve.families.spec import QueryGrowth
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.models.registry import Description
from vlmserve.models.weights import Checkpoint, merge_as_stored, weight_slots
from vlmserve.prompt.checkpoint import read_prompt_files
from vlmserve.settings.config import MediaConfig

META = torch.device("meta")
VISION_START, VISION_END, VIDEO = 151652, 151653, 151656
PACKING = "visual.embeddings.packing_position_embedding.weight"


@dataclass(frozen=True)
class Shown:
    """What an image becomes: the shape of its pixels, its ids in the prompt, and the grid of its embeddings, if any."""

    shape: tuple[int, ...]
    ids: list[int]
    grid: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Family:
    """One published checkpoint. spec: values of its `ArchSpec`. rope: size, theta and sections. is_unused: of the names
    of tensors. parts: of a question; None is the image. text: before and behind the image's ids. images: sizes, and
    what `show` is given. black: what a black pixel becomes. written: by users, which has none of `ids`."""

    image_id: int
    end_ids: set[int]
    spec: dict[str, Any]
    parts: tuple[str | None, ...]
    text: tuple[str, str]
    images: dict[tuple[int, int], Any]
    show: Callable[[Any], Shown]
    rope: tuple[int, float, list[int]] | None = None
    image_width: int | None = None
    is_unused: Callable[[str], bool] = lambda name: False
    black: float | None = None
    written: str = ""
    ids: set[int] = field(default_factory=set)


def patches(side: int, image_id: int) -> Callable[[tuple[int, int, int]], Shown]:
    """Each embedding is of so many pixels along each side."""
    return lambda grid: Shown((1, 3, side * grid[1], side * grid[2]), [image_id] * (grid[1] * grid[2]), grid)


def tiles(count: int) -> Shown:
    """Several have one more that shows all of the image."""
    shown = count + (count > 1)
    return Shown((shown, 3, 448, 448), [151665, *[151667] * (256 * shown), 151666])


def rows(size: tuple[int, int]) -> Shown:
    """Columns and rows, of which each ends with a token."""
    row = [10] * size[0]
    return Shown((1, 3, 28 * size[1], 28 * size[0]), [*([*row, 12] * (size[1] - 1)), *row, 13])


def squares(tiles: int, whole: tuple[int, int]) -> Shown:
    """LFM2-VL's rows of tiles, four in each, and rows and columns of squares of the whole image."""
    image, start, end = [396], 498, 499
    count = whole[0] * whole[1]
    ids = [part for tile in range(tiles) for part in (397 + tile // 4 * 10 + tile % 4, *image * 256)]
    ids += [*([497] if tiles else []), *image * count]
    return Shown((256 * tiles + count, 3, 32, 32), [start, *ids, end])


FAMILIES = {
    "GLM-OCR": Family(
        image_id=59280,
        end_ids={59246, 59253},
        spec={"tied_embeddings": False, "max_position": 131072},
        rope=(128, 10000, [16, 24, 24]),
        is_unused=lambda name: name.startswith("language_model.mtp."),
        parts=(None, "Text Recognition:"),
        text=(
            "[gMASK]<sop><|user|>\n<|begin_of_image|>",
            "<|end_of_image|>Text Recognition:<|assistant|>\n",
        ),
        images={(640, 480): (1, 17, 23), (20, 40): (1, 4, 2), (5200, 3300): (1, 62, 98)},
        show=patches(28, 59280),
    ),
    "InternVL3-1B-hf": Family(
        image_id=151667,
        end_ids={151645},
        spec={"tied_embeddings": False, "max_position": 32768},
        parts=(None, "What?"),
        text=("<|im_start|>user\n", "\nWhat?<|im_end|>\n<|im_start|>assistant\n"),
        images={(448, 448): 1, (300, 200): 6, (640, 480): 12, (2000, 500): 4, (500, 3000): 6},
        show=tiles,
        written="<img><IMG_CONTEXT></img> <video>",
        ids={151665, 151666, 151667},
    ),
    "LFM2.5-VL-1.6B": Family(
        image_id=396,
        end_ids={7},
        spec={"tied_embeddings": True, "max_position": 128000},
        parts=(None, "What?"),
        text=("<|startoftext|><|im_start|>user\n", "What?<|im_end|>\n<|im_start|>assistant\n"),
        images={
            (512, 512): (0, (16, 16)),
            (640, 480): (0, (13, 18)),
            (20, 40): (0, (12, 6)),
            (2000, 1000): (8, (11, 22)),
        },
        show=lambda shown: squares(*shown),
        black=-1.0,
        written="<image><|image_start|><|img_row_1_col_1|> <|img_thumbnail|>",
        ids={396, 397, 497, 498, 499},
    ),
    "Ministral-3-3B-Instruct-2512-BF16": Family(
        image_id=10,
        end_ids={2},
        spec={"tied_embeddings": True, "max_position": 262144, "query_growth": QueryGrowth(16384, 0.1)},
        parts=("What?", None),
        text=("<s>[INST]What?", "[/INST]"),
        images={(1540, 1540): (55, 55), (300, 200): (11, 8), (4000, 3000): (55, 42), (28, 29): (1, 2)},
        show=rows,
        written="[IMG][IMG_BREAK][IMG_END] [INST]",
        ids={10, 12, 13},
    ),
    "PaddleOCR-VL": Family(
        image_id=100295,
        end_ids={2},
        spec={"tied_embeddings": False, "max_position": 131072},
        rope=(128, 500000, [16, 24, 24]),
        is_unused=lambda name: name == PACKING or name.startswith("visual.head."),
        parts=(None, "OCR:"),
        text=("<|begin_of_sentence|>User: <|IMAGE_START|>", "<|IMAGE_END|>OCR:\nAssistant:\n"),
        images={(640, 480): (1, 17, 23), (100, 20): (1, 7, 31), (3200, 2400): (1, 51, 69)},
        show=patches(28, 100295),
        black=-1.0,
    ),
    "Qwen3-VL-2B-Instruct": Family(
        image_id=151655,
        end_ids={151643, 151645},
        spec={"deepstack": 3, "tied_embeddings": True, "max_position": 262144},
        image_width=4 * 2048,
        parts=(None, "What?"),
        text=(
            "<|im_start|>user\n<|vision_start|>",
            "<|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n",
        ),
        images={(640, 480): (1, 15, 20), (40, 40): (1, 8, 8), (5200, 3300): (1, 101, 160)},
        show=patches(32, 151655),
        black=-1.0,
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of each family, made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = write_published(tmp_path_factory.mktemp("published"), name)
        return made[name]

    return folder


@pytest.fixture(scope="module")
def preparers(folders: Callable[[str], Path]) -> Callable[[str], RequestPreparer]:
    """What prepares the prompts of each family, made once."""
    made: dict[str, RequestPreparer] = {}
    return lambda name: made.get(name) or made.setdefault(name, RequestPreparer(folders(name), MediaConfig()))


def text_of(preparer: RequestPreparer, ids: list[int]) -> str:
    return preparer.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_published_tensors_match_the_models_slots(folders: Callable[[str], Path], name: str) -> None:
    family, folder = FAMILIES[name], folders(name)
    description = Description.read(folder)
    checkpoint = Checkpoint(folder, description.rename)
    spec = description.spec(checkpoint)
    assert {field: getattr(spec, field) for field in family.spec} == family.spec
    if family.rope is not None:
        rope = spec.ropes[0]
        assert rope is not None
        assert (rope.size, rope.theta, rope.parameters["mrope_section"]) == family.rope
    parts = description.build(spec, TorchReference(), dtype=torch.bfloat16, device=META)
    assert family.image_width in (None, getattr(parts.language_model, "image_width", None))
    merge_as_stored(parts.modules, checkpoint.names)
    slots = dict(weight_slots(parts.modules))
    published = {checkpoint.canonical(name): shape for name, shape in tensor_shapes(name).items()}
    unused = {name for name in published if family.is_unused(name)}
    assert slots.keys() | unused == checkpoint.names
    assert {name: tuple(slot.shape) for name, slot in slots.items()} == {
        name: shape for name, shape in published.items() if name not in unused
    }
    assert description.image_token_id == family.image_id
    assert read_prompt_files(folder).end_token_ids == family.end_ids


def test_ministral_may_have_names_of_transformers_5(
    folders: Callable[[str], Path],
) -> None:
    folder = folders("Ministral-3-3B-Instruct-2512-BF16")
    description = Description.read(folder)
    checkpoint = Checkpoint(folder, description.rename)
    ropes = description.spec(checkpoint).ropes
    assert {rope.attention_factor for rope in ropes if rope is not None} == {1.0}
    names = tensor_shapes("Ministral-3-3B-Instruct-2512-BF16")
    flat = (f"model.{name.replace('language_model.model.', 'language_model.')}" for name in names)
    assert {checkpoint.canonical(name) for name in flat} == checkpoint.names


def test_paddleocr_publishes_unused_position_embeddings(folders: Callable[[str], Path]) -> None:
    folder = folders("PaddleOCR-VL")
    assert PACKING in Checkpoint(folder, Description.read(folder).rename).names


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name, family in FAMILIES.items() for size in family.images], ids=str
)
def test_images_take_the_tokens_that_the_processor_counts(
    preparers: Callable[[str], RequestPreparer], name: str, size: tuple[int, int]
) -> None:
    family, preparer = FAMILIES[name], preparers(name)
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": Image.new("RGB", size)} if part is None else {"type": "text", "text": part}
        for part in family.parts
    ]
    prompt = preparer.chat([{"role": "user", "content": parts}], allow_local=True)
    [span] = prompt.images
    shown = family.show(family.images[size])
    assert shown.grid is None or span.image.grid == shown.grid
    assert span.image.pixels.shape == shown.shape
    if family.black is not None:
        pixels = normalized(span.image)
        assert pixels.min() == pixels.max() == family.black
    assert prompt.token_ids[span.start : span.end] == shown.ids
    around = prompt.token_ids[: span.start], prompt.token_ids[span.end :]
    assert tuple(text_of(preparer, ids) for ids in around) == family.text


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.written])
def test_what_users_write_is_no_image(preparers: Callable[[str], RequestPreparer], name: str) -> None:
    family, preparer = FAMILIES[name], preparers(name)
    prompt = preparer.chat([{"role": "user", "content": family.written}])
    assert not family.ids & set(prompt.token_ids)
    if "[INST]" in family.written:
        assert text_of(preparer, prompt.token_ids).count("[INST]") == 2, "the template's own and the text"
        assert prompt.token_ids.count(3) == 1


def test_glm_ocr_bounds_count_images_twice(preparers: Callable[[str], RequestPreparer]) -> None:
    image = {"type": "image", "image": Image.new("RGB", (640, 480)), "max_pixels": 9633792 // 2 + 1}
    with pytest.raises(InvalidRequestError, match=r"max_pixels is 4,816,897; .* this server's max_pixels, 4,816,896"):
        preparers("GLM-OCR").chat([{"role": "user", "content": [image]}], allow_local=True)


def test_glm_ocr_frames_precede_their_times(
    folders: Callable[[str], Path], preparers: Callable[[str], RequestPreparer]
) -> None:
    content = [{"type": "video", "video": [noise(320, 240)] * 5, "fps": 2}, {"type": "text", "text": "What?"}]
    # A template that knows nothing of videos: they become images.
    prompt = preparers("GLM-OCR").chat([{"role": "user", "content": content}], allow_local=True)
    assert len(prompt.images) == 5
    image = "<|begin_of_image|><|image|><|end_of_image|>"
    branch = "{%- elif part.type == 'video' -%}" + image.replace("image", "video")
    template = chat_template("GLM-OCR").replace(image, image + branch)
    preparer = RequestPreparer(folders("GLM-OCR"), MediaConfig(), chat_template=template)
    prompt = preparer.chat([{"role": "user", "content": content}], allow_local=True)
    [span] = prompt.images
    assert span.image.grid == (3, 9, 11)
    frames = "".join(image.replace("<|image|>", "<|image|>" * 99) + f"{time} seconds" for time in ("0.0", "1.0", "2.0"))
    text = text_of(preparer, prompt.token_ids)
    assert text == f"[gMASK]<sop><|user|>\n<|begin_of_video|>{frames}<|end_of_video|>What?<|assistant|>\n"
    assert preparer.tokenizer.video_token_id == 59281
    assert prompt.token_ids.count(59280) == span.image.num_embeddings == 297


# Qwen3-VL


def test_features_for_missing_layers_are_rejected(folders: Callable[[str], Path]) -> None:
    folder = folders("Qwen3-VL-2B-Instruct")
    config = Description.read(folder).config
    text = {**config["text_config"], "num_hidden_layers": 2}
    description = Description.of(folder, {**config, "text_config": text})
    with pytest.raises(ModelLoadError, match=r"3 layers .deepstack_visual_indexes., and the decoder has 2"):
        description.spec(Checkpoint(folder, description.rename))


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def test_frames_of_a_video_stand_behind_their_times(preparers: Callable[[str], RequestPreparer]) -> None:
    preparer = preparers("Qwen3-VL-2B-Instruct")
    frames = [noise(320, 240)] * 5
    content = [{"type": "video", "video": frames, "fps": 2}, {"type": "text", "text": "What?"}]
    prompt = preparer.chat([{"role": "user", "content": content}], allow_local=True)
    [span] = prompt.images
    assert span.image.grid == (3, 8, 10)
    text = text_of(preparer, prompt.token_ids)
    shown = "".join(
        f"<{time} seconds><|vision_start|>{'<|video_pad|>' * 80}<|vision_end|>" for time in ("0.2", "1.2", "2.0")
    )
    assert text == f"<|im_start|>user\n{shown}What?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.token_ids.count(VISION_START) == prompt.token_ids.count(VISION_END) == 3
    assert prompt.token_ids.count(VIDEO) == span.image.num_embeddings == 240
    small = preparer.chat([{"role": "user", "content": [{**content[0], "max_pixels": 40_000}]}], allow_local=True)
    assert small.images[0].image.grid is not None
    _, rows, columns = small.images[0].image.grid
    assert 20_000 < rows * columns * 32**2 <= 40_000, "each frame has at most so many pixels"


def test_tool_results_may_show_images(preparers: Callable[[str], RequestPreparer]) -> None:
    preparer = preparers("Qwen3-VL-2B-Instruct")
    assert preparer.answers.tool_form.native
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "image", "image": noise(256, 256)}]},
    ]
    prompt = preparer.chat(messages, allow_local=True)
    [span] = prompt.images
    assert text_of(preparer, prompt.token_ids[: span.start]) == (
        '<|im_start|>user\nLook.<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n<|vision_start|>"
    )

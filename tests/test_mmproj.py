"""Pairs of GGUF files, a language model and its vision tower, against the checkpoints that they were made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import MistralConfig, Qwen3Config
from typer.testing import CliRunner

from tests.checkpoints import (
    make_gemma3,
    make_idefics3,
    make_internvl,
    make_llava,
    make_llava_next,
    make_mistral3,
    make_pixtral,
    make_qwen_vl,
)
from tests.lfm2_checkpoints import make_lfm2_vl
from tests.minicpmv_checkpoints import make_minicpmv
from tests.mmproj_files import write_pair
from tests.ocr_checkpoints import make_glm_ocr, make_paddleocr
from vlmserve import LLM, SamplingParams
from vlmserve.cli import app
from vlmserve.gguf.pair import make_pair
from vlmserve.gguf_header import FLOAT32, read_header
from vlmserve.models.gguf_tensors import GGUFFile
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.registry import load_model
from vlmserve.models.vision.qwen import QwenVisionTower

LARGE_TOWER = {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"}
"""As InternVL3-38B and 78B have it."""


LFM2_SQUARES = {"encoder_patch_size": 4, "downsample_factor": 2}
"""Other settings of the image processor are those of the published checkpoints."""


def make_named_internvl(folder: Path, **options: Any) -> Path:
    """With the placeholder that published checkpoints have."""
    make_internvl(folder, **options)
    return renamed(folder, "<IMG_CONTEXT>")


def renamed(folder: Path, placeholder: str) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "processor_config.json"):
        (folder / name).write_text((folder / name).read_text().replace("<image>", placeholder))
    return folder


MAKERS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "LLaVA": ("llava", make_llava),
    "LLaVA with features of several layers": (
        "llava",
        lambda folder: make_llava(folder, vision_feature_layer=[-2, 1], vision={"hidden_act": "gelu"}),
    ),
    "LLaVA 1.6": (
        "llava_next",
        lambda folder: make_llava_next(folder, image_grid_pinpoints=[[16, 32], [32, 16], [32, 32], [16, 48]]),
    ),
    "Qwen2-VL": ("qwen2_vl", lambda folder: make_qwen_vl(folder, "qwen2_vl")),
    "Qwen2.5-VL": ("qwen2_5_vl", lambda folder: make_qwen_vl(folder, "qwen2_5_vl")),
    "Qwen3-VL": ("qwen3_vl", lambda folder: make_qwen_vl(folder, "qwen3_vl")),
    "Qwen3.5": ("qwen3_5", lambda folder: make_qwen_vl(folder, "qwen3_5")),
    "SmolVLM": ("idefics3", lambda folder: make_idefics3(folder, family="SmolVLM")),
    "InternVL": ("internvl", make_named_internvl),
    "LFM2-VL": ("lfm2_vl", lambda folder: make_lfm2_vl(folder, settings=LFM2_SQUARES)),
    "MiniCPM-V 4.6": ("minicpmv", lambda folder: make_minicpmv(folder, settings={"max_slice_nums": 9})),
    "InternVL over Qwen3, with a tower of the other kind": (
        "internvl on qwen3",
        lambda folder: make_named_internvl(folder, text_class=Qwen3Config, text={"head_dim": 8}, vision=LARGE_TOWER),
    ),
    "Pixtral": ("pixtral", lambda folder: renamed(make_pixtral(folder, vision={"hidden_act": "silu"}), "[IMG]")),
    "Mistral Small 3": (
        "pixtral",
        lambda folder: renamed(make_mistral3(folder, text_class=MistralConfig, vision={"hidden_act": "gelu"}), "[IMG]"),
    ),
    "Ministral 3": (
        "pixtral on ministral3",
        lambda folder: renamed(make_mistral3(folder, vision={"hidden_act": "silu"}), "[IMG]"),
    ),
    "Gemma 3": ("gemma3", make_gemma3),
    "GLM-OCR": ("glm_ocr", make_glm_ocr),
    "PaddleOCR-VL": ("paddleocr_vl", make_paddleocr),
}
UNSAID: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"image_min_pixels": 16 * 16, "image_max_pixels": 48 * 48},
    "qwen2_5_vl": {"image_min_pixels": 16 * 16, "image_max_pixels": 48 * 48, "window_size": 16},
    "qwen3_vl": {"image_min_pixels": 16 * 16, "image_max_pixels": 48 * 48},
    "qwen3_5": {"image_min_pixels": 16 * 16, "image_max_pixels": 48 * 48},
    "glm_ocr": {"image_min_pixels": 16 * 16, "image_max_pixels": 48 * 48},
    "idefics3": {"preproc_image_size": 48},
    "internvl": {"preproc_max_tiles": 8},
    "internvl on qwen3": {"preproc_max_tiles": 8},
}
PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
    return Image.fromarray(levels).resize((width, height))


def question(*parts: str | Image.Image) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return [{"role": "user", "content": content}]


CONVERSATIONS = [
    question(noise(60, 45), "What is this?"),
    question("Which is larger:", noise(30, 70, 1), "or", noise(64, 20, 2)),
    question("How many green triangles are there?"),
]


def llm(model: Path, mmproj: Path | None = None, **options: Any) -> LLM:
    settings = {"dtype": "float32", "kv_cache_memory": "16MiB", **options}
    return LLM(str(model), **settings, **({} if mmproj is None else {"mmproj": str(mmproj)}))


def assert_same_answers(ours: LLM, theirs: LLM, tolerance: float = 1e-5) -> None:
    """Of prompts, pixels, tokens and log probabilities."""
    for conversation in CONVERSATIONS:
        a, b = (one.preparer.chat(conversation, allow_local=True) for one in (ours, theirs))
        assert a.token_ids == b.token_ids
        for own, other in zip(a.images, b.images, strict=True):
            assert np.array_equal(own.image.pixels, other.image.pixels)
            assert own.image.num_tokens > 1
    for a, b in zip(*(one.chat(CONVERSATIONS, PARAMS, False) for one in (ours, theirs)), strict=True):
        [own], [other] = a.outputs, b.outputs
        assert own.token_ids == other.token_ids
        assert own.logprobs is not None
        assert other.logprobs is not None
        for ranked, expected in zip(own.logprobs, other.logprobs, strict=True):
            assert ranked.keys() == expected.keys()
            for token, logprob in ranked.items():
                assert abs(logprob.logprob - expected[token].logprob) < tolerance


@pytest.mark.parametrize(("kind", "make"), MAKERS.values(), ids=MAKERS)
def test_a_pair_answers_as_its_checkpoint_does(tmp_path: Path, kind: str, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path / "folder")
    # What files of this kind do not say is as published, which small images make nothing of.
    metadata = {f"clip.vision.{name}": value for name, value in UNSAID.get(kind, {}).items()}
    files = write_pair(folder, tmp_path / "pair", kind, metadata=metadata)
    ours, theirs = llm(*files), llm(folder)
    assert_same_answers(ours, theirs)
    own_videos = [one.preparer.media.video_processor is not None for one in (ours, theirs)]
    assert own_videos == [kind.startswith(("qwen", "glm"))] * 2


@pytest.mark.parametrize(("kind", "make"), [("glm_ocr", make_glm_ocr), ("paddleocr_vl", make_paddleocr)])
def test_a_language_model_alone_answers_texts(tmp_path: Path, kind: str, make: Callable[[Path], Path]) -> None:
    files = write_pair(make(tmp_path / "folder"), tmp_path / "pair", kind)
    answers = [one.chat([CONVERSATIONS[2]], PARAMS, False)[0] for one in (llm(*files), llm(files.model))]
    assert answers[0].prompt_token_ids == answers[1].prompt_token_ids
    assert answers[0].outputs == answers[1].outputs


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "GLM-OCR"])
def test_videos_are_those_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    kind, make = MAKERS[name]
    folder = make(tmp_path / "folder")
    metadata = {f"clip.vision.{name}": value for name, value in UNSAID[kind].items()}
    files = write_pair(folder, tmp_path / "pair", kind, metadata=metadata)
    frames = [noise(40, 30, seed) for seed in range(4)]
    conversation = [
        {"role": "user", "content": [{"type": "video", "video": frames}, {"type": "text", "text": "What moves?"}]}
    ]
    a, b = (one.chat([conversation], PARAMS, False)[0] for one in (llm(*files), llm(folder)))
    assert a.prompt_token_ids == b.prompt_token_ids
    assert a.outputs == b.outputs


@pytest.mark.parametrize("types", ["F16", "Q8_0"])
def test_rounded_file_values_are_computed_with(tmp_path: Path, types: str) -> None:
    folder = make_qwen_vl(tmp_path / "folder", "qwen2_vl")
    metadata = {f"clip.vision.{name}": value for name, value in UNSAID["qwen2_vl"].items()}
    files = write_pair(folder, tmp_path / "pair", "qwen2_vl", types=types, metadata=metadata)
    assert any(info.type != FLOAT32 for info in read_header(files.mmproj).tensors.values())
    assert_same_answers(llm(*files), llm(folder))


def test_weights_of_four_bits_stay_packed(tmp_path: Path) -> None:
    folder = make_qwen_vl(tmp_path / "folder", "qwen2_vl")
    files = write_pair(folder, tmp_path / "pair", "qwen2_vl", types="Q4_0")
    name = "visual.blocks.0.attn.qkv.weight"
    file = GGUFFile(files.mmproj)
    packed = file.quantized(name)
    assert packed is not None, "of three tensors in the file"
    assert torch.equal(packed.dequantize(), file.get_tensor(name))
    assert torch.equal(file.get_slice(name)[30:70], file.get_tensor(name)[30:70])
    loaded = load_model(make_pair(*files), LoadSettings(device=torch.device("cpu"), dtype=torch.bfloat16))
    assert isinstance(loaded.vision, QwenVisionTower)
    assert loaded.vision.blocks[0].attn.qkv.bits == 4


def test_first_llava_files_lack_template_and_token(tmp_path: Path) -> None:
    folder = make_llava(tmp_path / "folder")
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text().replace("<image>", "<other>"))
    files = write_pair(folder, tmp_path / "pair", "llava", text_metadata={"tokenizer.chat_template": None})
    ours = llm(*files)
    prompt = ours.preparer.chat(CONVERSATIONS[0], allow_local=True)
    text = ours.preparer.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    assert text == f"<s>USER: {'<unk>' * 9}\nWhat is this? ASSISTANT:"
    [result] = ours.chat([CONVERSATIONS[0]], PARAMS, False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "image_token_index": 0}))
    (folder / "chat_template.jinja").unlink()
    [expected] = llm(folder).chat([CONVERSATIONS[0]], PARAMS, False)
    assert result.prompt_token_ids == expected.prompt_token_ids
    assert result.outputs == expected.outputs


def test_commands_and_servers_take_both_files(tmp_path: Path) -> None:
    files = write_pair(make_llava(tmp_path / "folder"), tmp_path / "pair", "llava")
    noise(40, 40).save(tmp_path / "image.png")
    options = ["--model", str(files.model), "--mmproj", str(files.mmproj), "--max-tokens", "4", "--dtype", "float32"]
    arguments = ["ask", str(tmp_path / "image.png"), "How many?", *options]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout.strip()

"""What models are calibrated with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.blip import make_blip
from tests.checkpoints import make_llama, make_llava
from tests.moondream import make_moondream
from vlmserve.calibration.prompts import calibration_prompts
from vlmserve.cli import app
from vlmserve.errors import ConfigurationError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.models.hub import resolve_model
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import MediaConfig
from vlmserve.tools.perplexity import python_manual


def preparer_of(folder: Path) -> RequestPreparer:
    return RequestPreparer(folder, read_settings(MediaConfig, {}))


@pytest.fixture(scope="module")
def pixie() -> RequestPreparer:
    return preparer_of(resolve_model("pixie"))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "inner").mkdir(parents=True)
    for number, name in enumerate(("b.png", "inner/a.jpg")):
        Image.new("RGB", (40, 30), (number * 90, 20, 30)).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


def test_vision_model_gets_images_answers_and_text(pixie: RequestPreparer) -> None:
    prompts = calibration_prompts(None, pixie, 2000, 0.1)
    tokens = sum(len(prompt.token_ids) for prompt in prompts)
    assert 2000 <= tokens < 2700
    seeing = [prompt for prompt in prompts if prompt.images]
    assert 0.6 < sum(len(prompt.token_ids) for prompt in seeing) / tokens < 0.9
    assert len({span.image.key for prompt in seeing for span in prompt.images}) > 5
    assert [prompt.token_ids for prompt in calibration_prompts(None, pixie, 2000, 0.1)] == [
        prompt.token_ids for prompt in prompts
    ]


@pytest.mark.parametrize("image_weight", [0.0, 0.1, 1.0])
def test_the_manual_counts_for_a_tenth_beside_conversations(pixie: RequestPreparer, image_weight: float) -> None:
    counted = {"conversations": 0.0, "manual": 0.0}
    manual = [pixie.tokens(piece).token_ids for piece in _pieces(pixie.encode(python_manual())[-1000:])]
    for prompt, weight in calibration_prompts(None, pixie, 1000, image_weight).items():
        of_images = sum(span.end - span.start for span in prompt.images)
        kind = "manual" if prompt.token_ids in manual else "conversations"
        counted[kind] += weight * (len(prompt.token_ids) - (1 - image_weight) * of_images)
    assert counted["manual"] / sum(counted.values()) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["caption", "question", "moondream"])
def test_single_image_model_gets_questions_with_answers(tmp_path: Path, kind: str) -> None:
    folder = make_moondream(tmp_path)[0] if kind == "moondream" else make_blip(tmp_path, kind)
    prompts = calibration_prompts(None, preparer_of(folder), 100, 0.1)
    assert set(prompts.values()) == {1.0}
    lengths = [len(prompt.token_ids) + (len(prompt.cross.token_ids) if prompt.cross else 0) for prompt in prompts]
    assert sum(lengths[:-1]) < 100 <= sum(lengths)
    assert all(prompt.num_images == 1 for prompt in prompts)
    if kind == "question":
        assert all(prompt.cross is not None and prompt.cross.token_ids for prompt in prompts)
        assert all(len(prompt.token_ids) > 1 for prompt in prompts)


def test_calibration_text_is_disjoint_from_perplexity_text(tmp_path: Path) -> None:
    preparer = preparer_of(make_llama(tmp_path))
    prompts = calibration_prompts(None, preparer, 1200, 0.1)
    pieces = [preparer.tokens(piece).token_ids for piece in _pieces(preparer.encode(python_manual())[-1200:])]
    assert [prompt.token_ids for prompt in prompts] == pieces
    assert set(prompts.values()) == {1.0}


def _pieces(ids: list[int]) -> list[list[int]]:
    return [ids[first : first + 512] for first in range(0, len(ids), 512)]


def test_load_test_files_give_prompts(pixie: RequestPreparer, images: Path) -> None:
    lines = [
        {"prompt": "What is in the image?", "images": ["b.png"], "max_tokens": 5},
        {"messages": [{"role": "user", "content": "Hello"}]},
    ]
    file = images / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second = calibration_prompts(str(file), pixie, 10**6, 0.1)
    assert len(first.images) == 1
    assert not second.images
    assert len(calibration_prompts(str(file), pixie, 5, 0.1)) == 1


def test_prompts_are_made_of_a_folder_of_images(pixie: RequestPreparer, images: Path) -> None:
    prompts = calibration_prompts(str(images), pixie, 10**6, 0.1)
    assert [len(prompt.images) for prompt in prompts] == [1, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no images in the folder"),
        ("", "the file is empty"),
        ('{"prompt": "a", "images": ["nowhere.png"]}', "line 1: the image .*nowhere.png cannot be read"),
        ('{"max_tokens": 3}', "line 1: needs either prompt or messages"),
        ('{"messages": [{"role": "nobody", "content": "a"}]}', "line 1: .*role"),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, pixie: RequestPreparer, content: str | None, message: str
) -> None:
    source = tmp_path / "source"
    if content is None:
        source.mkdir()
    else:
        source.write_text(content)
    with pytest.raises(ConfigurationError, match=f"--calibration {source}.*{message}"):
        calibration_prompts(str(source), pixie, 100, 0.1)


def test_text_model_rejects_images(tmp_path: Path, images: Path) -> None:
    with pytest.raises(ConfigurationError, match="takes no images"):
        calibration_prompts(str(images), preparer_of(make_llama(tmp_path / "model")), 100, 0.1)


def test_the_command_calibrates(tmp_path: Path) -> None:
    text = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1}
    folder, out = make_llava(tmp_path / "plain", text=text, vision={"intermediate_size": 64}), tmp_path / "out"
    line = ["quantize", str(folder), str(out), "--method", "gptq", "--bits", "4", "--group-size", "32", "--vision"]
    result = CliRunner().invoke(app, [*line, "--calibration-tokens", "200"])
    assert result.exit_code == 0, result.output
    assert re.search(r"0\.\d MB of weights became 0\.\d MB", result.stdout)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert {group["weights"]["num_bits"] for group in config["config_groups"].values()} == {4, 8}

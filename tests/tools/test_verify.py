"""What `vlmserve verify` says of checkpoints that are alike, and of ones that are not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import ExifTags, Image

from tests.blip import make_blip
from tests.checkpoints import change_config, make_llava, make_text_model
from vlmserve.cli.verify import read_images, run_verify
from vlmserve.errors import ConfigurationError, UnsupportedModelError
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import EngineConfig
from vlmserve.tools.verify import Answer, Ours, Theirs, compare

CPU = torch.device("cpu")
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "How many green triangles are there?"}]


def settings(folder: Path, **options: Any) -> EngineConfig:
    return read_settings(EngineConfig, {"model": str(folder), "kv_cache_memory": "8MiB", "device": "cpu", **options})


def answer(prompt: list[int], tokens: list[int], likeliest: float = 3.0) -> Answer:
    """Logits of 10 tokens, of which the answer's have `likeliest` and all others up to 1."""
    logits = torch.linspace(-1, 1, 10).repeat(len(tokens), 1)
    logits[range(len(tokens)), tokens] = likeliest
    return Answer(prompt, tokens, logits)


def test_what_is_equal_is_the_same() -> None:
    comparison = compare(answer([1, 2], [3, 4]), answer([1, 2], [3, 4]), 1e-3)
    assert (comparison.verdict, comparison.error, comparison.place) == ("same", 0, 2)


@pytest.mark.parametrize("prompt", [[1, 9], [1], [1, 2, 5]])
def test_another_prompt_is_named_first(prompt: list[int]) -> None:
    comparison = compare(answer(prompt, [3, 4]), answer([1, 2], [3, 4]), 1e-3)
    assert comparison.verdict == "other prompt"
    assert comparison.prompt_place == (2 if len(prompt) == 3 else 1)


def test_far_logits_are_found_behind_equal_tokens() -> None:
    assert compare(answer([1], [3, 4], 3.2), answer([1], [3, 4]), 1e-3).verdict == "other logits"
    assert compare(answer([1], [3, 4], float("nan")), answer([1], [3, 4]), 1e-3).verdict == "other logits"


def test_nearly_as_likely_tokens_may_swap() -> None:
    ours, theirs = answer([1], [3, 4, 5]), answer([1], [3, 6, 7])
    theirs.logits[1] = ours.logits[1]
    theirs.logits[1, 6] = ours.logits[1, 4] + 1e-4
    comparison = compare(ours, theirs, 1e-1)
    assert comparison.verdict == "other logits"
    ours.logits[1, 6] = ours.logits[1, 4] - 1e-4
    comparison = compare(ours, theirs, 1e-1)
    assert (comparison.verdict, comparison.place) == ("near tie", 1)


def test_an_unlikely_token_is_no_near_tie() -> None:
    theirs = answer([1], [3, 4])
    ours = msgspec.structs.replace(theirs, token_ids=[3, 6])
    assert compare(ours, theirs, 1e-3).verdict == "other tokens"


def test_a_checkpoint_that_sees_agrees_with_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_llava(tmp_path / "model")
    assert run_verify(settings(folder), None, 5)
    shown = capsys.readouterr().out
    assert shown.count("the same tokens") == 5
    assert "LlavaForConditionalGeneration, float32" in shown
    (tmp_path / "images").mkdir()
    with pytest.raises(ConfigurationError, match="holds no images"):
        run_verify(settings(folder), tmp_path / "images", 5)
    Image.new("RGB", (50, 30), "red").save(tmp_path / "images" / "red.png")
    assert run_verify(settings(folder), tmp_path / "images", 5)
    assert "red.png" in capsys.readouterr().out


def test_model_without_chat_template_gets_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_text_model(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    assert run_verify(settings(folder), None, 3)
    assert "the same tokens" in capsys.readouterr().out


def test_images_of_all_formats_are_read_upright(tmp_path: Path) -> None:
    wide = Image.new("RGB", (40, 30), "red")
    wide.save(tmp_path / "a.png")
    wide.save(tmp_path / "b.avif")
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    wide.save(tmp_path / "c.jpg", exif=turned)
    (tmp_path / "notes.txt").write_text("no image")
    sizes = {name: image.size for name, image in read_images(tmp_path).items()}
    assert sizes == {"a.png": (40, 30), "b.avif": (40, 30), "c.jpg": (30, 40)}


def test_another_checkpoint_is_told_from_this_one(tmp_path: Path) -> None:
    folder = make_text_model(tmp_path / "one")
    other = make_text_model(tmp_path / "other", seed=1)
    ours, theirs = (
        Ours(settings(folder, dtype="float32"), folder),
        Theirs(other, takes_images=False, dtype=torch.float32, device=CPU),
    )
    assert compare(ours.answer(QUESTION, 5), theirs.answer(QUESTION, 5), 1e-3).verdict == "other logits"


def test_a_wrong_template_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_text_model(tmp_path / "model")
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    template = changed / "chat_template.jinja"
    template.write_text(template.read_text() + "!")
    monkeypatch.setattr("vlmserve.cli.verify.Theirs", lambda _, **options: Theirs(changed, **options))
    assert not run_verify(settings(folder), None, 3)
    assert "template, tokenizer or image size" in " ".join(capsys.readouterr().out.split())


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    folder = make_text_model(tmp_path / "model")
    with pytest.raises(ConfigurationError, match="takes none"):
        run_verify(settings(folder), tmp_path, 5)
    change_config(folder, model_type="unheard-of")
    with pytest.raises(UnsupportedModelError, match="transformers cannot load"):
        Theirs(folder, takes_images=False, dtype=torch.float32, device=CPU)
    with pytest.raises(UnsupportedModelError, match="without a chat template"):
        Theirs(make_blip(tmp_path / "blip"), takes_images=True, dtype=torch.float32, device=CPU)

"""The recipe from end to end, for a few steps, and its modules beside transformers'."""

from __future__ import annotations

import json
import random
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlavaForConditionalGeneration

from training.pixie import optimizer, train
from training.pixie.export import IMAGE_TOKENS, export, export_tokenizer
from training.pixie.labels import GRID, LABELS, dense_labels
from training.pixie.model import Decoder, Tower, hugging_face_names
from training.pixie.optimizer import Muon, Optimizer
from training.pixie.precision import autocast
from training.pixie.rows import BROAD, COUNTING, PADDING_GROUP, READING, RowMaker, pack, squash
from training.pixie.tokenizer import IMAGE, train_tokenizer
from vlmserve.pixie.scenes import sample_scene
from vlmserve.pixie.vocabulary import COLOURS, SHAPES


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(2000)


def test_every_item_and_character_has_its_labels():
    for seed in range(60):
        scene = sample_scene(seed)
        labels = dense_labels(scene)
        assert labels.shape == (len(LABELS), GRID, GRID)
        things = len(scene.items) or len(scene.writing.text)
        by_name = {kind.name: labels[row] for row, kind in enumerate(LABELS)}
        assert set(np.unique(by_name["rank"])) - {0} <= set(range(1, things + 1))
        assert all(by_name[kind.name].max() < kind.num_classes for kind in LABELS)
        if scene.kind == "grid":
            assert len(np.unique(by_name["rank"])) == things + 1


def test_ranks_and_counts_of_alike_items_agree():
    for seed in range(60):
        scene = sample_scene(seed, "grid")
        labels = {kind.name: row for kind, row in zip(LABELS, dense_labels(scene), strict=True)}
        for item in scene.items:
            colour, shape = (labels["colour"] == COLOURS.index(item.colour) + 1), labels["shape"]
            shape = shape == SHAPES.index(item.shape) + 1
            assert labels["rank of colour"][colour].max() == sum(i.colour == item.colour for i in scene.items)
            assert labels["rank of shape"][shape].max() == sum(i.shape == item.shape for i in scene.items)
            alike = sum((i.colour, i.shape) == (item.colour, item.shape) for i in scene.items)
            assert labels["rank of both"][colour & shape].max() == alike
            for kind, where in (("colour", colour), ("shape", shape), ("both", colour & shape)):
                assert set(labels[f"count of {kind}"][where]) == {labels[f"rank of {kind}"][where].max()}


def test_branches_see_the_prefix_and_themselves():
    row = pack([([1, 2], [([5, 6], [False, True]), ([7], [True])]), ([], [([8, 9], [False, True])])])
    assert row["tokens"][:8].tolist() == [1, 2, 5, 6, 7, 8, 9, 0]
    assert row["positions"][:7].tolist() == [0, 1, 2, 3, 2, 0, 1]
    assert row["groups"][:8].tolist() == [0, 0, 0, 0, 0, 1, 1, PADDING_GROUP]
    assert row["branches"][:7].tolist() == [0, 0, 1, 1, 2, 1, 1]
    assert row["said"][:7].tolist() == [False, False, False, True, True, False, True]


@pytest.mark.parametrize("mixture", [BROAD, COUNTING, READING])
def test_rows_come_with_the_images_of_their_placeholders(tokenizer, mixture):
    maker = RowMaker(tokenizer, mixture)
    for seed in range(40):
        rng = random.Random(seed)
        scenes = maker.scenes(seed, rng)
        groups, images = maker.row(scenes, 0, rng)
        count = int((pack(groups)["tokens"] == IMAGE).sum())
        assert count % IMAGE_TOKENS == 0
        assert count // IMAGE_TOKENS <= len(images)
        assert all(index < len(scenes) for index in images)


def test_trained_modules_equal_the_exported_model(tmp_path, tokenizer):
    torch.manual_seed(0)
    tower, decoder = Tower(), Decoder()
    scene = sample_scene(3, "grid")
    image = torch.from_numpy(squash(scene).copy())[None]
    with torch.no_grad():
        for parameter in (*tower.parameters(), *decoder.parameters()):
            parameter.add_(torch.randn_like(parameter) * 0.02)
    state = hugging_face_names(tower.state_dict(), decoder.state_dict())
    export(tmp_path, {name: tensor.bfloat16() for name, tensor in state.items()}, tokenizer)
    theirs = LlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        for module in (tower, decoder):
            for parameter in module.parameters():
                parameter.copy_(parameter.bfloat16())
    tokens = torch.tensor([[1, 4, *[IMAGE] * IMAGE_TOKENS, 50, 51, 52, 5, 60]])
    length = tokens.shape[1]
    zeros = torch.zeros_like(tokens)
    with torch.no_grad():
        everything = torch.ones_like(tokens, dtype=torch.bool)
        ours = decoder(tokens, torch.arange(length)[None], zeros, zeros, tower(image), everything)
        pixels = image.permute(0, 3, 1, 2).float() / 127.5 - 1
        expected = theirs(input_ids=tokens, pixel_values=pixels).logits[0]
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=1e-3)


def test_a_run_trains_saves_resumes_and_exports(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(train, "TOWER_BATCH", 4)
    monkeypatch.setattr(train, "MODEL_BATCH", 2)
    # Products of bfloat16 take most of a step where the processor has none.
    monkeypatch.setattr(optimizer, "MUON_ITERATIONS", 0)
    tmp_path.joinpath("tokenizer.json").write_text(tokenizer.to_str())

    def run(*steps: int) -> None:
        names = ("--tower-steps", "--model-steps", "--counting-steps", "--reading-steps")
        arguments = ["--out", str(tmp_path), "--pool", "30"]
        arguments += [word for name, count in zip(names, steps, strict=True) for word in (name, str(count))]
        monkeypatch.setattr(sys, "argv", ["train", *arguments, "--device", "cpu"])
        train.main()

    run(1, 1, 0, 0)
    first = torch.load(tmp_path / "state.pt")
    assert (first["tower_steps"], first["model_steps"]) == (1, 1)
    run(1, 3, 1, 1)
    second = torch.load(tmp_path / "state.pt")
    assert second["model_steps"] == 3
    before, after = (state["decoder"]["originals"]["embeddings.weight"] for state in (first, second))
    assert not torch.equal(before, after)
    assert (tmp_path / "export" / "model.safetensors").exists()
    assert json.loads((tmp_path / "export" / "config.json").read_text())["model_type"] == "llava"


@pytest.mark.parametrize(("hardware", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_parameters_have_the_fast_dtype(hardware, expected, monkeypatch):
    monkeypatch.setattr("training.pixie.precision.multiplies_bfloat16", lambda: hardware)
    layer = torch.nn.Linear(4, 4)
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    # Muon trains the weight, and AdamW the bias.
    optimizer = Optimizer(torch.nn.ModuleDict({"project": layer}), 0.1)
    layer(torch.ones(1, 4, dtype=expected)).sum().backward()
    optimizer.step(1.0, 0.5)
    for name, parameter in layer.named_parameters():
        original = optimizer.originals[f"project.{name}"]
        assert parameter.dtype == expected
        assert original.dtype == torch.float32
        assert torch.equal(parameter, original.to(expected))
        assert not torch.equal(parameter, before[name].to(expected))
    with autocast():
        assert torch.is_autocast_enabled("cpu") == hardware


def test_muon_equals_the_one_of_torch(monkeypatch):
    monkeypatch.setattr("training.pixie.optimizer.parameter_dtype", lambda device: torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for shape in ((40, 24), (24, 40)):
        first = torch.randn(shape, generator=generator)
        ours, theirs = (torch.nn.Parameter(first.clone()) for _ in range(2))
        optimizers = (
            Muon([ours], lr=0.01, weight_decay=0.01),
            torch.optim.Muon([theirs], lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        )
        for _ in range(3):
            gradient = torch.randn(shape, generator=generator)
            for parameter, each in zip((ours, theirs), optimizers, strict=True):
                parameter.grad = gradient.clone()
                each.step()
        assert torch.equal(ours, theirs)


def test_exported_tokenizer_equals_the_trained_one(tmp_path, tokenizer):
    export_tokenizer(tmp_path, tokenizer)
    saved = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert saved.get_vocab() == tokenizer.get_vocab()

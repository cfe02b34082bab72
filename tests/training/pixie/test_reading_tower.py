"""The tower that reads: its labels, its modules beside transformers', and a run that resumes."""

from __future__ import annotations

import sys

import numpy as np
import torch
from transformers import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from training.pixie import optimizer
from training.pixie.reading import batches, train_tower
from training.pixie.reading.batches import PHASES, draw_image
from training.pixie.reading.labels import (
    FIRST_OF_MAP,
    IGNORED,
    MOST_RANKS,
    READING_LABELS,
    SLOTS,
    patch_labels,
    truth_of_document,
    truth_of_scene,
)
from training.pixie.reading.rows import see
from training.pixie.reading.tower import ReadingTower
from training.pixie.reading.weights import tower_names, vision_config
from vlmserve.pixie.documents import PATCH, Style, sample_document
from vlmserve.pixie.printed_text import CHARACTERS
from vlmserve.pixie.scenes import sample_scene


def test_patches_name_characters_whose_centres_they_have():
    document = sample_document(4, "page", (160, 128), Style((20, 30)))
    truth = truth_of_document(document)
    shift, grid = (3, 5), (7, 9)
    labels = patch_labels(truth.maps[None], truth.characters[None], shift, grid)[:, 0]
    found = {}
    for line in document.lines:
        texts = zip(line.text, " " + line.text, line.boxes, strict=False)
        for character, before, (left, top, right, bottom) in texts:
            x, y = int((left + right) / 2) - shift[0], int((top + bottom) / 2) - shift[1]
            inside = x >= 0 and y >= 0 and x < grid[1] * PATCH and y < grid[0] * PATCH
            if character != " " and inside:
                found.setdefault((y // PATCH, x // PATCH), []).append((x, character, before))
    for (row, column), characters in found.items():
        expected = [CHARACTERS.index(character) + 1 for _, character, _ in sorted(characters)][:SLOTS]
        assert labels[: len(expected), row, column].tolist() == expected
        *_, before = min(characters)
        assert labels[FIRST_OF_MAP - 1, row, column] == (CHARACTERS + " ").index(before) + 1
    assert np.count_nonzero(labels[0]) == len(found)


def test_scenes_have_labels_of_every_kind():
    kinds = np.array([kind.num_classes for kind in READING_LABELS])
    for seed in range(30):
        scene = sample_scene(seed)
        truth = truth_of_scene(scene, (152, 120))
        labels = patch_labels(truth.maps[None], truth.characters[None], (0, 0), (7, 9))
        assert (labels.max((1, 2, 3)) < kinds).all()
        shape = [kind.name for kind in READING_LABELS].index("shape")
        assert labels[shape].any()
        assert bool(labels[0].any()) == (scene.writing is not None)


def test_high_ranks_of_lines_are_not_learned():
    document = sample_document(1, "page", (448, 448))
    assert len(document.lines) > MOST_RANKS
    rank = [kind.name for kind in READING_LABELS].index("rank") - FIRST_OF_MAP
    assert set(np.unique(truth_of_document(document).maps[rank])) == {*range(MOST_RANKS + 1), IGNORED}


def test_the_tower_equals_the_one_of_transformers():
    torch.manual_seed(0)
    tower = ReadingTower()
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    theirs = Qwen3VLVisionModel(Qwen3VLVisionConfig(**vision_config())).eval()
    missing, unknown = theirs.load_state_dict(tower_names(tower.state_dict()), strict=False)
    assert not unknown
    assert all("merger" in name for name in missing)
    grids = [(6, 9), (7, 4)]
    images = [
        torch.randint(0, 256, (1, rows * PATCH, columns * PATCH, 3), dtype=torch.uint8) for rows, columns in grids
    ]
    patches = []
    for image, (rows, columns) in zip(images, grids, strict=True):
        pixels = (image[0].float() / 127.5 - 1).view(rows, PATCH, columns, PATCH, 3).permute(0, 2, 4, 1, 3)
        pixels = pixels.reshape(rows * columns, 3, 1, PATCH, PATCH).expand(-1, -1, 2, -1, -1)
        patches.append(pixels.reshape(rows * columns, -1))
    with torch.no_grad():
        sizes = torch.tensor([[1, *grid] for grid in grids])
        expected = theirs(torch.cat(patches), grid_thw=sizes).last_hidden_state
        ours = torch.cat([tower(image)[0] for image in images])
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_images_of_several_sizes_are_encoded_together():
    torch.manual_seed(1)
    tower = ReadingTower()
    with torch.no_grad():
        tower.positions.normal_(0, 0.3)
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (*size, 3), np.uint8) for size in ((96, 144), (112, 64), (96, 144), (144, 96))]
    with torch.no_grad():
        together = see(tower, images)
        alone = [tower(torch.from_numpy(image)[None])[0] for image in images]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_documents_are_labelled_in_their_shown_size():
    document = sample_document(4, "lines", (96, 80), Style((20, 30)))
    grid = (10, 12)
    truth = truth_of_document(document, (192, 160))
    labels = patch_labels(truth.maps[None], truth.characters[None], (0, 0), grid)[:, 0]
    line = document.lines[0]
    left, top, right, bottom = line.boxes[0]
    assert labels[0, int((top + bottom) / PATCH), int((left + right) / PATCH)] == CHARACTERS.index(line.text[0]) + 1


def test_items_are_labelled_with_their_places():
    kind = [kind.name for kind in READING_LABELS].index("place")
    for seed in range(30):
        scene = sample_scene(seed, "grid")
        truth = truth_of_scene(scene, (144, 144))
        places = {item.place + 1 for item in scene.items if item.place is not None}
        assert set(np.unique(truth.maps[kind - FIRST_OF_MAP])) - {0} == places


def test_a_tower_run_saves_and_resumes(tmp_path, monkeypatch):
    # Muon's products of bfloat16 take most of a step where the processor has none.
    monkeypatch.setattr(optimizer, "MUON_ITERATIONS", 0)
    monkeypatch.setattr(train_tower, "EVALUATED_PAGES", 1)
    monkeypatch.setattr(train_tower, "EVALUATED_SCENES", 1)

    def run(steps: int) -> dict[str, object]:
        arguments = ["--out", str(tmp_path), "--steps", str(steps), "--patches", "56", "--pool", "300"]
        monkeypatch.setattr(sys, "argv", ["train_tower", *arguments])
        train_tower.main()
        return torch.load(tmp_path / "tower.pt")

    first, second = run(1), run(2)
    assert (first["step"], second["step"]) == (1, 2)
    before, after = (state["tower"]["originals"]["patch.weight"] for state in (first, second))
    assert not torch.equal(before, after)


def test_every_phase_draws_its_images():
    for phase in PHASES:
        for seed in range(6):
            image, truth = draw_image(seed, (14, 14), phase)
            assert image.shape == (14 * PATCH + batches.SLACK, 14 * PATCH + batches.SLACK, 3)
            assert truth.maps.shape[1:] == (58, 58)

"""Scenes and their images."""

from __future__ import annotations

import pytest

from vlmserve.pixie.drawing import draw_scene
from vlmserve.pixie.scenes import HELD_OUT_SEEDS, LEAST_CONTRAST, Kind, place_of, sample_scene


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 17, HELD_OUT_SEEDS + 5])
def test_equal_seeds_give_equal_scenes_and_images(seed: int) -> None:
    one, other = sample_scene(seed), sample_scene(seed)
    assert one == other
    assert draw_scene(one).tobytes() == draw_scene(other).tobytes()


def test_different_seeds_give_different_scenes() -> None:
    assert len({sample_scene(seed) for seed in range(50)}) == 50


@pytest.mark.parametrize("kind", ["grid", "one", "number", "word"])
def test_scenes_hold_what_their_kind_says(kind: Kind) -> None:
    for seed in range(40):
        scene = sample_scene(seed, kind)
        assert scene.kind == kind
        if scene.writing is None:
            assert len(scene.items) == 1 if kind == "one" else 1 <= len(scene.items) <= 6
        else:
            assert not scene.items
            assert scene.writing.text.isdigit() if kind == "number" else scene.writing.text.isupper()


def test_grid_items_are_in_reading_order() -> None:
    for seed in range(60):
        scene = sample_scene(seed, "grid")
        places = [item.place for item in scene.items]
        assert places == sorted(set(places), key=places.index) == sorted(places, key=lambda place: place or 0)
        for item in scene.items:
            x, y = item.centre[0] / scene.size[0], item.centre[1] / scene.size[1]
            assert item.place == 3 * int(y * 3) + int(x * 3)


def test_items_stand_out_from_their_background() -> None:
    for seed in range(40):
        scene = sample_scene(seed, "one")
        item = scene.items[0]
        distance = sum((a - b) ** 2 for a, b in zip(item.rgb, scene.background, strict=True)) ** 0.5
        assert distance >= LEAST_CONTRAST
        if item.shape in ("circle", "square") and not scene.noise and scene.jpeg_quality is None:
            x, y = item.centre
            assert draw_scene(scene).getpixel((int(x), int(y))) == item.rgb


def test_a_centre_near_a_border_has_no_place() -> None:
    assert place_of(1 / 3 + 0.01, 0.5) is None
    assert place_of(0.5, 2 / 3 - 0.03) is None
    assert [place_of(x, y) for y in (0.1, 0.5, 0.9) for x in (0.1, 0.5, 0.9)] == list(range(9))

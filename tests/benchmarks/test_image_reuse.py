"""The benchmark sends what it says and counts what was encoded."""

from __future__ import annotations

import itertools
import json

import pytest

from benchmarks.image_reuse import image_file, main, reuse_workload, turns_workload


@pytest.mark.parametrize(("share", "different"), [(0.0, 20), (0.3, 14), (0.9, 2)])
def test_some_requests_reuse_the_previous_image(share, different):
    images = [conversation.turns[0][0] for conversation in reuse_workload(20, share, 32)]
    assert len(set(images)) == different
    changes = sum(one != other for one, other in itertools.pairwise(images))
    assert changes == different - 1, "equal images are next to each other"


def test_each_turn_brings_another_image():
    conversations = turns_workload(2, 3, 32)
    assert len({image for conversation in conversations for image, _ in conversation.turns}) == 6


def test_images_come_from_their_number():
    assert image_file(1, 32) == image_file(1, 32) != image_file(2, 32)


def test_with_caches_each_image_is_encoded_once(tmp_path):
    report = tmp_path / "report.json"
    main(
        ["--model", "pixie", "--requests", "6", "--reuse", "0", "0.5", "--turns", "3", "--answer-len", "2",
         "--image-side", "64", "--kv-cache-memory", "64MiB", "--json", str(report)]
    )  # fmt: skip
    rows = {(row["workload"], row["caches"]): row for row in json.loads(report.read_text())["rows"]}
    encoded = {name: row["images_encoded"] for name, row in rows.items()}
    assert encoded == {
        ("0% reuse", "off"): 6, ("0% reuse", "on"): 6,
        ("50% reuse", "off"): 6, ("50% reuse", "on"): 3,
        ("sent twice", "off"): 6, ("sent twice", "on"): 0,
        ("3 turns", "off"): 12, ("3 turns", "on"): 6,
    }  # fmt: skip
    assert rows["0% reuse", "on"]["cached_share"] < 0.2 < rows["sent twice", "on"]["cached_share"]

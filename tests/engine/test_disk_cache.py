"""Engines that start again with a disk cache: the same tokens, without the vision tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_parity import Oracle, engine_for, generate, llava_oracle, mixed_prompts
from tests.waiting import wait_until
from vlmserve.types import Prompt

pytestmark = pytest.mark.usefixtures("native_kernels")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return llava_oracle(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def prompts(llava: Oracle) -> list[Prompt]:
    return mixed_prompts(llava)


@pytest.fixture(scope="module")
def expected(llava: Oracle, prompts: list[Prompt]) -> list[list[int]]:
    return generate(engine_for(llava), prompts)


@pytest.fixture(scope="module")
def folder(
    llava: Oracle, prompts: list[Prompt], expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The disk cache of an engine that has answered all prompts."""
    folder = tmp_path_factory.mktemp("disk")
    first = engine_for(llava, disk_cache=str(folder))
    assert generate(first, prompts) == expected
    wait_until(lambda: first.stats().disk_written == first.stats().images_encoded)
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="batched"),
        pytest.param({"block_size": 4, "max_num_batched_tokens": 7}, id="chunked"),
        pytest.param({"enable_prefix_caching": False, "max_num_seqs": 1}, id="alone"),
        pytest.param({"max_encoded_images": 1, "step_seconds": 1e-6}, id="slow"),
    ],
)
def test_later_starts_encode_no_image_again(
    llava: Oracle, prompts: list[Prompt], expected: list[list[int]], folder: Path, settings: dict[str, Any]
) -> None:
    engine = engine_for(llava, disk_cache=str(folder), **settings)
    assert generate(engine, prompts) == expected
    stats = engine.stats()
    assert stats.images_encoded == 0
    assert stats.disk_hits > 0


def test_broken_files_are_encoded_again(
    llava: Oracle, prompts: list[Prompt], expected: list[list[int]], folder: Path
) -> None:
    for path in folder.glob("*.entry"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    engine = engine_for(llava, disk_cache=str(folder))
    assert generate(engine, prompts) == expected
    stats = engine.stats()
    assert stats.images_encoded == stats.disk_broken > 0
    wait_until(lambda: engine.stats().disk_written == stats.images_encoded)

"""Broken and hostile checkpoints: each either loads or fails with an error of ours that is a sentence."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_llava, make_text_model
from tests.gguf_files import write_gguf
from vlmserve.errors import ModelLoadError, VLMServeError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.registry import load_model
from vlmserve.settings.config import MediaConfig

NUMBERS: tuple[Any, ...] = (0, -1, 10**12, 2**63, 1.5, float("nan"), float("inf"), "7", "x", None, True, [], [1], {})
SAMPLE = 20
"""Mutations of each kind; any number of seeds may be tried by hand."""
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "generation_config.json")


def load(path: Path) -> None:
    """What a server does with a checkpoint before it answers."""
    load_model(path, LoadSettings(device=torch.device("cpu"), dtype=torch.float32, kernels="torch"))
    RequestPreparer(path, MediaConfig())


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in JSON."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node[:3]) if isinstance(node, list) else ()
    return [one for key, value in pairs for one in ((*path, key), *places(value, (*path, key)))]


def set_value(node: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value


def mutate_json(file: Path, rng: random.Random) -> str:
    content = json.loads(file.read_text())
    path, value = rng.choice(places(content)), rng.choice(NUMBERS)
    set_value(content, path, value)
    file.write_text(json.dumps(content))
    return f"{file.name} {path} = {value!r}"


def mutate_bytes(file: Path, rng: random.Random, first: int) -> str:
    """Change bytes among the first ones, or cut the file off."""
    data = bytearray(file.read_bytes())
    end = min(first, len(data))
    if rng.random() < 0.2:
        size = rng.randrange(len(data))
        file.write_bytes(data[:size])
        return f"{file.name} cut at {size}"
    changes = []
    for _ in range(rng.choice((1, 1, 2, 8))):
        place, kind = rng.randrange(end), rng.random()
        if kind < 0.5:
            data[place] = rng.randrange(256)
        else:
            data[place : place + 8] = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1)))
        changes.append((place, bytes(data[place : place + 8])))
    file.write_bytes(data)
    return f"{file.name} {changes}"


def mutate_folder(folder: Path, rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.75:
        files = [folder / name for name in FILES if (folder / name).is_file()]
        return mutate_json(rng.choice([files[0], files[0], *files]), rng)
    if kind < 0.85:
        return mutate_bytes(folder / "model.safetensors", rng, 4096)
    file = folder / rng.choice(FILES)
    if not file.is_file():
        return mutate_folder(folder, rng)
    if kind < 0.95:
        return mutate_bytes(file, rng, 10**6)
    file.unlink()
    return f"no {file.name}"


def check(path: Path, what: str) -> str | None:
    """What is wrong with how a mutated checkpoint fails, if anything is."""
    try:
        load(path)
    except VLMServeError as error:
        message = str(error)
        return None if len(message.split()) >= 3 else f"{what}: {message}"
    except Exception as error:
        return f"{what}: {type(error).__name__}: {error}"
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("llama")
    make_text_model(base)
    return write_gguf(base, base / "model.gguf")


def fuzz(source: Path, mutate: Callable[[Path, random.Random], str], seeds: range, tmp_path: Path) -> list[str]:
    found = []
    for seed in seeds:
        copy = tmp_path / f"{seed}{source.suffix}"
        if source.is_dir():
            shutil.copytree(source, copy)
        else:
            shutil.copy(source, copy)
        problem = check(copy, f"seed {seed}: {mutate(copy, random.Random(seed))}")
        if problem is not None:
            found.append(problem)
        shutil.rmtree(copy) if copy.is_dir() else copy.unlink()
    return found


SIZES = {
    "hidden_size": 2**40, "num_hidden_layers": 10**9, "vocab_size": 10**12, "intermediate_size": "64",
    "num_attention_heads": 0, "num_key_value_heads": -2, "max_position_embeddings": 1.5, "rms_norm_eps": float("nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_impossible_sizes_are_named(folder, tmp_path, name):
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"][name] = SIZES[name]
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=rf"config.json: {name} is .*; (allowed are|it must be)"):
        load(tmp_path)


def test_more_parameters_than_the_files_hold_are_rejected(folder, tmp_path):
    """The model would take 400 GB."""
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"intermediate_size": 2**24, "num_hidden_layers": 64}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"describes .* parameters, and the weight files have only"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a/../../model.safetensors", "a\0b"])
def test_an_index_names_no_outside_files(folder, tmp_path, name):
    shutil.copytree(folder, tmp_path / "copy")
    index = {"weight_map": {"lm_head.weight": name}}
    (tmp_path / "copy" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"outside of the checkpoint's folder|NUL"):
        load(tmp_path / "copy")


def test_mutated_folders_fail_with_a_sentence(folder, tmp_path):
    assert fuzz(folder, mutate_folder, range(SAMPLE), tmp_path) == []


def test_mutated_gguf_files_fail_with_a_sentence(file, tmp_path):
    assert fuzz(file, lambda path, rng: mutate_bytes(path, rng, 8000), range(SAMPLE), tmp_path) == []

"""Tokenizers of strangers: what they may take of the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.prompt.tokenizers_for_tests import byte_level, write_checkpoint
from vlmserve.errors import InvalidRequestError, ModelLoadError
from vlmserve.prompt import files, tokenizer_limits
from vlmserve.prompt.checkpoint import read_prompt_files
from vlmserve.prompt.tokenizer import Tokenizer

SLOW = {"Regex": "(?=(a*a*a*[xy]))a"}
"""Takes seconds for 400 characters and hours for 5,000."""
SPLIT = {"type": "Split", "pattern": SLOW, "behavior": "Isolated", "invert": False}
REPLACE = {"type": "Replace", "pattern": SLOW, "content": "b"}
ONE = {**REPLACE, "pattern": {"Regex": "a"}}
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, byte_level())


def change(folder: Path, **fields: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def normalizers(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": steps}}


@pytest.mark.parametrize(
    "fields",
    [
        {"pre_tokenizer": SPLIT},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT]}},
        {"normalizer": REPLACE},
        {"decoder": REPLACE},
    ],
    ids=["split", "sequence", "normalizer", "decoder"],
)
def test_slow_pattern_is_rejected_by_name(folder: Path, fields: dict[str, Any]) -> None:
    change(folder, **fields)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: the pattern .* may take very long") as caught:
        Tokenizer.from_folder(folder)
    assert SLOW["Regex"] in str(caught.value)
    assert len(str(caught.value)) <= 140


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (normalizers(*[DOUBLE] * 12), "1,000 times longer"),
        ({"normalizer": {**DOUBLE, "pattern": {"Regex": ""}, "content": "a" * 2000}}, "1,000 times longer"),
        (normalizers(*[ONE] * 65), "65 patterns"),
        ({"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9}}, "per_word is 1,000,000,000"),
    ],
    ids=["doubling", "long replacement", "many patterns", "long words"],
)
def test_unbounded_steps_are_rejected(folder: Path, fields: dict[str, Any], message: str) -> None:
    change(folder, **fields)
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_folder(folder)


def test_added_tokens_are_counted_before_parsing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(_: bytes) -> Backend:
        raise AssertionError("parsed")

    monkeypatch.setattr(tokenizer_limits, "MAX_ADDED_TOKENS", 3)
    monkeypatch.setattr("tokenizers.Tokenizer.from_buffer", parse)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json adds \d+ tokens; at most 3"):
        Tokenizer.from_folder(folder)


def test_declared_tokens_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(folder, added_tokens=[])
    config = {"added_tokens_decoder": {str(id_): {"content": f"<{id_}>"} for id_ in range(4)}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(tokenizer_limits, "MAX_ADDED_TOKENS", 3)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json adds 4 tokens; at most 3"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "merges.txt", "qwen.tiktoken", "tokenizer.model"])
def test_large_file_is_rejected_unread(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(300 * 2**20)  # takes no space
    with pytest.raises(ModelLoadError, match=f"{name} has 300 MiB; a tokenizer's file has at most 256 MiB"):
        Tokenizer.from_folder(folder)


def test_large_settings_are_rejected_unread(folder: Path) -> None:
    with (folder / "tokenizer_config.json").open("wb") as file:
        file.truncate(files.MAX_JSON_BYTES + 2**20)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json has 65 MiB; at most 64 MiB"):
        read_prompt_files(folder)


def test_failing_pattern_rejects_the_text(folder: Path) -> None:
    """The library raises no Exception when a pattern gives up."""
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    tokenizer = Tokenizer(backend, read_prompt_files(folder))
    with pytest.raises(InvalidRequestError, match="the model's tokenizer fails for this text"):
        tokenizer.encode("a" * 60 + "!")
    assert tokenizer.encode("hi")


def test_plain_replacements_pass(folder: Path) -> None:
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "_"}
    change(folder, **normalizers(*[spaces] * 30))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("a   b") == tokenizer.encode("a_b")

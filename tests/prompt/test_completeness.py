"""A tokenizer that lacks a part is not loaded, and the error names the part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.prompt.test_gguf import fields_of, sentence_fields, write
from tests.prompt.tokenizers_for_tests import byte_level, sentencepiece
from vlmserve.errors import ModelLoadError
from vlmserve.prompt.tokenizer import Tokenizer


def folder_of(tmp_path: Path, backend: Any, *lost: str, **config: Any) -> Path:
    """A checkpoint's folder, in whose tokenizer.json `lost` is missing. config: of generation_config.json."""
    state = json.loads(backend.to_str())
    for part in lost:
        if part == "merges":
            state["model"]["merges"] = []
        else:
            state[part] = [] if isinstance(state[part], list) else None
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_complete_tokenizer_is_loaded(tmp_path, make):
    assert Tokenizer.from_folder(folder_of(tmp_path, make())).vocab_size > 100


@pytest.mark.parametrize(
    ("make", "lost", "message"),
    [
        (byte_level, "merges", "lacks merges"),
        (byte_level, "pre_tokenizer", "lacks the normalizer or pre_tokenizer that writes a space as 'Ġ'"),
        (byte_level, "decoder", "lacks the decoder that writes a space as 'Ġ'"),
        (sentencepiece, "merges", "lacks merges"),
        (sentencepiece, "decoder", "lacks the decoder that writes a space as '▁'"),
    ],
)
def test_missing_part_of_tokenizer_json_is_named(tmp_path, make, lost, message):
    with pytest.raises(ModelLoadError, match=f"tokenizer.json: the tokenizer {message}"):
        Tokenizer.from_folder(folder_of(tmp_path, make(), lost))


def test_missing_end_tokens_are_named(tmp_path):
    folder_of(tmp_path, byte_level(), eos_token_id=[5, 90000])
    assert Tokenizer.from_folder(tmp_path).end_token_ids == {5, 90000}
    folder_of(tmp_path, byte_level(), eos_token_id=90000)
    with pytest.raises(ModelLoadError, match=r"lacks the end token \(90000\); copy all files of the checkpoint"):
        Tokenizer.from_folder(tmp_path)


def test_added_tokens_keep_declared_ids(tmp_path):
    backend = byte_level()
    size = backend.get_vocab_size()
    declared = {str(size): {"content": "<|user|>", "special": True}, str(size + 1): {"content": "<|end|>"}}
    folder_of(tmp_path, backend)
    for first in (0, 1):
        kept = dict(list(declared.items())[first:])
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": kept}))
        if first == 0:
            assert Tokenizer.from_folder(tmp_path).token_id("<|end|>") == size + 1
        else:
            with pytest.raises(ModelLoadError, match=rf"'<\|end\|>' should be token {size + 1}, but would be {size}"):
                Tokenizer.from_folder(tmp_path)


def test_renamed_tokens_are_named(tmp_path):
    backend = byte_level()
    backend.add_special_tokens(["<|reserved|>"])
    id_ = backend.token_to_id("<|reserved|>")
    folder_of(tmp_path, backend)
    declared = {str(id_): {"content": "<|user|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    message = rf"token {id_} is '<\|reserved\|>' in tokenizer.json and '<\|user\|>' in tokenizer_config.json"
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("lost", ["tokens", "merges", "token_type"])
def test_missing_part_of_byte_level_gguf_is_named(tmp_path, lost):
    fields = fields_of(byte_level())
    del fields[lost]
    with pytest.raises(ModelLoadError, match=rf"its tokenizer lacks {lost} \(tokenizer.ggml.{lost}\)"):
        Tokenizer.from_folder(write(tmp_path / "model.gguf", **fields))


@pytest.mark.parametrize("lost", ["tokens", "scores", "token_type"])
def test_missing_part_of_sentencepiece_gguf_is_named(tmp_path, lost):
    fields = sentence_fields()
    del fields[lost]
    with pytest.raises(ModelLoadError, match=f"its tokenizer lacks {lost} "):
        Tokenizer.from_folder(write(tmp_path / "model.gguf", **fields))

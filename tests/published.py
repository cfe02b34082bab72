"""Writes checkpoints as they are published, but without weights: the header of their tensors, and a vocabulary of other
words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def write_files(folder: Path, files: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """JSON files by name, and tensors in bfloat16, all but whose first byte is a hole in the file, which makes them
    differ."""
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
    written = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        for number, entry in enumerate(header.values()):
            file.seek(8 + len(written) + entry["data_offsets"][0])
            file.write(bytes([1 + number % 255]))
        file.truncate(8 + len(written) + end)
    return folder


def write_tokenizer(
    folder: Path, added: Mapping[int, str], special: set[str], config: Mapping[str, Any], size: int | None = None
) -> None:
    """A byte-level tokenizer. added: tokens beside its words, by their ids. special: which of them are. config: of
    tokenizer_config.json, without ``added_tokens_decoder``. size: of the vocabulary; None: the last of `added` ends
    it."""
    rest = (number for number in range(size or max(added) + 1) if number not in added)
    vocabulary = dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet()), rest, strict=False))
    vocabulary |= {f"word {number}": number for number in rest} | {token: id_ for id_, token in added.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    decoder = {}
    for id_, token in sorted(added.items()):
        tokenizer.add_tokens([AddedToken(token, special=token in special, normalized=False)])
        assert tokenizer.token_to_id(token) == id_
        flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        decoder[str(id_)] = {"content": token, **flags, "special": token in special}
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": decoder}))

"""Checkpoints as they are published, without weights: their configurations, special tokens and chat templates, and the
header of their tensors.

Each folder has the files of one repository, as its model card or transformers documents them, and two more:

- `tensors.json`: the shape of each tensor by its name. ``{0-23}`` in a name stands for each of these numbers.
- `tokens.json`: the tokens beside the vocabulary's words, from `first_id` on, and which of them are `plain` text.

The chat templates write of texts and images what the published ones write.

| Folder | Repository |
| --- | --- |
| GLM-OCR | zai-org/GLM-OCR |
| InternVL3-1B-hf | OpenGVLab/InternVL3-1B-hf |
| LFM2.5-VL-1.6B | LiquidAI/LFM2.5-VL-1.6B |
| Ministral-3-3B-Instruct-2512-BF16 | mistralai/Ministral-3-3B-Instruct-2512-BF16 |
| PaddleOCR-VL | PaddlePaddle/PaddleOCR-VL |
| Qwen3-VL-2B-Instruct | Qwen/Qwen3-VL-2B-Instruct |
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FOLDER = Path(__file__).parent
OWN_FILES = {"tensors.json", "tokens.json", "tokenizer_config.json"}


def tensor_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of a checkpoint, by their names in the file."""
    shapes = _read(name, "tensors.json")
    return {tensor: tuple(shape) for pattern, shape in shapes.items() for tensor in _expanded(pattern)}


def chat_template(name: str) -> str:
    return (FOLDER / name / "chat_template.jinja").read_text()


def write_published(folder: Path, name: str) -> Path:
    """Write all files of a checkpoint.

    The vocabulary has other words than the published one. The tensors are holes in their file but for the first byte.
    """
    for path in (FOLDER / name).iterdir():
        if path.name not in OWN_FILES:
            shutil.copy(path, folder)
    _write_tokenizer(folder, _read(name, "tokens.json"), _read(name, "tokenizer_config.json"))
    _write_tensors(folder / "model.safetensors", tensor_shapes(name))
    return folder


def _read(name: str, file: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / name / file).read_text())
    return content


def _expanded(pattern: str) -> Iterator[str]:
    """``a{0-2}b`` is a0b, a1b and a2b."""
    numbers = re.search(r"\{(\d+)-(\d+)\}", pattern)
    if numbers is None:
        yield pattern
        return
    for number in range(int(numbers[1]), int(numbers[2]) + 1):
        yield pattern.replace(numbers[0], str(number))


def _write_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Tensors in bfloat16, whose first bytes differ."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
    written = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        for number, entry in enumerate(header.values()):
            file.seek(8 + len(written) + entry["data_offsets"][0])
            file.write(bytes([1 + number % 255]))
        file.truncate(8 + len(written) + end)


def _write_tokenizer(folder: Path, tokens: dict[str, Any], config: dict[str, Any]) -> None:
    """A byte-level tokenizer with the added tokens at their IDs."""
    plain = {token for pattern in tokens["plain"] for token in _expanded(pattern)}
    names = (token for pattern in tokens["added"] for token in _expanded(pattern))
    added = dict(enumerate(names, tokens["first_id"]))
    rest = (number for number in range(tokens.get("vocabulary_size", max(added) + 1)) if number not in added)
    vocabulary = dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet()), rest, strict=False))
    vocabulary |= {f"<word {number}>": number for number in rest} | {token: id_ for id_, token in added.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=token not in plain, normalized=False) for token in added.values()])
    assert all(tokenizer.token_to_id(token) == id_ for id_, token in added.items())
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    decoder = {str(id_): {"content": token, **flags, "special": token not in plain} for id_, token in added.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": decoder}))

"""What is common to the vision towers and projectors in GGUF files: how values are read, and what a kind of them is.
Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmserve.errors import ModelLoadError
from vlmserve.gguf.header import Header, TensorInfo

Config = dict[str, Any]


class Clip:
    """The values of a tower, without the prefix that they share. Raises ModelLoadError for one that is missing."""

    def __init__(self, header: Header) -> None:
        self.header = header

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.values.get(f"clip.vision.{key}", default)

    def array(self, key: str) -> list[Any]:
        return self.header.array(f"clip.vision.{key}")

    def __getitem__(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ModelLoadError(f"{self.header.path} lacks clip.vision.{key}")
        return value

    def tensor(self, name: str) -> TensorInfo:
        if name not in self.header.tensors:
            raise ModelLoadError(f"{self.header.path} lacks {name}: it is not a complete vision tower")
        return self.header.tensors[name]

    def has(self, name: str) -> bool:
        return name in self.header.tensors

    @property
    def intermediate_size(self) -> int:
        """Of the MLPs, by their weights: some conversions write another number."""
        width = self["embedding_length"]
        shapes = [self.tensor(f"v.blk.0.ffn_{part}.weight").shape for part in ("up", "down")]
        return next((shape[0] for shape in shapes if shape[-1] == width), shapes[0][0])

    @property
    def deepstack_layers(self) -> list[int]:
        """The layers whose outputs are merged too."""
        return [layer for layer, merged in enumerate(self.array("is_deepstack_layers")) if merged]


Names = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Projector:
    """A kind of tower and projector.

    model_type: as config.json names the whole. vision: what it says of the tower. settings: what
    preprocessor_config.json says. videos: likewise video_preprocessor_config.json; None: there is none. names: regular
    expressions for the names of tensors in the file, and what to put in their place, tried in turn; empty for a tensor
    that is left out. output, axis: the weight and its axis that is as long as embeddings are wide. more: what else
    config.json says of the whole. text_types: model types of its language models, by the architectures of their files;
    empty: all go with it. tokens: fields of config.json with the tokens whose ids they are, the placeholder first.
    else_unknown: whether the unknown token, which ordinary text never becomes, is the placeholder of a vocabulary
    without that one. interleaved: rows of queries and keys are in the order in which neighbours pair. norm_offset: was
    added to the norm before the projector. swaps: whether old files have the two matrices of MLPs under each other's
    names.
    """

    model_type: str
    vision: Callable[[Clip], Config]
    settings: Callable[[Clip], Config]
    names: Names
    output: str
    axis: int = 0
    more: Callable[[Clip], Config] = lambda clip: {}
    text_types: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=lambda: {"image_token_id": "<image>"})
    videos: Callable[[Clip], Config] | None = None
    else_unknown: bool = False
    interleaved: bool = False
    norm_offset: float = 0.0
    swaps: bool = True

"""vLLM's ``POST /classify``."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from vlmserve.server.schema.asking import ModelRequest
from vlmserve.server.schema.completions import listed
from vlmserve.server.schema.content import PromptRequest
from vlmserve.server.schema.embeddings import EmbeddingUsage, Inputs


class ClassifyRequest(PromptRequest, ModelRequest):
    """The body of ``POST /classify``."""

    content_fields: ClassVar[tuple[str, ...]] = ("input",)

    input: Inputs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts or token ids, one for each result."""
        return listed(self.input)


class Classification(msgspec.Struct):
    """The most probable class of one input, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct):
    """The response, in the order of the inputs."""

    id: str
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage
    object: str = "list"

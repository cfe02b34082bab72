"""Shows how X-LoRA weighs adapters for each token of an answer, with a plot."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from vlmserve.adapters.location import is_xlora
from vlmserve.adapters.mixture import Mixture
from vlmserve.engine.engine import Engine
from vlmserve.errors import ConfigurationError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.models.hub import resolve_model
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.types import EngineRequest, SamplingParams

_NAME = "routing"
_CELL, _ROW, _LEFT, _TOP, _TEXT = 14, 22, 130, 40, 110
"""Pixels: token width, adapter height, margins, and height of the tokens' text."""


class Part(msgspec.Struct, frozen=True):
    """Tokens of one kind: "prompt", "image" or "answer". means: of each adapter's scalings."""

    kind: str
    num_tokens: int
    means: list[float]


class Routing(msgspec.Struct, frozen=True):
    """Scalings of an X-LoRA request, token by token."""

    adapters: list[str]
    """Names."""
    tokens: list[str]
    """Text of each token."""
    kinds: list[str]
    """Kind of each token, as in `Part`."""
    scalings: list[list[float]]
    """By token, then by adapter: the mean over layers."""
    answer: str
    """The whole text."""

    def parts(self) -> list[Part]:
        found = []
        for kind in dict.fromkeys(self.kinds):
            rows = [row for row, own in zip(self.scalings, self.kinds, strict=True) if own == kind]
            means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
            found.append(Part(kind, len(rows), means))
        return found

    def to_markdown(self) -> str:
        lines = [
            f"| Tokens | Number | {' | '.join(self.adapters)} |",
            "| --- | ---: |" + " ---: |" * len(self.adapters),
        ]
        for part in self.parts():
            means = " | ".join(f"{mean:.3f}" for mean in part.means)
            lines.append(f"| {part.kind} | {part.num_tokens} | {means} |")
        return "\n".join(lines)

    def to_svg(self) -> str:
        """A heatmap: a row per adapter, a column per token or run of image tokens."""
        columns = _columns(self)
        width = _LEFT + sum(size for *_, size in columns) + 20
        height = _TOP + _ROW * len(self.adapters) + _TEXT
        largest = max((abs(value) for row in self.scalings for value in row), default=1.0) or 1.0
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
            'font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="8" y="18">Scalings of adapters by token; white 0, dark {largest:.2f}, red below 0</text>',
        ]
        for number, name in enumerate(self.adapters):
            lines.append(f'<text x="8" y="{_TOP + number * _ROW + 15}">{escape(name[:18])}</text>')
        x = _LEFT
        for text, kind, values, size in columns:
            for number, value in enumerate(values):
                colour = "#b3261e" if value < 0 else "#1b4f9c"
                lines.append(
                    f'<rect x="{x}" y="{_TOP + number * _ROW}" width="{size - 1}" height="{_ROW - 1}" fill="{colour}" '
                    f'fill-opacity="{abs(value) / largest:.3f}" stroke="#ddd"><title>{escape(text)} ({kind}): '
                    f"{escape(self.adapters[number])} {value:.3f}</title></rect>"
                )
            below = _TOP + len(self.adapters) * _ROW + 8
            weight = ' font-weight="bold"' if kind == "answer" else ""
            lines.append(f'<text transform="translate({x + 4},{below}) rotate(90)"{weight}>{escape(text[:16])}</text>')
            x += size
        return "\n".join([*lines, "</svg>"]) + "\n"


def _columns(routing: Routing) -> list[tuple[str, str, list[float], int]]:
    columns: list[tuple[str, str, list[float], int]] = []
    image: list[list[float]] = []

    def end_image() -> None:
        if image:
            means = [sum(column) / len(image) for column in zip(*image, strict=True)]
            columns.append((f"image, {len(image)} tokens", "image", means, 4 * _CELL))
            image.clear()

    for text, kind, values in zip(routing.tokens, routing.kinds, routing.scalings, strict=True):
        if kind == "image":
            image.append(values)
            continue
        end_image()
        columns.append((text, kind, values, _CELL))
    end_image()
    return columns


class RoutingRecorder:
    """Answers one conversation at a time with an X-LoRA checkpoint.

    Raises like `Engine`, AdapterError for an unusable checkpoint, ConfigurationError for one without X-LoRA.
    """

    def __init__(self, config: EngineConfig, adapter: Path) -> None:
        folder = resolve_model(config.model, config.revision, config.mmproj)
        # Cached prefixes have no scalings.
        self._engine = Engine(config.model_copy(update={"enable_lora": True, "enable_prefix_caching": False}), folder)
        if not is_xlora(adapter):
            raise ConfigurationError(f"{adapter} mixes no adapters: it is no X-LoRA checkpoint")
        self._engine.adapter_store.load(_NAME, adapter)
        self.preparer = RequestPreparer(folder, read_settings(MediaConfig, {}), config.model_impl)

    def route(self, conversation: list[dict[str, Any]], max_tokens: int) -> Routing:
        """Answer a conversation greedily. Raises InvalidRequestError for an invalid conversation."""
        prompt = self.preparer.chat(conversation, allow_local=True)
        scalings: dict[int, list[float]] = {}
        names: list[str] = []

        def observe(request_id: str, start: int, mixture: Mixture, values: Tensor) -> None:
            names[:] = mixture.labels
            means = values.view(len(values), mixture.num_layers, -1).mean(1).tolist()
            scalings.update(enumerate(means, start))

        self._engine.observe_scalings(observe)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self._engine.add(EngineRequest(_NAME, prompt, params, adapter=_NAME))
        answer: list[int] = []
        while self._engine.has_work():
            for output in self._engine.step():
                if output.error is not None:
                    raise ConfigurationError(output.error)
                answer += output.token_ids
        tokenizer = self.preparer.tokenizer
        images = {place for span in prompt.images for place in range(span.start, span.end)}
        token_ids = [*prompt.token_ids, *answer][: len(scalings)]
        kinds = [
            "image" if place in images else "prompt" if place < len(prompt.token_ids) else "answer"
            for place in range(len(token_ids))
        ]
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]
        rows = [scalings[place] for place in range(len(token_ids))]
        return Routing(names, texts, kinds, rows, tokenizer.decode(answer))

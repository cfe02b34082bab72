"""What steps of a model have to read and to multiply at least, from its layers: what a device's rates are held
against."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from vlmserve.layers.linear import Embedding, Weight
from vlmserve.models.decoder import Decoder
from vlmserve.models.protocols import LoadedModel
from vlmserve.quant.memory import own_bytes, weight_bytes


class Work(NamedTuple):
    """Bytes that are read and floating-point operations: two for each product of a weight and an input."""

    num_bytes: int
    flops: int

    def report(self) -> dict[str, float]:
        """In 10^9 bytes and 10^12 operations."""
        return {"gb": self.num_bytes / 1e9, "tflop": self.flops / 1e12}


def decode_work(decoder: Decoder, streams: int, context: float, block_size: int) -> Work:
    """A step that gives each of some requests a token. context: tokens whose keys and values each of them reads."""
    cached = decoder.cache_bytes(block_size).read(context)
    multiplied = _products(decoder) + context * _attended(decoder)
    return Work(_read(decoder) + round(streams * cached), round(2 * streams * multiplied))


def prompt_work(decoder: Decoder, tokens: int, requests: int = 1) -> Work:
    """A step over whole prompts, each of which attends to itself, and of which the last token alone has logits."""
    head = decoder.vocab_size * decoder.hidden_size
    products = tokens * (_products(decoder) - head) + head + tokens * (tokens + 1) // 2 * _attended(decoder)
    return Work(_read(decoder), 2 * requests * products)


def tower_work(model: LoadedModel, shape: tuple[int, ...], images: int = 1) -> Work:
    """Images of one shape through the vision tower."""
    assert isinstance(model.vision, nn.Module)
    return Work(weight_bytes(model.vision), 2 * images * model.vision.products(shape))


def _read(decoder: Decoder) -> int:
    """Bytes of weights, without a table of which only some rows are read."""
    table = decoder.embed_tokens
    return weight_bytes(decoder) - (own_bytes(table) if isinstance(table, Embedding) else 0)


def _products(decoder: Decoder) -> int:
    """Of a token with weights, the output head's among them."""
    return sum(module.products for module in decoder.modules() if isinstance(module, Weight))


def _attended(decoder: Decoder) -> int:
    """Of a query with a key and a value, in all layers."""
    return sum(2 * spec.num_heads * spec.head_size for spec in decoder.spec.attention)

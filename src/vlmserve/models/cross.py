"""States for cross-attention: image features, or a question encoded with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from vlmserve.errors import InvalidRequestError, ModelLoadError, PromptTooLongError
from vlmserve.families.spec import ArchSpec
from vlmserve.kernels.attention import BatchMetadata, CrossRows
from vlmserve.kernels.full_attention import FullAttention
from vlmserve.layers.layer import Factory
from vlmserve.models.decoder import Decoder
from vlmserve.types import CrossInput


def make_text_encoder(spec: ArchSpec, **factory: Unpack[Factory]) -> Decoder:
    """Make an encoder of questions that attends to the image. Raises ModelLoadError if its states do not fit the
    decoder.
    """
    if spec.cross_size != spec.hidden_size:
        raise ModelLoadError(
            f"config.json: the decoder attends to states of {spec.cross_size} elements, and questions become ones of "
            f"{spec.hidden_size}"
        )
    headless = replace(spec, tied_embeddings=True, head_bias=False, head_transform=False)
    return Decoder(headless, FullAttention(), **factory)


class CrossStateEncoder:
    """Makes `CrossRows.states` of images, or of questions about them."""

    def __init__(self, decoder: Decoder, text_encoder: Decoder | None) -> None:
        """text_encoder: encodes questions; None: the decoder attends to the image itself."""
        attention = decoder.spec.attention[0]
        self._decoder = decoder
        self._text_encoder = text_encoder
        self.feature_size = decoder.spec.cross_size
        self.state_size = 2 * len(decoder.layers) * attention.num_kv_heads * attention.head_size

    def check(self, cross: CrossInput) -> None:
        """Raises InvalidRequestError for a missing, unexpected or too long text, and for unknown token ids."""
        if self._text_encoder is None and cross.token_ids:
            raise InvalidRequestError("this model takes an image and no question", param="messages")
        if self._text_encoder is None:
            return
        spec = self._text_encoder.spec
        if not cross.token_ids:
            raise InvalidRequestError("this model answers questions: ask one about the image", param="messages")
        if len(cross.token_ids) > spec.max_position:
            raise PromptTooLongError(
                f"the question has {len(cross.token_ids)} tokens, and at most {spec.max_position} fit", param="messages"
            )
        if not 0 <= min(cross.token_ids) <= max(cross.token_ids) < spec.vocab_size:
            raise InvalidRequestError(f"a token id is not in the vocabulary of {spec.vocab_size}", param="prompt")

    def encode(self, features: Sequence[Tensor], texts: Sequence[Sequence[int]]) -> list[Tensor]:
        return [_states(self._decoder, rows) for rows in self.sources(features, texts)]

    def sources(self, features: Sequence[Tensor], texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Like `encode`, for the source of keys and values, each ``[states, cross_size]``."""
        if self._text_encoder is None or not features:
            return list(features)
        return self._encode_texts(self._text_encoder, features, texts)

    def _encode_texts(
        self, text_encoder: Decoder, features: Sequence[Tensor], texts: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        lengths = [len(text) for text in texts]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        cross = [
            CrossRows(end - length, end, _states(text_encoder, rows))
            for length, end, rows in zip(lengths, ends, features, strict=True)
        ]
        device = text_encoder.device
        token_ids = torch.tensor([token_id for text in texts for token_id in text], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        chunks, tables = [(0, length) for length in lengths], [[0]] * len(lengths)  # nothing is cached
        metadata = replace(BatchMetadata.of_chunks(chunks, tables, max(lengths), device), cross=cross)
        caches = text_encoder.allocate_cache(0, 1)
        hidden = text_encoder.forward(text_encoder.embed(token_ids), positions, metadata, caches)
        return [hidden[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def _states(decoder: Decoder, features: Tensor) -> Tensor:
    assert decoder.cross_states is not None
    return decoder.cross_states.of_layers(features)

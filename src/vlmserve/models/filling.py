"""Fills an empty model with weights from the checkpoint or from an earlier start's packed weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from vlmserve.devices.device import Device
from vlmserve.layers.layer import Layer, arrange_layers
from vlmserve.layers.linear import Weight
from vlmserve.memory import return_free_memory
from vlmserve.models.decoder import Decoder
from vlmserve.models.identity import model_identity, stored_bytes
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.packed import load_blocks, load_packed
from vlmserve.models.packed_model import pack_model, restore_model
from vlmserve.models.progress import LoadingProgress
from vlmserve.models.weights import Checkpoint, merge_as_stored
from vlmserve.models.weights_cache import WeightsCache, source_parts
from vlmserve.quant.formats.layout import Layout
from vlmserve.quant.model import Quantizer

LARGE_BYTES = 1024**2
"""Bytes of a large layer. After each one, freed memory is returned to the system."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Filling:
    checkpoint: Checkpoint
    device: Device
    settings: LoadSettings
    layouts: Sequence[Layout] = ()
    keeps_blocks: bool = False
    """True: quantized weights of a GGUF file stay quantized."""
    cache: WeightsCache | None = None

    def fill(self, model: nn.Module, decoder: Decoder) -> bytes:
        """Return the model's `model_identity`. decoder: its language model."""
        self.checkpoint.repeat(model)
        cache = self.cache if self.device.torch_device.type == "cpu" and self.device.keeps_packed else None
        if cache is None or not cache.is_usable():
            return self._read(model, decoder)
        source = source_parts(self.checkpoint.folder, self.settings)
        superblocks = self.keeps_blocks and self.device.multiplies_superblocks(self.settings.input_bits)
        path = cache.path({**source, "blocks": self.keeps_blocks, "superblocks": superblocks})
        if (found := cache.read(path)) is not None:
            try:
                merge_as_stored(model, self.checkpoint.names)
                restore_model(model, found.packed, self.device)
            except ValueError as error:
                logger.warning("weights cache: ignoring %s (%s)", path, error)
            else:
                self.device.mapped_bytes += found.num_bytes
                return found.identity
        identity = self._read(model, decoder)
        if (packed := pack_model(model)) is not None:
            cache.write_later(path, packed, identity, self.checkpoint.folder.name)
        return identity

    def _read(self, model: nn.Module, decoder: Decoder) -> bytes:
        checkpoint, device, settings = self.checkpoint, self.device, self.settings
        quantizer = None if settings.quantization is None else Quantizer(model, settings.quantization)
        in_decoder = set(decoder.modules())

        def settle(module: nn.Module) -> None:
            """Quantize and pack a module that has all its weights, before more is read."""
            if quantizer is not None:
                quantizer.quantize(module)
            if isinstance(module, Weight):
                module.settle()
            # Tower layers may depend on each other (`Linear.widen_for`); `arrange_layers` handles their order.
            if isinstance(module, Layer) and module in in_decoder:
                module.arrange(device)
            if isinstance(module, Weight) and module.num_bytes > LARGE_BYTES:
                return_free_memory()

        filled: set[str] = set()
        with LoadingProgress(stored_bytes(checkpoint.folder)) as progress:
            checkpoint.digests.on_read = progress.advance
            if self.layouts:
                filled = load_packed(checkpoint, model, self.layouts, device, settle, settings.input_bits)
            if self.keeps_blocks:
                load_blocks(checkpoint, model, device, settle, settings.input_bits)
            rounded = None if quantizer is None or filled else quantizer.rows
            checkpoint.load(model, filled=filled, settle=settle, rounded=rounded, device=device.torch_device)
        if quantizer is not None:
            quantizer.log()
        arrange_layers(model, device)
        return_free_memory()
        return model_identity(checkpoint.folder, settings, checkpoint.digests)

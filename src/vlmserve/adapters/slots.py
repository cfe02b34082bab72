from __future__ import annotations

from collections import Counter

from vlmserve.adapters.lora import Adapter
from vlmserve.kernels.adapters import AdapterRows, TableAdapters
from vlmserve.layers.linear import Embedding, TiedEmbedding, Weight
from vlmserve.models.adaptable import AdaptableModel


class AdapterSlots:
    """rows: the slot of each row in a batch."""

    def __init__(self, model: AdaptableModel, num_slots: int, max_rank: int = 0) -> None:
        """max_rank: maximum rank in captured steps; 0: the ranks in the slots."""
        self.rows = AdapterRows(num_slots, model.device)
        self._modules = dict(model.modules.named_modules())
        self._held: dict[int, Adapter] = {}
        parts = Counter(place.path for place in model.places.values() if not place.is_table) if max_rank else Counter()
        for path, module in self._modules.items():
            if isinstance(module, Weight) and module.takes_adapters:
                module.adapt(self.rows, parts[path], max_rank)
            if isinstance(module, TiedEmbedding | Embedding):
                module.adapt_table(self.rows)

    def set(self, slot: int, adapter: Adapter) -> None:
        if (before := self._held.pop(slot, None)) is not None:
            for path in before.layers.keys() - adapter.layers.keys():
                self._weight(path).set_adapter(slot, None)
            for path in before.tables.keys() - adapter.tables.keys():
                self._table(path).set(slot, None)
        for path, prepared in adapter.layers.items():
            self._weight(path).set_adapter(slot, prepared)
        for path, table in adapter.tables.items():
            self._table(path).set(slot, table)
        self._held[slot] = adapter
        (self.rows.unpacked.add if adapter.unpacked else self.rows.unpacked.discard)(slot)

    def _weight(self, path: str) -> Weight:
        module = self._modules[path]
        assert isinstance(module, Weight)
        return module

    def _table(self, path: str) -> TableAdapters:
        module = self._modules[path]
        assert isinstance(module, TiedEmbedding | Embedding)
        assert module.table_adapters is not None
        return module.table_adapters

"""Loads a checkpoint's files into a model's parameters, one tensor at a time."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vlmserve.errors import MissingWeightsError, ModelLoadError
from vlmserve.kernels.gguf_weight import GGUFWeight
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.layers.cut import Cut, Shard
from vlmserve.layers.layer import allocate
from vlmserve.layers.linear import MergedLinear
from vlmserve.layers.norm import NormOfEachHead
from vlmserve.models.blocks.block import Block
from vlmserve.models.files import WeightFile, open_weights, weight_files
from vlmserve.models.gguf_tensors import GGUFFile
from vlmserve.models.identity import TensorDigests
from vlmserve.models.stacked import StackedExperts, has_inputs_first, stacked_shapes

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
# Mapped pages count as used memory until the mapping is closed.
MAPPED_BYTES = 8 * 1024**2
# Dequantizing a piece needs much more memory than its result.
DEQUANTIZED_BYTES = 2 * 1024**2
LANGUAGE_MODEL = "language_model."
TEXT_ENCODER = "text_encoder."
_IN_RETRIEVER = "vlm."
"""Prefix of the vision-language model's tensors in a retriever."""

# Published LLaVA checkpoints nest whole models; transformers 5 flattens them. Embedding models have no head.
_PREFIXES = (
    (re.compile(r"^(model\.)?(vision_tower)\.(vision_model\.)?"), "vision_tower."),
    (re.compile(r"^(model\.)?multi_modal_projector\."), "multi_modal_projector."),
    (re.compile(r"^(model\.)?image_newline$"), "image_newline.weight"),
    (re.compile(r"^(model\.)?vision_model\."), "vision_model."),
    (re.compile(r"^(model\.)?connector\."), "connector."),
    (re.compile(r"^(model\.)?text_model\."), "language_model."),
    (re.compile(r"^((model|transformer)\.)?visual\."), "visual."),
    (re.compile(r"^(model\.)?language_model\.(model\.)?"), "language_model."),
    (re.compile(r"^(model|transformer)\."), "language_model."),
    (re.compile(r"^lm_head\."), "language_model.lm_head."),
    (re.compile(r"^mtp\."), "language_model.mtp."),
    (re.compile(r"^(?=(embed_tokens|layers|norm)\.)"), "language_model."),
)


Rename = Callable[[str], str]


def canonical_name(name: str, rename: Rename = lambda name: name) -> str:
    """Convert a tensor's name in any checkpoint layout to our module names.

    rename: the language model family's renaming.
    """
    name = name.removeprefix(_IN_RETRIEVER)
    for pattern, prefix in _PREFIXES:
        if pattern.match(name):
            name = pattern.sub(prefix, name)
            break
    for part in (LANGUAGE_MODEL, TEXT_ENCODER):
        if name.startswith(part):
            return part + rename(name.removeprefix(part))
    return name


class Rows(Protocol):
    def write(self, first: int, weight: Tensor) -> None: ...


class Checkpoint:
    """The weight files of a folder, or a GGUF file.

    Raises MissingWeightsError if files are missing, ModelLoadError if one is broken.
    """

    def __init__(self, folder: Path, rename: Rename = canonical_name) -> None:
        """rename: to canonical names."""
        self.folder = folder
        self.digests = TensorDigests()
        self._rename = rename
        self._keys: dict[str, tuple[Path, str]] = {}
        files = weight_files(folder)
        shapes: dict[str, list[int]] = {}
        for path in files:
            if path.suffix == ".safetensors":
                with open_weights(path) as file:
                    shapes |= stacked_shapes(file)
        self._has_stacked, self._inputs_first = bool(shapes), has_inputs_first(shapes)
        for path in files:
            with self.open(path) as file:
                self._keys |= {self.canonical(key): (path, key) for key in file.keys()}  # noqa: SIM118

    def open(self, path: Path) -> WeightFile:
        file = open_weights(path)
        if not self._has_stacked or isinstance(file, GGUFFile):
            return file
        return StackedExperts(file, inputs_first=self._inputs_first)

    def canonical(self, key: str) -> str:
        return self._rename(key)

    def repeat(self, model: nn.Module) -> None:
        """Map parts that reuse other parts' tensors to these tensors (`MergedLinear.repeated`)."""
        for path, module in model.named_modules():
            for source, part in module.repeated.items() if isinstance(module, MergedLinear) else ():
                before = _beside(path, f"{source}.")
                for name in [name for name in self._keys if name.startswith(before)]:
                    self._keys.setdefault(_beside(path, f"{part}.{name.removeprefix(before)}"), self._keys[name])

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._keys)

    def read(self, name: str) -> Tensor:
        path, key = self._keys[name]
        with self.open(path) as file:
            tensor: Tensor = file.get_tensor(key)
            return tensor

    def quantized(self, name: str) -> QuantizedWeight | None:
        path, key = self._keys[name]
        with self.open(path) as file:
            weight = file.quantized(key) if isinstance(file, GGUFFile) else None
        if weight is not None:
            self.hash(name)
        return weight

    def blocks(self, name: str) -> GGUFWeight | None:
        path, key = self._keys[name]
        with self.open(path) as file:
            return file.blocks(key) if isinstance(file, GGUFFile) else None

    def stored(self, name: str) -> list[tuple[Path, str]]:
        """File and stored name of each tensor that a tensor is made of."""
        path, key = self._keys[name]
        with self.open(path) as file:
            parts = file.stored(key, 1.0) if isinstance(file, GGUFFile) else []
        return [(source, part) for source, part, _ in parts] or [(path, key)]

    def hash(self, name: str) -> None:
        path, key = self._keys[name]
        with self.open(path) as file:
            _hash(file, path, key, self.digests)

    def dtype(self) -> torch.dtype:
        """Use the first floating point tensor of more than a byte per element."""
        for name in self._keys:
            tensor = self.read(name)
            if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                return tensor.dtype
        return torch.float32

    def shapes(self, names: Collection[str]) -> dict[str, list[int]]:
        """Return shapes of tensors. Opens each file once."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._keys[name][0], []).append(name)
        found: dict[str, list[int]] = {}
        for path, own in by_file.items():
            with self.open(path) as file:
                found |= {name: file.get_slice(self._keys[name][1]).get_shape() for name in own}
        return found

    def files(self) -> dict[Path, list[str]]:
        names: dict[Path, list[str]] = {}
        for path, key in self._keys.values():
            names.setdefault(path, []).append(key)
        return names

    def load(
        self,
        model: nn.Module,
        *,
        filled: Collection[str] = (),
        settle: Callable[[nn.Module], None] = lambda module: None,
        rounded: Callable[[nn.Module], Rows | None] | None = None,
        device: torch.device = CPU,
    ) -> None:
        """Fill the model's parameters, converting dtype and device.

        filled: names of parameters that already have values. device: for parameters without memory. settle: called with
        each filled module, and may replace it. rounded: returns what stores the rows of a module's weight; None: the
        module itself. Peak memory is the final model and one module.

        Raises MissingWeightsError, which names missing tensors, and ModelLoadError for a tensor of another shape.
        """
        merge_as_stored(model, self.names)
        self.repeat(model)
        waiting = Waiting(model, filled, settle, device, rounded)
        slots = waiting.slots
        missing = [name for name in slots if name not in self._keys]
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise MissingWeightsError(
                f"{self.folder} lacks {len(missing)} of the {len(slots)} tensors that its configuration asks for: "
                f"{', '.join(missing[:4])}{more}"
            )
        unused = sorted(self.names - slots.keys())
        if unused:
            logger.debug("%d tensors of %s are not used: %s", len(unused), self.folder, ", ".join(unused))
        cuts = weight_cuts(model)
        for names in _largest_first(slots):
            by_file: dict[Path, list[tuple[str, str]]] = {}
            for name, (path, key) in self._keys.items():
                if name in names:
                    by_file.setdefault(path, []).append((name, key))
            for path, keys in by_file.items():
                _copy_file(self.open, path, keys, waiting, cuts, self.digests)


def _largest_first(slots: Mapping[str, Tensor]) -> tuple[set[str], set[str]]:
    """Names of tables and heads, then of all other tensors: quantizing takes memory before the model does."""
    half = max((slot.nbytes for slot in slots.values()), default=0) / 2
    large = {name for name, slot in slots.items() if slot.nbytes > half}
    return large, set(slots) - large


class Waiting:
    def __init__(
        self,
        model: nn.Module,
        filled: Collection[str],
        settle: Callable[[nn.Module], None],
        device: torch.device,
        rounded: Callable[[nn.Module], Rows | None] | None = None,
    ) -> None:
        self._device = device
        self._rounded = rounded
        self.slots: dict[str, Tensor] = {}
        """Memory of parameters by canonical name."""
        self._settle = settle
        self._owners: dict[str, tuple[str, nn.Module]] = {}
        self._names: dict[nn.Module, set[str]] = {}
        for path, module in model.named_modules():
            for name, slot in module_slots(path, module):
                if name not in filled:
                    self.slots[name] = slot
                    self._owners[name] = path, module
                    self._names.setdefault(module, set()).add(name)

    def memory(self, name: str) -> Tensor:
        if self.slots[name].is_meta:
            path, module = self._owners[name]
            allocate(module, self._device)
            self.slots |= {own: slot for own, slot in module_slots(path, module) if own in self.slots}
        return self.slots[name]

    def write(self, name: str, first: int, rows: Tensor) -> None:
        """Write rows of a parameter, from `first` on."""
        slot, (_, module) = self.slots[name], self._owners[name]
        target = self._rounded(module) if self._rounded is not None and slot.ndim == 2 else None
        if target is None:
            self.memory(name)[first : first + len(rows)].copy_(rows)
        else:
            # Parts of a merged weight are views of it.
            target.write(slot.storage_offset() // slot.shape[1] + first, rows.to(slot.dtype))

    def fill(self, name: str) -> None:
        del self.slots[name]
        _, module = self._owners.pop(name)
        self._names[module].remove(name)
        if not self._names[module]:
            self._settle(module)


def merge_as_stored(model: nn.Module, names: Collection[str]) -> None:
    """Expect one tensor for merged layers if the checkpoint stores them merged."""
    for path, module in model.named_modules():
        if isinstance(module, MergedLinear) and f"{path}.weight" in names:
            module.parts = {path.rpartition(".")[2]: module.out_features}


def weight_slots(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and memory of each tensor that a checkpoint must have."""
    for path, module in model.named_modules():
        yield from module_slots(path, module)


def module_slots(path: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Excludes submodules."""
    if isinstance(module, MergedLinear):
        for name, slot in module.slots():
            yield _beside(path, name), slot
    elif isinstance(module, NormOfEachHead):
        for name, slot in module.slots():
            yield f"{path}.{name}", slot
    else:
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}", parameter


def weight_names(path: str, module: nn.Module) -> list[str]:
    if isinstance(module, MergedLinear):
        return [_beside(path, f"{part}.weight") for part in module.parts]
    return [f"{path}.weight"]


def weight_cuts(model: nn.Module) -> dict[str, Cut]:
    cuts: dict[str, Cut] = {}
    for path, module in model.named_modules():
        cuts |= module_cuts(path, module)
    return cuts


def module_cuts(path: str, module: nn.Module) -> dict[str, Cut]:
    """Excludes submodules."""
    shard = getattr(module, "shard", None)
    if not isinstance(shard, Shard):
        return {}
    if isinstance(module, Block):
        [cut] = shard.cuts(1)
        return {f"{path}.{name}": cut for name, _ in module.named_parameters(recurse=False)}
    names = weight_names(path, module)
    cuts: dict[str, Cut] = {}
    for name, cut in zip(names, shard.cuts(len(names)), strict=True):
        cuts |= {name: cut, f"{name.removesuffix('weight')}bias": cut}
    return cuts


def _beside(path: str, name: str) -> str:
    return f"{path.rpartition('.')[0]}.{name}"


class _Piece(NamedTuple):
    """Rows ``first <= i < last`` of a file's tensor, and the first row of their target."""

    name: str
    key: str
    first: int
    last: int
    target: int


def _copy_file(
    opened: Callable[[Path], WeightFile],
    path: Path,
    keys: list[tuple[str, str]],
    waiting: Waiting,
    cuts: Mapping[str, Cut],
    digests: TensorDigests,
) -> None:
    with opened(path) as file:
        pieces = list(_pieces(file, path, keys, waiting.slots, cuts))[::-1]
    while pieces:
        copied = 0
        with opened(path) as file:
            while pieces and copied < MAPPED_BYTES:
                name, key, first, last, target = pieces.pop()
                whole = file.get_slice(key)
                shape = whole.get_shape()
                rows = whole[first:last] if shape else file.get_tensor(key).view(1)
                own = cuts[name].narrowed(rows) if name in cuts else rows
                waiting.write(name, target, own)
                copied += rows.nbytes
                _hash(file, path, key, digests, last / (shape or [1])[0])
                del rows, own
                if not pieces or pieces[-1].name != name:
                    waiting.fill(name)


def _hash(file: WeightFile, path: Path, key: str, digests: TensorDigests, share: float = 1.0) -> None:
    if isinstance(file, StackedExperts):
        key, share = file.stored(key, share)
    for source, name, part in file.stored(key, share) if isinstance(file, GGUFFile) else [(path, key, share)]:
        digests.read(source, name, part)


def _pieces(
    file: WeightFile, path: Path, keys: list[tuple[str, str]], slots: Mapping[str, Tensor], cuts: Mapping[str, Cut]
) -> Iterator[_Piece]:
    """Make pieces small enough to map. Raises ModelLoadError for shapes that differ."""
    most = DEQUANTIZED_BYTES if isinstance(file, GGUFFile) else MAPPED_BYTES
    for name, key in keys:
        shape, slot = file.get_slice(key).get_shape() or [1], slots[name]
        cut = cuts.get(name)
        wanted = list(slot.shape) if cut is None else cut.whole_shape(slot.shape)
        if shape != wanted:
            raise ModelLoadError(f"{path.name}: {key} has shape {shape}, the configuration asks for {wanted}")
        rows = max(1, most // max(1, slot.element_size() * math.prod(wanted[1:])))
        target = 0
        for start, end in ((0, len(slot)),) if cut is None else cut.pieces:
            for first in range(start, end, rows):
                yield _Piece(name, key, first, min(first + rows, end), target + first - start)
            target += end - start

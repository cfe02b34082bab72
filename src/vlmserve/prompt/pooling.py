"""How a checkpoint makes vectors, from sentence-transformers' files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vlmserve.errors import InvalidRequestError, ModelLoadError
from vlmserve.families.registry import classifies
from vlmserve.families.retrievers import Retriever, retriever_of
from vlmserve.families.spec import Config
from vlmserve.prompt.files import MAX_JSON_BYTES, read_config, read_json
from vlmserve.tasks import Embed, Pooling

_MODES: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
"""sentence-transformers' names."""
_OLDER_KEYS: Mapping[str, str] = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU")
"""Torch classes that a Dense module may name."""


_POOLED = "sentence_embedding"
"""sentence-transformers' name for the output of Pooling."""
_NOT_FOR_TEMPLATES = (
    "add_generation_prompt",
    "max_length",
    "padding",
    "restore_suffix",
    "return_tensors",
    "truncation",
)
"""Options of a chat template in sentence-transformers that are no values for the template."""
_OTHERWISE = "which is not supported; start with --pooling last, mean or cls"
Activation = Literal["sigmoid", "softmax", "identity"]
_CLASS_ACTIVATIONS: Mapping[str, Activation] = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}
"""Names of torch modules, as sentence-transformers writes them."""
_OF_PROBLEMS: Mapping[str, Activation] = {"regression": "identity", "multi_label_classification": "sigmoid"}
"""Defaults for ``problem_type`` of config.json."""
_DEFAULT_CLASSES = 2
HEAD = "score"
"""Name of the linear layer that makes the logits of classes."""


@dataclass(frozen=True)
class StoredLayer:
    """A linear layer after the pooled hidden states."""

    name: str
    """Name of its tensors, without ``.weight`` and ``.bias``."""
    folder: str | None = None
    """Folder of its file. None: the checkpoint's files have its tensors."""
    activation: str = "Identity"
    """One of `_ACTIVATIONS`."""


@dataclass(frozen=True)
class Vectors:
    task: Embed
    is_declared: bool = False
    """True if the checkpoint or a setting says so; otherwise it is a chat model."""
    problem: str | None = None
    """Why the checkpoint's vectors are not supported. None: they are."""
    layers: tuple[StoredLayer, ...] = ()
    """In order; each reads the previous output."""
    retriever: Retriever | None = None
    """Formats of queries and documents."""
    classes: Classes | None = None
    """Set for a model with classes instead of vectors."""
    message_options: Mapping[str, Any] | None = None
    """Options of `RequestPreparer.chat` for texts, if each is a message of a user; None: a text is the prompt."""

    @property
    def begins_answers(self) -> bool:
        """True if prompts of conversations end with the beginning of an answer by default."""
        return self.message_options is None or bool(self.message_options["add_generation_prompt"])

    @property
    def instead_of_text(self) -> str | None:
        """Plural name of the output of a model that cannot write answers."""
        if self.retriever is not None:
            return "vectors"
        return None if self.classes is None else "classes"

    def embed(
        self, dimensions: int | None = None, *, normalize: bool | None = None, pooling: Pooling | None = None
    ) -> Embed:
        """pooling: overrides the model's. Raises InvalidRequestError for an unsupported module, or with classes."""
        if self.problem is not None:
            raise InvalidRequestError(self.problem, param="model")
        if self.classes is not None:
            raise InvalidRequestError("this model has classes, not vectors; use /classify or /v1/score", param="model")
        wanted = self.task.normalize if normalize is None else normalize
        return Embed(pooling or self.task.pooling, wanted, dimensions)

    def classify(self) -> Classes:
        """Return the classes. Raises InvalidRequestError for a model without classes."""
        if self.classes is None:
            raise InvalidRequestError(
                "this model does not classify; serve one for AutoModelForSequenceClassification", param="model"
            )
        return self.classes


def read_vectors(folder: Path, pooling: Pooling | None = None) -> Vectors:
    """Read ``modules.json`` and its modules. The default is the last token, normalized.

    pooling: overrides the checkpoint's. Raises ModelLoadError for a broken file.
    """
    config = read_config(folder)
    if (classes := Classes.read(config)) is not None:
        return Vectors(classes.task, layers=(StoredLayer(HEAD),), classes=classes)
    if (retriever := retriever_of(config)) is not None:
        return Vectors(Embed(pooling or "all"), True, None, (StoredLayer(retriever.projection),), retriever)
    modules = _modules(folder)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    normalizes = "Normalize" in kinds or not modules
    if pooling is None and "Pooling" not in kinds:
        return Vectors(Embed())
    layers: tuple[StoredLayer, ...] = ()
    try:
        layers = _layers(folder, modules, kinds)
        mode = pooling or _mode(folder / str(modules[kinds.index("Pooling")].get("path", "")))
    except _UnsupportedError as error:
        if pooling is None:
            return Vectors(Embed(), is_declared=True, problem=f"this model's vectors need {error}, {_OTHERWISE}")
        mode = pooling
    options = _message_options(folder, modules, kinds)
    return Vectors(Embed(mode, normalizes), is_declared=True, layers=layers, message_options=options)


class _UnsupportedError(Exception):
    """An unsupported feature that vectors need."""


def _layers(folder: Path, modules: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> tuple[StoredLayer, ...]:
    layers: list[StoredLayer] = []
    for place, (module, kind) in enumerate(zip(modules, kinds, strict=True)):
        known = ("Transformer", "Pooling", "Dense", "Normalize")
        if kind not in known:
            raise _UnsupportedError(f"the module {kind}")
        if any(known.index(before) > known.index(kind) for before in kinds[:place]):
            raise _UnsupportedError(f"the module {kind} after {kinds[place - 1]}")
        if kind == "Dense":
            path = str(module.get("path", ""))
            config = read_json(folder / path / "config.json")
            if config.get("use_residual") or config.get("module_input_name", _POOLED) != _POOLED:
                raise _UnsupportedError("a Dense module that reads more than the pooled vector")
            activation = str(config.get("activation_function", "Tanh"))
            if (name := activation.rpartition(".")[2]) not in _ACTIVATIONS:
                raise _UnsupportedError(f"the activation {name}")
            layers.append(StoredLayer("linear", path, name))
    return tuple(layers)


def _message_options(
    folder: Path, modules: Sequence[Mapping[str, Any]], kinds: Sequence[str]
) -> Mapping[str, Any] | None:
    """Return `Vectors.message_options` if the Transformer module reads messages."""
    if kinds[:1] != ["Transformer"]:
        return None
    config = read_json(folder / str(modules[0].get("path", "")) / "sentence_bert_config.json")
    if "message" not in _mapping(config.get("modality_config")):
        return None
    given = _mapping(_mapping(config.get("processing_kwargs")).get("chat_template"))
    return {
        "add_generation_prompt": bool(given.get("add_generation_prompt", False)),
        "template_settings": {name: value for name, value in given.items() if name not in _NOT_FOR_TEMPLATES},
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mode(folder: Path) -> Pooling:
    config = read_json(folder / "config.json")
    mode = config.get("pooling_mode")
    if mode is None:
        mode = [name for key, name in _OLDER_KEYS.items() if config.get(key)]
    name = mode if isinstance(mode, str) else "+".join(map(str, mode))
    if name not in _MODES:
        raise _UnsupportedError(f"the pooling mode {name}")
    return _MODES[name]


def _modules(folder: Path) -> list[Mapping[str, Any]]:
    path = folder / "modules.json"
    if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError, OSError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"{path} holds no list of modules")
    return modules


@dataclass(frozen=True)
class Classes:
    """The meaning of the logits after a prompt."""

    labels: tuple[str, ...]
    activation: Activation

    @property
    def task(self) -> Embed:
        return Embed("last", normalize=False)

    @classmethod
    def read(cls, config: Config) -> Classes | None:
        """Read config.json; None: the model does not classify."""
        if not classifies(config):
            return None
        named = config.get("id2label")
        labels = tuple(map(str, named.values())) if isinstance(named, Mapping) else ()
        labels = labels or tuple(f"LABEL_{number}" for number in range(config.get("num_labels") or _DEFAULT_CLASSES))
        own = config.get("sentence_transformers")
        stated = own.get("activation_fn") if isinstance(own, Mapping) else None
        usual: Activation = _OF_PROBLEMS.get(
            str(config.get("problem_type")), "softmax" if len(labels) > 1 else "sigmoid"
        )
        return cls(labels, _CLASS_ACTIVATIONS.get(str(stated).rpartition(".")[2], usual))

    def probabilities(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Return class probabilities from logits ``[classes]``, or a regression's values."""
        values = logits.astype(np.float64)
        if self.activation == "identity":
            return values
        if self.activation == "sigmoid":
            return 1 / (1 + np.exp(-values))
        weights = np.exp(values - values.max())
        found: npt.NDArray[np.float64] = weights / weights.sum()
        return found

"""Classes of sequence classification models (`AutoModelForSequenceClassification`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vlmserve.families.registry import classifies
from vlmserve.families.spec import Config
from vlmserve.tasks import Embed

Activation = Literal["sigmoid", "softmax", "identity"]
_ACTIVATIONS: Mapping[str, Activation] = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}
"""Names of torch modules, as sentence-transformers writes them."""
_OF_PROBLEMS: Mapping[str, Activation] = {"regression": "identity", "multi_label_classification": "sigmoid"}
"""Defaults for ``problem_type`` of config.json."""
_DEFAULT_CLASSES = 2
HEAD = "score"
"""Name of the linear layer that makes the logits of classes."""


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
        return cls(labels, _ACTIVATIONS.get(str(stated).rpartition(".")[2], usual))

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

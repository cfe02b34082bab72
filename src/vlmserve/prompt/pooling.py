"""How a checkpoint makes vectors, by the files that sentence-transformers writes beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmserve.errors import InvalidRequestError, ModelLoadError
from vlmserve.prompt.files import MAX_JSON_BYTES, read_json
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


@dataclass(frozen=True)
class Vectors:
    """How prompts become vectors."""

    task: Embed
    is_declared: bool = False
    """True if the checkpoint or a setting says so. Otherwise the model was trained to chat."""
    problem: str | None = None
    """The reason why the checkpoint's own vectors cannot be made; None: they can."""

    def embed(self, dimensions: int | None = None, *, normalize: bool | None = None) -> Embed:
        """Make the task of a request. Raises InvalidRequestError if a module of the checkpoint is not supported."""
        if self.problem is not None:
            raise InvalidRequestError(self.problem, param="model")
        wanted = self.task.normalize if normalize is None else normalize
        return Embed(self.task.pooling, wanted, dimensions)


def read_vectors(folder: Path, pooling: Pooling | None = None) -> Vectors:
    """Read ``modules.json`` and the files of its modules. Without them: last token, normalized.

    pooling: instead of the checkpoint's own. Raises ModelLoadError for a broken file.
    """
    modules = _modules(folder)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    normalizes = "Normalize" in kinds or not modules
    if pooling is not None:
        return Vectors(Embed(pooling, normalizes), is_declared=True)
    if "Pooling" not in kinds:
        return Vectors(Embed())
    others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if others:
        return Vectors(Embed(), is_declared=True, problem=_problem(f"the module {others[0]}"))
    config = read_json(folder / str(modules[kinds.index("Pooling")].get("path", "")) / "config.json")
    mode = _mode(config)
    if mode not in _MODES:
        return Vectors(Embed(), is_declared=True, problem=_problem(f"the pooling mode {mode}"))
    return Vectors(Embed(_MODES[mode], normalizes), is_declared=True)


def _problem(what: str) -> str:
    return f"this model's vectors need {what}, which is not supported; start with --pooling last, mean or cls"


def _mode(config: Mapping[str, Any]) -> str:
    mode = config.get("pooling_mode")
    if mode is None:
        mode = [name for key, name in _OLDER_KEYS.items() if config.get(key)]
    return mode if isinstance(mode, str) else "+".join(map(str, mode))


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

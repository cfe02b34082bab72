"""Default sampling parameters of a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vlmserve.errors import InvalidRequestError
from vlmserve.models.gguf.header import read_header
from vlmserve.models.gguf.pair import language_model
from vlmserve.prompt.files import read_json
from vlmserve.types import SamplingParams

logger = logging.getLogger(__name__)


def default_sampling(folder: Path) -> SamplingParams:
    """What the checkpoint's generation_config.json or GGUF file says about sampling; OpenAI's defaults for the rest.

    ``"do_sample": false``, written out, means greedy. Values out of range are ignored with a warning. Raises
    ModelLoadError for a file that is not JSON.
    """
    file = language_model(folder)
    path = file or folder / "generation_config.json"
    settings = read_json(path) if file is None else _in_gguf(file)
    names = ["temperature", "repetition_penalty", "repeat_last_n", "no_repeat_ngram_size"]
    if settings.get("do_sample") is False:
        settings = {**settings, "temperature": 0.0}
    else:
        names += ["top_p", "top_k", "min_p"]
    wanted = {name: settings[name] for name in names if isinstance(settings.get(name), int | float)}
    try:
        return SamplingParams(**wanted)
    except InvalidRequestError as error:
        logger.warning("%s is ignored: %s", path, error)
        return SamplingParams()


def _in_gguf(path: Path) -> dict[str, Any]:
    values = read_header(path).values
    keys = {
        "temperature": "temp",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "penalty_repeat",
        "repeat_last_n": "penalty_last_n",
    }
    return {name: values.get(f"general.sampling.{key}") for name, key in keys.items()}

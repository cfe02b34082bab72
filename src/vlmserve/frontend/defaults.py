"""How a checkpoint wants to be sampled where a request does not say."""

from __future__ import annotations

import logging
from pathlib import Path

from vlmserve.errors import InvalidRequestError
from vlmserve.prompt.checkpoint import read_json
from vlmserve.types import SamplingParams

logger = logging.getLogger(__name__)


def default_sampling(folder: Path) -> SamplingParams:
    """What the checkpoint's generation_config.json says about sampling; OpenAI's defaults for what it leaves open.

    ``"do_sample": false``, written out, means greedy. Values out of range are ignored with a warning. Raises
    ModelLoadError for a file that is not JSON.
    """
    path = folder / "generation_config.json"
    settings = read_json(path)
    if settings.get("do_sample") is False:
        return SamplingParams(temperature=0.0)
    names = ("temperature", "top_p", "top_k", "min_p")
    wanted = {name: settings[name] for name in names if isinstance(settings.get(name), int | float)}
    try:
        return SamplingParams(**wanted)
    except InvalidRequestError as error:
        logger.warning("%s is ignored: %s", path, error)
        return SamplingParams()

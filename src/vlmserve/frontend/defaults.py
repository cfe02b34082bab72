"""Default sampling parameters of a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

from vlmserve.errors import InvalidRequestError
from vlmserve.gguf.config import sampling_settings
from vlmserve.gguf.pair import language_model
from vlmserve.gguf_header import read_header
from vlmserve.prompt.files import read_json
from vlmserve.types import SamplingParams

logger = logging.getLogger(__name__)


def default_sampling(folder: Path) -> SamplingParams:
    """Read generation_config.json or the GGUF file, with OpenAI's defaults for the rest.

    ``"do_sample": false`` means greedy. Values out of range are ignored with a warning. Raises ModelLoadError for a
    file that is not JSON.
    """
    file = language_model(folder)
    path = file or folder / "generation_config.json"
    settings = read_json(path) if file is None else sampling_settings(read_header(file))
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

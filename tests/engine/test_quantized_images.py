"""Quantized weights under images: the same tokens however requests run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from tests.checkpoints import make_internvl, make_mistral3
from tests.engine.image_parity import CONVERSATIONS
from tests.engine.kinds import by_kernels
from tests.engine.test_parity import Oracle, engine_for, generate, tight_cache
from tests.engine.test_qwen_vl import MIXED, make_oracle
from tests.granite_docling import make_granite_docling
from tests.lfm2_checkpoints import make_lfm2_vl
from tests.minicpmv_checkpoints import make_minicpmv
from tests.muse_glimmer import make_muse_glimmer
from tests.ocr_checkpoints import make_glm_ocr, make_paddleocr
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.settings.config import MediaConfig
from vlmserve.types import Prompt

Case = tuple[Any, list[Prompt]]
"""An oracle, whatever images it makes, and prompts."""


def qwen3_vl(folder: Path) -> Case:
    oracle = make_oracle(folder, "qwen3_vl")
    return oracle, [oracle.prompt(seed, *parts) for seed, parts in enumerate(MIXED[2:5])]


def internvl(folder: Path) -> Case:
    return from_files(make_internvl(folder))


def mistral3(folder: Path) -> Case:
    return from_files(make_mistral3(folder))


def glm_ocr(folder: Path) -> Case:
    return from_files(make_glm_ocr(folder))


def paddleocr(folder: Path) -> Case:
    return from_files(make_paddleocr(folder))


def lfm2_vl(folder: Path) -> Case:
    return from_files(make_lfm2_vl(folder))


def lfm3_vl(folder: Path) -> Case:
    oracle = make_oracle(folder, "lfm3_vl")
    return oracle, [oracle.prompt(seed, *parts) for seed, parts in enumerate(MIXED[2:5])]


def minicpmv(folder: Path) -> Case:
    return from_files(make_minicpmv(folder))


def from_files(folder: Path, chosen: Sequence[int] = (0, 1, 2, 5)) -> Case:
    """chosen: of `CONVERSATIONS`."""
    preparer = RequestPreparer(folder, MediaConfig())
    prompts = [preparer.chat([CONVERSATIONS[number]], allow_local=True) for number in chosen]
    return Oracle(folder, nn.Identity(), None, (), 0, 0), prompts


def muse_glimmer(folder: Path) -> Case:
    return from_files(make_muse_glimmer(folder))


def granite_docling(folder: Path) -> Case:
    # The first two fit into the tight cache until they grow.
    return from_files(make_granite_docling(folder), chosen=(0, 4, 3, 1))


MAKERS = (qwen3_vl, internvl, mistral3, glm_ocr, paddleocr, lfm2_vl, lfm3_vl, minicpmv, muse_glimmer, granite_docling)
EACH = list(zip(MAKERS, itertools.cycle(("int4", "int8")), strict=False))
"""Each kind of rows of images with one scheme. What is scheduled does not depend on the scheme."""


@by_kernels(
    "make, scheme",
    native=[*EACH, (qwen3_vl, "int8"), (muse_glimmer, "int8"), (granite_docling, "int4")],
    torch=EACH[2:4],
)
def test_tokens_are_the_same_in_any_schedule(tmp_path: Path, make: Callable[[Path], Case], scheme: str) -> None:
    oracle, prompts = make(tmp_path)
    engine = engine_for(oracle, block_size=4, quantize=scheme)
    alone = [generate(engine, [prompt])[0] for prompt in prompts]
    assert alone[:2] != generate(engine_for(oracle), prompts[:2]), "rounded weights answer otherwise"
    assert generate(engine, prompts) == alone
    assert generate(engine_for(oracle, block_size=4, quantize=scheme, max_num_batched_tokens=9), prompts) == alone
    tight = tight_cache(oracle, prompts, max_num_batched_tokens=100, quantize=scheme)
    assert generate(tight, prompts) == alone
    # Where layers have states or short windows, the prompts take few blocks and may wait for each other.
    language_model = tight.runner.model.language_model
    assert tight.stats().preemptions > 0 or language_model.state_specs or language_model.cache_layout.windows[-1]

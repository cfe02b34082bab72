"""How many functions of vlmserve take part in a decode step."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import vlmserve
from tests.checkpoints import make_llama
from tests.engine.test_overlap import request
from tests.engine.test_structured import engine_of

MOST = 150
"""Functions, comprehensions among them, before requests held resources and the cache had groups."""


def test_decode_steps_call_few_distinct_functions(tmp_path: Path) -> None:
    """Of 16 steps without drafts, so that requests also fill blocks."""
    engine = engine_of(make_llama(tmp_path), speculation="off")
    engine.add(request("a", 9, temperature=0, max_tokens=40, ignore_eos=True))
    for _ in range(4):
        engine.step()
    root, called = str(Path(vlmserve.__file__).parent), set[tuple[str, str]]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            called.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(note)
    for _ in range(16):
        engine.step()
    sys.setprofile(None)
    assert engine.scheduler.requests
    assert 50 < len(called) < MOST

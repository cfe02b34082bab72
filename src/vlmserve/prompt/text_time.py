"""Limits the time to tokenize a text. Some patterns take quadratic time for a run of digits."""

from __future__ import annotations

import string
import time
from collections.abc import Callable

from vlmserve.cancellation import check_cancelled
from vlmserve.errors import InvalidRequestError

SHORT_TEXT = 2048
"""Maximum characters of a text that needs no check; it takes at most about 0.05 s."""
MIN_SECONDS = 2.0
SECONDS_PER_CHARACTER = 20e-6
"""Allowed CPU time. Ordinary text takes a tenth of it or less."""
GROWTH = 4
"""Ratio between successive piece sizes."""
_RUN = 4096
_MIN_QUADRATIC = 0.01
"""CPU seconds of a run. Faster runs are harmless, even if quadratic."""
_MANY_TIMES = 8
"""Limit of the time ratio between runs whose size ratio is `GROWTH`: linear time gives 4, quadratic time 16."""
_CHARACTERS = string.printable + "\u0301\u0416\u05e2\u093e\u4e2d\u304b\uac00\U0001f600"
"""Printable ASCII, a combining mark, and characters of other scripts."""

Encode = Callable[[str], object]


def is_quadratic(encode: Encode) -> bool:
    """Test runs of one character. Takes about 0.3 s of CPU time."""
    for character in _CHARACTERS:
        end = "1" if character.isalpha() else "a"
        took = _seconds(encode, character * _RUN + end)
        if took > _MIN_QUADRATIC and took > _MANY_TIMES * _seconds(encode, character * (_RUN // GROWTH) + end):
            return True
    return False


def check_time(encode: Encode, text: str) -> None:
    """Reject a text that would take too long, in time proportional to its length.

    A text of ``k`` pieces takes at most ``k`` times their total, because patterns take at most quadratic time. Raises
    InvalidRequestError and CancelledWorkError.
    """
    allowed = max(MIN_SECONDS, len(text) * SECONDS_PER_CHARACTER)
    size = SHORT_TEXT
    while size < len(text):
        taken = 0.0
        for start in range(0, len(text), size):
            check_cancelled()
            taken += _seconds(encode, text[start : start + size])
            if taken > allowed:
                raise InvalidRequestError(
                    "the model's tokenizer takes too long for this text; break up its long runs of similar characters, "
                    "such as digits",
                    param="messages",
                )
        if taken * -(-len(text) // size) <= allowed:
            return
        size *= GROWTH


def _seconds(encode: Encode, text: str) -> float:
    began = time.thread_time()
    encode(text)
    return time.thread_time() - began

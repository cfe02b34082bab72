"""Bounds the time to tokenize one text. Patterns of some tokenizers take quadratic time for a run of digits."""

from __future__ import annotations

import string
import time
from collections.abc import Callable

from vlmserve.cancellation import check_cancelled
from vlmserve.errors import InvalidRequestError

SHORT_TEXT = 2048
"""Characters of a text that needs no check. It takes at most some 0.05 s."""
MIN_SECONDS = 2.0
SECONDS_PER_CHARACTER = 20e-6
"""CPU time that a text may take. Ordinary text takes a tenth of this or less."""
GROWTH = 4
"""Ratio of the sizes of pieces."""
_RUN = 4096
_MIN_QUADRATIC = 0.01
"""CPU seconds for a run. Less time is no problem, whether it grows quadratically or not."""
_MANY_TIMES = 8
"""Ratio of the times for runs whose sizes have the ratio `GROWTH`; 4 if time is linear, 16 if it is quadratic."""
_CHARACTERS = string.printable + "\u0301\u0416\u05e2\u093e\u4e2d\u304b\uac00\U0001f600"
"""Printable ASCII, a combining mark, and characters of other scripts."""

Encode = Callable[[str], object]


def is_quadratic(encode: Encode) -> bool:
    """Return whether runs of one character take quadratic time. This takes about 0.3 s of CPU time."""
    for character in _CHARACTERS:
        end = "1" if character.isalpha() else "a"
        took = _seconds(encode, character * _RUN + end)
        if took > _MIN_QUADRATIC and took > _MANY_TIMES * _seconds(encode, character * (_RUN // GROWTH) + end):
            return True
    return False


def check_time(encode: Encode, text: str) -> None:
    """Reject a text that would take too long, in a time that is proportional to its length.

    Pieces of the text are encoded, then larger pieces. A text of ``k`` pieces takes at most ``k`` times as long as all
    pieces together, because patterns take at most quadratic time.
    Raises InvalidRequestError and CancelledWorkError.
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

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from vlmserve.errors import InvalidRequestError
from vlmserve.offline.confidences import json_confidence
from vlmserve.server.generation import TextDelta
from vlmserve.server.schema.logprobs import TokenBytes


class AnswerConfidences:
    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._deltas: dict[int, list[TextDelta]] = defaultdict(list)

    def read(self, delta: TextDelta) -> Any:
        """The probabilities of values at the last delta, unset before. None: incomplete JSON.

        Read each delta once. See `confidence`.
        """
        self._deltas[delta.index].append(delta)
        if delta.finish_reason is None:
            return msgspec.UNSET
        deltas = self._deltas.pop(delta.index)
        tokens = [
            (self._token_bytes(token.logprobs.token_id), token.logprobs.logprob)
            for delta in deltas
            for token in delta.logprobs
        ]
        try:
            return json_confidence("".join(delta.text for delta in deltas), tokens)
        except InvalidRequestError:  # a limit cut it off, or it calls functions instead
            return None

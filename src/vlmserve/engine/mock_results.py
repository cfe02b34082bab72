"""Vectors and scores of the mock engine."""

from __future__ import annotations

import numpy as np

from vlmserve.tasks import Embed, Prefill, Score, ScoreBranch, TaskResult

EMBEDDING_SIZE = 64


def mock_result(task: Prefill | Embed | Score | ScoreBranch, digest: bytes, num_tokens: int) -> TaskResult:
    """Return values that depend on the prompt's digest. num_tokens: of the prompt."""
    match task:
        case Prefill():
            return TaskResult(b"")
        case Embed():
            count = EMBEDDING_SIZE * (num_tokens if task.pooling == "all" else 1)
        case Score():
            count = len(task.continuations)
        case ScoreBranch():
            raise AssertionError("`check_request` lets no branch pass")
    values = np.random.default_rng(np.frombuffer(digest, np.uint32)).standard_normal(count)
    if isinstance(task, Score):
        values -= np.logaddexp.reduce(values)
    else:
        vectors = values.reshape(-1, EMBEDDING_SIZE)[:, : task.dimensions]
        values = vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if task.normalize else vectors
    return TaskResult(values.astype("<f4").tobytes())

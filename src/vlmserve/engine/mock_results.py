"""Vectors and scores of the mock engine."""

from __future__ import annotations

import numpy as np

from vlmserve.tasks import Embed, Score, TaskResult

EMBEDDING_SIZE = 64
"""Elements of a vector."""


def mock_result(task: Embed | Score, digest: bytes) -> TaskResult:
    """Make values that depend on a prompt's digest only."""
    count = len(task.token_ids) if isinstance(task, Score) else EMBEDDING_SIZE
    values = np.random.default_rng(np.frombuffer(digest, np.uint32)).standard_normal(count)
    if isinstance(task, Score):
        values -= np.logaddexp.reduce(values)
    else:
        values = values[: task.dimensions]
        values = values / np.linalg.norm(values) if task.normalize else values
    return TaskResult(values.astype("<f4").tobytes())

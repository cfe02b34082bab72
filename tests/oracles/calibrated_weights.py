"""GPTQ, AWQ and SmoothQuant as they are published, in float64, one weight after the other."""

from __future__ import annotations

import numpy as np


def hessian(inputs: np.ndarray) -> np.ndarray:
    """2 / N times the sum of outer products of the rows."""
    total = np.zeros((inputs.shape[1], inputs.shape[1]))
    for row in inputs:
        total += np.outer(row, row)
    return 2 * total / len(inputs)


def gptq(
    weight: np.ndarray, h: np.ndarray, scales: np.ndarray, minimums: np.ndarray, size: int, bits: int, damp: float
) -> np.ndarray:
    """Algorithm 1 of arXiv 2210.17323, without blocks, columns by the diagonal of H; scales, minimums: of groups."""
    rows, columns = weight.shape
    order = np.argsort(-np.diag(h), kind="stable")
    damped = h[np.ix_(order, order)] + damp * np.mean(np.diag(h)) * np.eye(columns)
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    rest = weight[:, order].astype(np.float64)
    result = np.zeros((rows, columns), np.int64)
    lowest = 1 if bits == 8 else 0
    for place, column in enumerate(order):
        group = column // size
        for row in range(rows):
            scale, minimum = scales[row, group], minimums[row, group]
            value = min(max(np.round((rest[row, place] - minimum) / scale), lowest), 2**bits - 1)
            result[row, column] = value
            error = (rest[row, place] - (scale * value + minimum)) / upper[place, place]
            rest[row, place + 1 :] -= error * upper[place, place + 1 :]
    return result


def rounded(weight: np.ndarray, scales: np.ndarray, minimums: np.ndarray, size: int) -> np.ndarray:
    """The nearest values of 4 bits."""
    group = np.arange(weight.shape[1]) // size
    scale, minimum = scales[:, group], minimums[:, group]
    return scale * np.clip(np.round((weight - minimum) / scale), 0, 15) + minimum


def awq_candidates(weight: np.ndarray, inputs: np.ndarray, size: int) -> list[np.ndarray]:
    """The 20 vectors of factors that AWQ tries (autoawq and llm-compressor, with duo scaling)."""
    magnitude = np.abs(inputs).mean(0)
    grouped = np.abs(weight).reshape(len(weight), -1, size)
    importance = (grouped / (grouped.max(2, keepdims=True) + 1e-6)).reshape(weight.shape).mean(0)
    candidates = []
    for step in range(20):
        ratio = step / 20
        factors = np.maximum(magnitude**ratio / (importance ** (1 - ratio) + 1e-4), 1e-4)
        candidates.append(factors / np.sqrt(factors.max() * factors.min()))
    return candidates


def smoothing(inputs: np.ndarray, weight: np.ndarray, strength: float) -> np.ndarray:
    """Equation 4 of arXiv 2211.10438."""
    return np.abs(inputs).max(0) ** strength / np.abs(weight).max(0) ** (1 - strength)

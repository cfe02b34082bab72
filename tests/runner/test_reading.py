"""Results of heads on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.test_memory import out_of_memory
from vlmserve.runner.heads.reading import write_results
from vlmserve.steps import ModelRunnerOutput


def test_results_arrive_without_spare_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cat, joined = torch.cat, list[int]()

    def lacking(tensors: Sequence[Tensor]) -> Tensor:
        joined.append(len(tensors))
        return cat(tensors) if len(joined) > 1 else out_of_memory()

    results = [("a", torch.tensor([1.0, -2.0])), ("b", torch.empty(0)), ("c", torch.tensor([3.0]))]
    output = ModelRunnerOutput()
    monkeypatch.setattr(torch, "cat", lacking)
    write_results(results, output)
    assert joined == [3, 3]
    assert output.token_ids == {"a": [], "b": [], "c": []}
    for name, values in results:
        assert np.array_equal(np.frombuffer(output.results[name].data, "<f4"), values.numpy())

"""Perplexity beside what transformers says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.checkpoints import make_llama
from vlmserve.cli import app
from vlmserve.errors import InvalidRequestError
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.registry import load_model
from vlmserve.tools.perplexity import perplexity, python_manual

CPU = torch.device("cpu")


@pytest.mark.parametrize(("length", "window"), [(40, 64), (64, 64), (65, 64), (150, 33), (2, 2)])
def test_it_is_that_of_transformers(tmp_path: Path, length: int, window: int) -> None:
    folder = make_llama(tmp_path)
    tokens = torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(0))
    done = []
    actual = perplexity(
        load_model(folder, LoadSettings(device=CPU, dtype=torch.float32)),
        tokens.tolist(),
        window=window,
        progress=lambda *progress: done.append(progress),
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    windows = [part for part in tokens.split(window) if len(part) > 1]
    with torch.inference_mode():
        losses = [model(input_ids=part[None], labels=part[None]).loss.item() * (len(part) - 1) for part in windows]
    count = sum(len(part) - 1 for part in windows)
    assert actual.num_tokens == count
    assert actual.value == pytest.approx(math.exp(sum(losses) / count), rel=1e-4)
    assert done[-1] == (sum(map(len, windows)), length)


def test_a_one_token_text_is_an_error(tmp_path: Path) -> None:
    model = load_model(make_llama(tmp_path), LoadSettings(device=CPU, dtype=torch.float32))
    with pytest.raises(InvalidRequestError, match="two tokens"):
        perplexity(model, [1])


def test_every_python_brings_a_long_text() -> None:
    assert len(python_manual()) > 300_000


def test_the_command_compares_ways_of_quantizing(tmp_path: Path) -> None:
    folder, text = make_llama(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("A short text, and some words more. " * 20)
    result = CliRunner().invoke(
        app, ["eval", "perplexity", str(folder), "--text", str(text), "--window", "50", "--device", "cpu"]
    )
    assert result.exit_code == 0, result.output
    for word in ("plain", "int8", "int4", "%", "text.txt"):
        assert word in result.output

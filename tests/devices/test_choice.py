"""Which device there is."""

from __future__ import annotations

import pytest
import torch

from vlmserve.devices.choice import find_device, open_device
from vlmserve.devices.mps import MpsDevice
from vlmserve.errors import ConfigurationError


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="CUDA devices"):
        find_device("cuda:99")
    if not torch.backends.mps.is_available():
        with pytest.raises(ConfigurationError, match="Metal"):
            find_device("mps")


def test_auto_takes_the_first_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert find_device("auto") == torch.device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert find_device("auto") == torch.device("cpu")


def test_unknown_kinds_and_kernels_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="implemented are cpu, cuda, mps"):
        open_device(torch.device("meta"), "auto", torch.float32, automatic=True)
    with pytest.raises(ConfigurationError, match="--kernels sse9: not available"):
        open_device(torch.device("cpu"), "sse9", torch.float32, automatic=True)


def test_metal_keeps_the_checkpoints_type() -> None:
    device, dtype = open_device(torch.device("mps"), "auto", torch.bfloat16, automatic=True)
    assert isinstance(device, MpsDevice)
    assert dtype == torch.bfloat16
    with pytest.raises(ConfigurationError, match="--kv-cache-dtype fp8: Metal has no 8-bit floats; use int8"):
        device.attention([], dtype, cache_type="fp8")

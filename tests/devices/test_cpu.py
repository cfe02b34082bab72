"""A CPU as a device: in which type it computes, and by what."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F

from tests.checkpoints import make_llama
from tests.native import built
from vlmserve.devices import cpu
from vlmserve.devices.choice import open_device
from vlmserve.devices.cpu import CpuDevice, NativeCpuDevice
from vlmserve.devices.device import EagerExecutor
from vlmserve.kernels.activation import ACTIVATIONS
from vlmserve.kernels.cpu_attention import CpuAttention
from vlmserve.kernels.extension import selected_isa, supported_isas
from vlmserve.kernels.operations import Epilogue
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.layer_specs import AttentionSpec
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.registry import load_model

CPU = torch.device("cpu")
PLAIN = AttentionSpec(4, 2, 16, 0.25)
WITH_SINKS = AttentionSpec(4, 2, 16, 0.25, sinks=(0.0,) * 4)


@pytest.mark.parametrize("hardware", [True, False], ids=["CPU with bfloat16", "CPU without"])
@pytest.mark.parametrize("native", [True, False], ids=["native kernels", "torch"])
@pytest.mark.parametrize(
    ("stored", "asked", "good", "poor"),
    [
        (torch.float32, None, torch.float32, torch.float32),
        (torch.bfloat16, None, torch.bfloat16, torch.float32),
        (torch.float16, None, torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32, torch.float32),
    ],
)
def test_cpu_default_dtype_is_fast(
    monkeypatch: pytest.MonkeyPatch,
    hardware: bool,
    native: bool,
    stored: torch.dtype,
    asked: torch.dtype | None,
    good: torch.dtype,
    poor: torch.dtype,
) -> None:
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: hardware)
    monkeypatch.setattr(cpu, "choose_kernels", lambda *_: "avx2" if native else None)
    device, chosen = open_device(CPU, "auto", asked or stored, automatic=asked is None)
    assert chosen == (good if native or hardware else poor)
    assert device.kernels == ("avx2" if native else "torch")


def test_requested_kernels_run() -> None:
    asked, _ = open_device(CPU, "torch", torch.float32, automatic=False)
    assert (type(asked), asked.kernels, asked.keeps_packed) == (CpuDevice, "torch", False)
    assert isinstance(asked.executor(), EagerExecutor)
    for isa in supported_isas():
        device, _ = open_device(CPU, isa, torch.float32, automatic=False)
        assert (type(device), device.kernels, device.keeps_packed) == (NativeCpuDevice, isa, True)
    if supported_isas():
        open_device(CPU, "native", torch.float32, automatic=False)


def test_torch_computes_activations_that_native_kernels_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACTIVATIONS, "mish", F.mish)
    weight, x = torch.randn(16, 16), torch.randn(2, 16)
    product = NativeCpuDevice(CPU, "avx2").linear(weight, None, Epilogue(activation="mish"), torch.float32)
    torch.testing.assert_close(product(x), F.mish(F.linear(x, weight)))


@built
def test_the_native_backend_serves_all_layers_or_none() -> None:
    device = NativeCpuDevice(CPU, selected_isa())
    assert isinstance(device.attention([PLAIN, PLAIN], torch.float32), CpuAttention)
    assert isinstance(device.attention([PLAIN, WITH_SINKS], torch.float32), TorchReference)
    windowed = AttentionSpec(4, 2, 16, 0.25, window=8)
    assert isinstance(device.attention([windowed], torch.float32), CpuAttention)


@built
def test_logits_of_all_steps_take_the_same_memory() -> None:
    device = NativeCpuDevice(CPU, selected_isa())
    first, smaller = device.logits_buffer(4, 100), device.logits_buffer(3, 100)
    assert first is not None
    assert smaller is not None
    assert (first.shape, smaller.shape) == ((4, 100), (3, 100))
    assert first.data_ptr() == smaller.data_ptr()


def test_a_cache_takes_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)

    def never() -> None:
        raise AssertionError("nothing is measured on a CPU")

    assert CpuDevice(CPU).cache_budget(0.9, never) == 500


@pytest.mark.parametrize("kernels", ["torch", *supported_isas()])
def test_layers_keep_no_second_weight(tmp_path: Path, kernels: str) -> None:
    model = load_model(make_llama(tmp_path), LoadSettings(device=CPU, dtype=torch.float32, kernels=kernels))
    assert isinstance(model.language_model, torch.nn.Module)
    names = [name for name, _ in model.language_model.named_parameters() if name.endswith("proj.weight")]
    assert names == []
    assert model.device.kernels == kernels


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN's instruction sets of x86")
def test_torch_bfloat16_works_with_restricted_onednn() -> None:
    program = """
import torch
from vlmserve.devices.cpu import CpuDevice
from vlmserve.kernels.operations import Epilogue
weight, x = torch.randn(64, 32).bfloat16(), torch.randn(3, 32).bfloat16()
product = CpuDevice(torch.device("cpu")).linear(weight, None, Epilogue(), torch.bfloat16)
torch.testing.assert_close(product(x), torch.nn.functional.linear(x, weight))
"""
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}, check=True)

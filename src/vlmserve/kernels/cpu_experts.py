"""Mixtures of experts by the native CPU kernels (csrc/experts.h)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlmserve.families.spec import ExpertsSpec
from vlmserve.kernels.cpu_native import PackedLinear
from vlmserve.kernels.cpu_program import Recorded
from vlmserve.kernels.cpu_record import EXPERTS
from vlmserve.kernels.extension import DTYPES, extension
from vlmserve.kernels.operations import ExpertKernels, LinearKernel, RouterWeights
from vlmserve.kernels.pages import allocate

_FORM = ("bits", "group_size", "minimums", "input_bits")


def unsupported_reason(router: LinearKernel, experts: Mapping[int, ExpertKernels]) -> str | None:
    products: list[LinearKernel] = [router, *(product for both in experts.values() for product in both)]
    if not all(isinstance(product, PackedLinear) for product in products):
        return "some weights are not packed"
    for part in zip(*experts.values(), strict=True):
        forms = {tuple(sorted(product.settings.items())) for product in part if isinstance(product, PackedLinear)}
        if len(forms) > 1:
            return "experts of a layer are packed differently"
    return None


class NativeExperts:
    def __init__(self, spec: ExpertsSpec, router: RouterWeights, experts: Mapping[int, ExpertKernels]) -> None:
        if (reason := unsupported_reason(router.product, experts)) is not None:
            raise ValueError(f"native experts are not possible here: {reason}")
        packed = _packed(router.product)
        up, down = (_packed(product) for product in next(iter(experts.values())))
        self._kept = [packed.packed, *(_packed(product).packed for both in experts.values() for product in both)]
        correction, norm, input_norm, factors = (
            self._address(tensor) for tensor in (router.correction, router.norm, router.input_norm, router.factors)
        )
        addresses = [[0, 0]] * spec.count
        for number, both in experts.items():
            addresses[number] = [_packed(product).packed.data_ptr() for product in both]
        table = _placed([word for pair in addresses for word in pair])
        words: list[int] = [
            packed.packed.data_ptr(),
            correction,
            table.data_ptr(),
            norm,
            input_norm,
            factors,
            _bits(0.0 if spec.router_norm is None else spec.router_norm.eps),
            spec.count,
            spec.top_k,
            up.in_features,
            spec.inner_size,
            up.settings["activation"],
            int(spec.scores == "sigmoid"),
            int(spec.renormalized),
            _bits(spec.scale),
            *(product.settings[name] for product in (up, down) for name in _FORM),
        ]
        self._layer = _placed(words)
        self._kept.append(table)
        self._size, self._dtype = up.in_features, up.dtype

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        self._kept.append(tensor.float().contiguous())
        return self._kept[-1].data_ptr()

    def __call__(self, x: Tensor, residual: Tensor | None = None, *, float_output: bool = False) -> Tensor:
        if isinstance(x, Recorded):
            return self._record(x, residual)
        dtype = torch.float32 if float_output else self._dtype
        if x.dim() != 2 or x.shape[1] != self._size or x.dtype != self._dtype:
            raise ValueError(f"{tuple(x.shape)} of {x.dtype} does not fit experts for {self._size} {self._dtype}")
        if residual is not None and (residual.shape != x.shape or residual.dtype != dtype):
            raise ValueError(f"a residual {tuple(residual.shape)} of {residual.dtype} is not like the output")
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        output = torch.empty(x.shape, dtype=dtype)
        if len(x):
            extension().experts(
                self._layer.data_ptr(),
                x.data_ptr(),
                0 if residual is None else residual.data_ptr(),
                output.data_ptr(),
                len(x),
                DTYPES[self._dtype],
                int(float_output),
                torch.get_num_threads(),
            )
        return output

    def _record(self, x: Recorded, residual: Tensor | None) -> Tensor:
        x.expect(self._size, self._dtype)
        if residual is not None:
            assert isinstance(residual, Recorded)
            residual.expect(self._size, self._dtype)
        x.recording.keep(self._kept)
        return x.recording.add(EXPERTS, x, self._size, residual=residual, experts=self._layer)


def _packed(product: LinearKernel) -> PackedLinear:
    assert isinstance(product, PackedLinear)
    return product


def _bits(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float64).view(torch.int64))


def _placed(words: Sequence[int]) -> Any:
    return allocate(len(words), torch.int64).copy_(torch.tensor(words, dtype=torch.int64))

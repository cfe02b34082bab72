"""Layers with states by the native CPU kernels (csrc/delta.h, csrc/convolution.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmserve.kernels.cpu_program import Recorded
from vlmserve.kernels.cpu_record import CONVOLUTION, DELTA
from vlmserve.kernels.extension import DTYPES, extension, supported_isas
from vlmserve.kernels.states import DeltaWeights, StateCache, StateRows
from vlmserve.layer_specs import ConvolutionSpec, DeltaSpec, StateSpec

_PANEL = 16
"""Head sizes must be multiples of this."""


def unsupported_reason(spec: StateSpec, dtype: torch.dtype) -> str | None:
    if not supported_isas():
        return "the native kernels were not built"
    if dtype not in DTYPES:
        return f"they do not support {dtype}"
    if spec.kernel > extension().max_kernel:
        return f"a convolution of {spec.kernel} rows is wider than {extension().max_kernel}"
    if isinstance(spec, DeltaSpec) and (spec.key_size % _PANEL or spec.value_size % _PANEL):
        return f"heads of {spec.key_size} and {spec.value_size} elements are no multiples of {_PANEL}"
    return None


def addresses_of(rows: StateRows | None) -> tuple[int, ...]:
    if rows is None:
        return (0,) * 7
    arrays = (rows.starts, rows.sources, rows.targets, rows.positions, rows.sequences, rows.drafts)
    return *map(_address, arrays), len(rows.sequences) - 1


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class NativeDelta:
    def __init__(self, spec: DeltaSpec, weights: DeltaWeights, dtype: torch.dtype) -> None:
        """dtype: of rows. Raises ValueError if `unsupported_reason` returns a reason."""
        _check(spec, dtype)
        self._spec, self._eps, self._dtype = spec, weights.eps, dtype
        self._width = spec.channels + spec.values
        self._convolution = weights.convolution.float().T.contiguous()
        self._decay, self._dt_bias, self._norm = (
            one.float().contiguous() for one in (weights.decay, weights.dt_bias, weights.norm)
        )

    def __call__(self, mixed: Tensor, gates: Tensor, cache: StateCache, rows: StateRows) -> Tensor:
        spec = self._spec
        assert cache.states is not None
        if isinstance(mixed, Recorded):
            assert isinstance(gates, Recorded)
            mixed.expect(self._width, self._dtype)
            gates.expect(2 * spec.num_value_heads, self._dtype)
            return mixed.recording.add(
                DELTA,
                mixed,
                spec.values,
                residual=gates,
                weight=self._norm,
                convolution=self._convolution,
                decay=self._decay,
                dt_bias=self._dt_bias,
                states=cache.states.data_ptr(),
                tail=cache.tail.data_ptr(),
                drafts=_address(cache.drafts),
                heads=spec.num_value_heads,
                kv_heads=spec.num_key_heads,
                head_size=spec.key_size,
                value_size=spec.value_size,
                kernel=spec.kernel,
                eps=self._eps,
            )
        mixed = _fitting(mixed, self._width, self._dtype, rows)
        gates = _fitting(gates, 2 * spec.num_value_heads, self._dtype, rows)
        output = torch.empty(len(mixed), spec.values, dtype=self._dtype)
        extension().delta(
            mixed.data_ptr(),
            gates.data_ptr(),
            self._convolution.data_ptr(),
            self._decay.data_ptr(),
            self._dt_bias.data_ptr(),
            self._norm.data_ptr(),
            cache.states.data_ptr(),
            cache.tail.data_ptr(),
            _address(cache.drafts),
            output.data_ptr(),
            *addresses_of(rows),
            len(mixed),
            spec.num_key_heads,
            spec.num_value_heads,
            spec.key_size,
            spec.value_size,
            spec.kernel,
            self._eps,
            DTYPES[self._dtype],
            torch.get_num_threads(),
        )
        return output


class NativeConvolution:
    def __init__(self, spec: ConvolutionSpec, weight: Tensor, dtype: torch.dtype) -> None:
        _check(spec, dtype)
        self._spec, self._dtype = spec, dtype
        self._weight = weight.float().T.contiguous()

    def __call__(self, mixed: Tensor, cache: StateCache, rows: StateRows) -> Tensor:
        channels, kernel = self._spec.channels, self._spec.kernel
        if isinstance(mixed, Recorded):
            mixed.expect(3 * channels, self._dtype)
            return mixed.recording.add(
                CONVOLUTION,
                mixed,
                channels,
                convolution=self._weight,
                tail=cache.tail.data_ptr(),
                drafts=_address(cache.drafts),
                in_features=channels,
                kernel=kernel,
            )
        mixed = _fitting(mixed, 3 * channels, self._dtype, rows)
        output = torch.empty(len(mixed), channels, dtype=self._dtype)
        extension().convolution(
            mixed.data_ptr(),
            self._weight.data_ptr(),
            cache.tail.data_ptr(),
            _address(cache.drafts),
            output.data_ptr(),
            *addresses_of(rows),
            len(mixed),
            channels,
            kernel,
            DTYPES[self._dtype],
            torch.get_num_threads(),
        )
        return output


def _check(spec: StateSpec, dtype: torch.dtype) -> None:
    if (reason := unsupported_reason(spec, dtype)) is not None:
        raise ValueError(f"native states are not possible here: {reason}")


def _fitting(mixed: Tensor, width: int, dtype: torch.dtype, rows: StateRows) -> Tensor:
    expected = int(rows.host.starts[-1]), width
    if mixed.shape != expected or mixed.dtype != dtype:
        raise ValueError(f"{tuple(mixed.shape)} of {mixed.dtype} does not fit {expected} of {dtype}")
    return mixed.contiguous()

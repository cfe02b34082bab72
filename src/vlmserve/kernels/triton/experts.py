"""Mixtures of experts on a GPU, with launches that do not depend on the router."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vlmserve.families.spec import ExpertsSpec
from vlmserve.kernels.operations import ExpertKernels, LinearKernel, RouterWeights
from vlmserve.kernels.triton.expert_kernels import (
    TILE_WORDS,
    WORDS,
    choose_experts,
    count_rows,
    multiply_by_expert,
    sort_rows,
    weigh_experts,
)
from vlmserve.kernels.triton.host_math import cdiv, next_power_of_2
from vlmserve.kernels.triton.launching import ALIGNMENT
from vlmserve.kernels.triton.norm import MAX_SIZE, TritonNorm
from vlmserve.kernels.triton.products import TritonLinearKernel
from vlmserve.kernels.triton.stored import block_of
from vlmserve.kernels.triton.tuned import LARGE_BLOCK, Tiling
from vlmserve.kernels.triton.unpacking import has_assembly

MOST_EXPERTS = 1024
"""Maximum number of experts."""
ROUTER_ROWS = 16
"""Fixed rows of a router tile, so that a row's scores depend only on that row."""
FEW_TOKENS, MANY_TOKENS = 16, 64
"""Rows of an expert's tile: few for decodes, many for prompts, which read weights less often."""
MANY_ROWS = 32
"""Average rows per expert above which tiles have `MANY_TOKENS`."""
CHOICES = 1024
"""Choices that a program reads at once."""
COLUMNS = 1024
"""Elements of a row that a program sums."""


def unsupported_reason(router: RouterWeights, experts: Mapping[int, ExpertKernels]) -> str | None:
    if not isinstance(router.product, TritonLinearKernel) or router.product.dtype != torch.float32:
        return "the router is not in float32"
    if len(router.product.stored.values) > MOST_EXPERTS:
        return f"they know at most {MOST_EXPERTS} experts"
    if router.norm is not None and len(router.norm) > MAX_SIZE:
        return f"rows of more than {MAX_SIZE} elements"
    for part in zip(*experts.values(), strict=True):
        kinds = {_kind(product) for product in part}
        if None in kinds:
            return "some weights have no Triton kernel"
        if len(kinds) > 1:
            return "experts of a layer are stored differently"
        if any(address % ALIGNMENT for product in part for address in _addresses(product)):
            return "some weights are not aligned"
    return None


def tile(bits: int, group: int, in_features: int, rows_of_expert: int, item_bytes: int) -> Tiling:
    """rows_of_expert: average. item_bytes: of an element of x.

    Only `tokens` depends on the rows, so sums have the same order in any batch.
    """
    of_group = max(block_of(group, in_features), LARGE_BLOCK) if bits == 4 else 0
    inputs = {4: of_group, 8: 128, 16: 64, 32: 32}[bits]
    if item_bytes == 4:
        return Tiling(32, FEW_TOKENS, inputs, 1, 4, 2)
    are_many = rows_of_expert > MANY_ROWS
    warps = 8 if are_many and bits < 16 else 4
    return Tiling(64, MANY_TOKENS if are_many else FEW_TOKENS, inputs, 1, warps, 3)


class TritonExperts:
    def __init__(self, spec: ExpertsSpec, router: RouterWeights, experts: Mapping[int, ExpertKernels]) -> None:
        if (reason := unsupported_reason(router, experts)) is not None:
            raise ValueError(f"experts in Triton are not possible here: {reason}")
        self._spec, self._router, self._kept = spec, router, dict(experts)
        assert isinstance(router.product, TritonLinearKernel)
        self._scores = router.product
        self._router_norm, self._input_norm = (
            None if weight is None or spec.router_norm is None else TritonNorm(weight, None, spec.router_norm.eps)
            for weight in (router.norm, router.input_norm)
        )
        up, down = next(iter(experts.values()))
        assert isinstance(up, TritonLinearKernel)
        assert isinstance(down, TritonLinearKernel)
        self._up, self._down = up, down
        table = [[0] * WORDS.value for _ in range(spec.count)]
        for number, both in experts.items():
            table[number] = [address for product in both for address in _addresses(product)]
        self._table = torch.tensor(table, dtype=torch.int64, device=up.stored.values.device)

    def __call__(self, x: Tensor, residual: Tensor | None = None, *, float_output: bool = False) -> Tensor:
        x = x.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32 if float_output else x.dtype, device=x.device)
        if not len(x):
            return out
        chosen, weights = self._choose(x)
        results = self._compute(x if self._input_norm is None else self._input_norm(x), chosen)
        size = x.shape[1]
        weigh_experts[(len(x), cdiv(size, COLUMNS))](
            results, self._table, chosen, weights, out if residual is None else residual.contiguous(), out, size,
            TOP_K=self._spec.top_k, BLOCK=COLUMNS, HAS_RESIDUAL=residual is not None, num_warps=4,
        )  # fmt: skip
        return out

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return experts (int32) and weights (float32), ``[rows, top_k]``."""
        spec, read = self._spec, x.float()
        if self._router_norm is not None:
            read = self._router_norm(read)
        logits = self._scores.few(read, tiles=self._scores.tiling(ROUTER_ROWS, x.device))
        chosen = torch.empty((len(x), spec.top_k), dtype=torch.int32, device=x.device)
        weights = torch.empty(chosen.shape, dtype=torch.float32, device=x.device)
        correction, factors = self._router.correction, self._router.factors
        choose_experts[(len(x),)](
            logits,
            logits if correction is None else correction,
            logits if factors is None else factors,
            chosen,
            weights,
            float(spec.scale),
            COUNT=spec.count,
            BLOCK=next_power_of_2(spec.count),
            TOP_K=spec.top_k,
            TOP_BLOCK=next_power_of_2(spec.top_k),
            SIGMOIDS=spec.scores == "sigmoid",
            RENORMALIZED=spec.renormalized,
            HAS_CORRECTION=correction is not None,
            HAS_FACTORS=factors is not None,
            num_warps=max(1, next_power_of_2(spec.count) // 256),
        )
        return chosen, weights

    def _compute(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return results ``[rows * top_k, size]``, unwritten for other ranks' experts."""
        count, experts = chosen.numel(), self._spec.count
        up, down = (
            tile(part.stored.bits, part.stored.group, in_features, count // experts, x.element_size())
            for part, in_features in ((self._up, x.shape[1]), (self._down, self._spec.inner_size))
        )
        tiles = min(count, experts) + count // up.tokens
        counts, order, places = (
            torch.empty(length, dtype=torch.int32, device=x.device)
            for length in (experts, count, tiles * TILE_WORDS.value)
        )
        count_rows[(experts,)](chosen, self._table, counts, count, BLOCK=CHOICES, num_warps=4)
        sort_rows[(experts,)](
            chosen, counts, order, places, count, tiles, COUNT=experts, EXPERTS=next_power_of_2(experts),
            TOKENS=up.tokens, BLOCK=CHOICES, num_warps=4,
        )  # fmt: skip
        inner = torch.empty((count, self._spec.inner_size), dtype=x.dtype, device=x.device)
        results = torch.empty((count, x.shape[1]), dtype=x.dtype, device=x.device)
        self._multiply(self._up, up, x, inner, order, places, gathers=True)
        self._multiply(self._down, down, inner, results, order, places, gathers=False)
        return results

    def _multiply(
        self,
        part: TritonLinearKernel,
        tiles: Tiling,
        x: Tensor,
        out: Tensor,
        order: Tensor,
        places: Tensor,
        *,
        gathers: bool,
    ) -> None:
        stored, in_features = part.stored, x.shape[1]
        out_features = len(stored.values)
        multiply_by_expert[(cdiv(out_features, tiles.outputs), len(places) // TILE_WORDS.value)](
            x,
            self._table,
            order,
            places,
            out,
            len(x),
            x.stride(0),
            in_features,
            out_features,
            FIRST_WORD=0 if gathers else WORDS.value // 2,
            TOP_K=self._spec.top_k,
            GATHERS=gathers,
            OUTPUTS=tiles.outputs,
            TOKENS=tiles.tokens,
            INPUTS=tiles.inputs,
            BITS=stored.bits,
            BLOCK=stored.block,
            GROUPS=stored.block // stored.group if stored.bits == 4 else 1,
            STAGES=tiles.stages,
            EVEN=in_features % tiles.inputs == 0,
            ASSEMBLY=has_assembly(x.device),
            ACTIVATION=part.activation or "",
            GATED=part.gated,
            num_warps=tiles.warps,
        )


def _kind(product: LinearKernel) -> tuple[object, ...] | None:
    """Settings shared by all experts of a layer. None: another kernel."""
    if not isinstance(product, TritonLinearKernel):
        return None
    stored = product.stored
    kind = stored.bits, stored.group, stored.values.dtype, stored.values.shape, product.dtype
    return *kind, product.activation, product.gated


def _addresses(product: LinearKernel) -> list[int]:
    assert isinstance(product, TritonLinearKernel)
    stored = product.stored
    return [0 if part is None else part.data_ptr() for part in (stored.values, stored.scales, stored.minimums)]

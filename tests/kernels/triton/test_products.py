"""Products with plain weights and with weights of few bits, beside float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.activation import ACTIVATIONS, activation
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.kernels.triton import products, unpacking
from vlmserve.kernels.triton.gated import finish
from vlmserve.kernels.triton.norm import TritonNorm
from vlmserve.kernels.triton.products import TritonLinearKernel, tiling
from vlmserve.kernels.triton.stored import store, unsupported_reason
from vlmserve.kernels.triton.tuned import Tiling
from vlmserve.quant.methods.rtn import round_to_nearest

BITS = {"plain": 16, "8 bits": 8, "4 bits": 4}
KINDS = tuple(BITS)


def made(kind: str, out_features: int, in_features: int, device: torch.device, group: int = 32) -> tuple[Any, Tensor]:
    """A weight of this kind, and the float64 numbers that it stands for."""
    plain = torch.randn(out_features, in_features) / in_features**0.5
    if kind == "plain":
        weight = plain.half()
        return weight.to(device), weight.double()
    bits = int(kind[0])
    quantized = round_to_nearest(plain, bits=bits, group_size=group, symmetric=False)
    parts = [quantized.values, quantized.scales, quantized.minimums]
    if bits == 4:
        # Kernels keep these in float16.
        parts[1:] = [part.half().float() for part in parts[1:]]
    scales, minimums = (part.double().repeat_interleave(quantized.group_size, 1) for part in parts[1:])
    on_device = QuantizedWeight(bits, quantized.group_size, *(part.to(device) for part in parts))
    return on_device, scales * parts[0].double() + minimums


def made_for_bfloat16(
    kind: str, out_features: int, in_features: int, device: torch.device, group: int = 128
) -> tuple[Any, Tensor]:
    """The same for inputs in bfloat16."""
    weight, numbers = made(kind, out_features, in_features, device, group)
    return (weight.bfloat16(), weight.bfloat16().cpu().double()) if kind == "plain" else (weight, numbers)


def assert_near(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within what rounding results once more makes of them."""
    bounds = {torch.float32: 1e-4, torch.float16: 2e-3}
    torch.testing.assert_close(result.cpu().double(), expected, atol=bounds[dtype], rtol=bounds[dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 9, 20])
def test_few_rows_equal_float64(device: torch.device, kind: str, rows: int) -> None:
    torch.manual_seed(rows)
    weight, numbers = made(kind, 70, 96, device)
    x, residual = torch.randn(rows, 96).half(), torch.randn(rows, 70).half()
    product = TritonLinearKernel(weight, dtype=torch.float16)
    expected = x.double() @ numbers.T
    assert_near(product(x.to(device)), expected, torch.float16)
    assert_near(product(x.to(device), residual.to(device)), expected + residual.double(), torch.float16)


@pytest.mark.parametrize("kind", ["plain", "8 bits"])
def test_sums_of_tiles_may_restart(device: torch.device, kind: str) -> None:
    torch.manual_seed(0)
    weight, numbers = made(kind, 70, 96, device)
    x = torch.randn(20, 96).half()
    tiles = Tiling(128, 32, 32, 1, 4, 2, restarts=True)
    result = TritonLinearKernel(weight, dtype=torch.float16).few(x.to(device), tiles=tiles)
    assert_near(result, x.double() @ numbers.T, torch.float16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warps", "splits"), [(2, 1), (4, 1), (8, 2), (2, 5)])
def test_warps_divide_inputs(device: torch.device, kind: str, warps: int, splits: int) -> None:
    """Ten tiles: whole rounds of them, and some that are not."""
    torch.manual_seed(warps)
    inputs = 64 if kind == "4 bits" else 32
    weight, numbers = made(kind, 70, 10 * inputs, device)
    x = torch.randn(5, 10 * inputs).half()
    product = TritonLinearKernel(weight, dtype=torch.float16)
    tiles = Tiling(32, 8, inputs, splits, warps, 2)
    assert tiles.parts(16) == warps
    assert_near(product.few(x.to(device), tiles=tiles), x.double() @ numbers.T, torch.float16)


@pytest.mark.parametrize(
    ("group", "dtype", "splits"),
    [(32, torch.float16, 2), (64, torch.float16, 1), (128, torch.float16, 2), (64, torch.float32, 1)],
)
def test_large_tiles_of_4_bits(device: torch.device, group: int, dtype: torch.dtype, splits: int) -> None:
    """Three tiles, the last of which is half of one where groups are smaller."""
    torch.manual_seed(group)
    in_features = 384 - (64 if group < 128 else 0)
    weight, numbers = made("4 bits", 70, in_features, device, group)
    x, residual = torch.randn(40, in_features).to(dtype), torch.randn(40, 70).to(dtype)
    tiles = Tiling(64, 64, 128, splits, 4, 2)
    assert tiles.parts(4) == 1
    result = TritonLinearKernel(weight, dtype=dtype).few(x.to(device), residual.to(device), tiles)
    rounded = numbers if dtype == torch.float32 else numbers.half().double()
    assert_near(result, x.double() @ rounded.T + residual.double(), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("act", "rows"), [("silu", 150), ("gelu_pytorch_tanh", 2)])
def test_matmul_adds_gates_biases_and_residuals(device: torch.device, kind: str, act: str, rows: int) -> None:
    torch.manual_seed(0)
    weight, numbers = made(kind, 36, 64, device)
    bias, x, residual = torch.randn(36).half(), torch.randn(rows, 64).half(), torch.randn(rows, 18).half()
    product = TritonLinearKernel(weight, bias.to(device), dtype=torch.float16, activation=act, gated=True)
    gate, up = (x.double() @ numbers.T + bias.double()).chunk(2, -1)
    expected = activation(act)(gate) * up + residual.double()
    result = product(x.to(device), residual.to(device))
    torch.testing.assert_close(result.cpu().double(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_float32(device: torch.device, kind: str) -> None:
    torch.manual_seed(0)
    weight, numbers = made(kind, 40, 32, device)
    x = torch.randn(2, 32).half()
    logits = TritonLinearKernel(weight, dtype=torch.float16, float_output=True)(x.to(device))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.cpu().double(), x.double() @ numbers.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("group", "dtype"), [(32, torch.float16), (64, torch.float16), (128, torch.float16), (64, torch.float32)]
)
def test_groups_of_4_bits(device: torch.device, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(group)
    weight, numbers = made("4 bits", 20, 256, device, group)
    x = torch.randn(2, 256).to(dtype)
    assert_near(TritonLinearKernel(weight, dtype=dtype)(x.to(device)), x.double() @ numbers.T, dtype)


@pytest.mark.parametrize(
    ("kind", "in_features", "group"),
    [("4 bits", 544, 32), ("4 bits", 384, 128), ("8 bits", 272, 272), ("8 bits", 75, 75)],
)
def test_weights_are_expanded_to_the_bit(device: torch.device, kind: str, in_features: int, group: int) -> None:
    """Beside torch's operations, in any block of outputs, and beside float64."""
    torch.manual_seed(0)
    weight, numbers = made(kind, 39, in_features, device, group)
    stored, whole, assembly = store(weight), torch.arange(39, device=device), unpacking.has_assembly(device)
    # The interpreter cuts bfloat16 off instead of rounding it.
    for dtype in (torch.float16, torch.float32, *([torch.bfloat16] if assembly else [])):
        expanded = stored.expanded(slice(0, 39), dtype, assembly=assembly)
        assert expanded.dtype == dtype
        assert torch.equal(expanded, stored.rows(whole, dtype))
        rounding = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(expanded.cpu().double(), numbers, atol=1e-7, rtol=rounding + 1e-6)
    assert torch.equal(stored.expanded(slice(5, 26), dtype, assembly=assembly), expanded[5:26])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bias", "launches"), [(False, 0), (True, 1)], ids=["no bias", "bias"])
def test_the_library_adds_a_residual_to_many_rows(
    device: torch.device, kind: str, bias: bool, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no bias; what is added stays as it is, in any order of memory."""
    monkeypatch.setattr(products, "EXPANDED_ELEMENTS", 30 * 64)
    finished: list[Tensor] = []
    monkeypatch.setattr(
        products, "finish", lambda x, *args, **options: finished.append(x) or finish(x, *args, **options)
    )
    torch.manual_seed(0)
    weight, numbers = made(kind, 70, 64, device)
    added, x, residual = torch.randn(70).half(), torch.randn(2, 65, 64).half(), torch.randn(70, 130).half().T
    product = TritonLinearKernel(weight, added.to(device) if bias else None, dtype=torch.float16)
    own = residual.to(device)
    result = product(x.to(device), own.view(2, 65, 70))
    expected = x.double() @ numbers.T + residual.double().view(2, 65, 70) + (added.double() if bias else 0)
    assert_near(result, expected, torch.float16)
    assert torch.equal(own.cpu(), residual)
    assert len(finished) == launches


def test_residuals_may_have_another_dtype(device: torch.device) -> None:
    torch.manual_seed(0)
    weight, numbers = made("plain", 70, 64, device)
    x, residual = torch.randn(130, 64).half(), torch.randn(130, 70)
    product = TritonLinearKernel(weight, dtype=torch.float16, float_output=True)
    result = product(x.to(device), residual.to(device))
    assert result.dtype == torch.float32
    assert_near(result, x.double() @ numbers.T + residual.double(), torch.float16)


@pytest.mark.parametrize("kind", KINDS)
def test_large_weights_are_multiplied_in_blocks(
    device: torch.device, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "EXPANDED_ELEMENTS", 30 * 64)
    torch.manual_seed(0)
    weight, numbers = made(kind, 70, 64, device)
    bias, x = torch.randn(70).half(), torch.randn(130, 64).half()
    result = TritonLinearKernel(weight, bias.to(device), dtype=torch.float16)(x.to(device))
    assert_near(result, x.double() @ numbers.T + bias.double(), torch.float16)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_the_inputs_are_added_in_order(
    device: torch.device, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight, numbers = made(kind, 24, 256, device)
    x, bias = torch.randn(3, 256).half(), torch.randn(24).half()
    by_shape, inputs = tiling, 64 if kind == "4 bits" else 32
    monkeypatch.setattr(
        products, "tiling", lambda *shape, **gpu: by_shape(*shape, **gpu)._replace(splits=3, inputs=inputs)
    )
    product = TritonLinearKernel(weight, bias.to(device), dtype=torch.float16, activation="relu", gated=True)
    gate, up = (x.double() @ numbers.T + bias.double()).chunk(2, -1)
    results = [product(x.to(device)) for _ in range(2)]
    assert torch.equal(*results)
    torch.testing.assert_close(results[0].cpu().double(), gate.relu() * up, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "splits"), [(3, 1), (3, 2), (20, 1)])
def test_a_norm_between_products_equals_float64(
    device: torch.device, kind: str, rows: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of very different sizes, outputs that are no whole tiles, and a number of tiles that is no power of two."""
    torch.manual_seed(rows)
    tiles = Tiling(32, 8 if rows <= 8 else 32, 64, splits, 2, 2)
    first, first_numbers = made(kind, 160, 512, device)
    second, second_numbers = made(kind, 70, 160, device)
    if kind == "plain":
        first, second = first.float(), second.float()
    x, residual, bias, weight = torch.randn(rows, 512), torch.randn(rows, 160), torch.randn(70), torch.randn(160)
    residual *= torch.logspace(-2, 2, rows)[:, None]
    before = TritonLinearKernel(first, dtype=torch.float32)
    behind = TritonLinearKernel(second, bias.to(device), dtype=torch.float32, activation="silu", gated=True)
    of_outputs = {160: tiles, 70: tiles._replace(inputs=32) if kind == "4 bits" else tiles}
    monkeypatch.setattr(products, "tiling", lambda bits, group, outputs, *_, **__: of_outputs[outputs])
    norm = TritonNorm(weight.to(device), None, 1e-5)
    deferred = before.deferring(x.to(device), residual.to(device), norm)
    assert deferred is not None
    expected = x.double() @ first_numbers.T + residual.double()
    assert_near(deferred.rows, expected, torch.float32)
    normed = expected * torch.rsqrt(expected.square().mean(1, keepdim=True) + 1e-5) * weight.double()
    assert_near(deferred.normed, normed, torch.float32)
    gate, up = (normed @ second_numbers.T + bias.double()).chunk(2, 1)
    assert_near(behind.complete(deferred), F.silu(gate) * up, torch.float32)


def test_unsupported_norms_are_not_deferred(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, x, residual = torch.randn(48, 32), torch.randn(3, 32).to(device), torch.randn(3, 48).to(device)
    scaling = TritonNorm(torch.randn(48).to(device), None, 1e-5)
    shifting = TritonNorm(torch.randn(48).to(device), torch.randn(48).to(device), 1e-5)
    product = TritonLinearKernel(weight.to(device), dtype=torch.float32)
    deferred = product.deferring(x, residual, scaling)
    assert deferred is not None
    assert product.deferring(x, residual, shifting) is None
    assert product.deferring(x[:0], residual[:0], scaling) is None
    assert product.deferring(x.repeat(50, 1), residual.repeat(50, 1), scaling) is None
    activated = TritonLinearKernel(weight.to(device), dtype=torch.float32, activation="silu")
    assert activated.deferring(x, residual, scaling) is None
    half = TritonLinearKernel(weight.half().to(device), dtype=torch.float16)
    assert half.deferring(x.half(), residual.half(), scaling) is None
    following = TritonLinearKernel(torch.randn(16, 48).to(device), dtype=torch.float32)
    assert following.completes(len(x))
    monkeypatch.setattr(products, "MOST_ROWS", 2)
    assert not following.completes(len(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_the_same_result_beside_others(device: torch.device, kind: str) -> None:
    torch.manual_seed(0)
    weight, _ = made(kind, 33, 96, device)
    x = torch.randn(8, 96).half().to(device)
    product = TritonLinearKernel(weight, dtype=torch.float16)
    assert torch.equal(product(x)[5:6], product(x[5:6]))


@pytest.mark.parametrize(
    ("kind", "out_features", "most"),
    [("plain", 64, 16), ("plain", 16384, 64), ("8 bits", 64, 128), ("4 bits", 64, 128)],
)
def test_the_library_multiplies_more_rows(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str, out_features: int, most: int
) -> None:
    weight, _ = made(kind, out_features, 64, device, 64)
    product = TritonLinearKernel(weight, dtype=torch.float16)
    asked: list[int] = []
    monkeypatch.setattr(product, "few", lambda x, *_, **__: asked.append(len(x)) or x.new_zeros(len(x), out_features))
    for rows in (most, most + 1):
        product(torch.zeros(rows, 64, dtype=torch.float16, device=device))
    assert asked == [most]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_gives_rows_back(device: torch.device, kind: str) -> None:
    torch.manual_seed(0)
    weight, numbers = made(kind, 30, 64, device)
    indices = torch.tensor([7, 0, 29, 7])
    rows = TritonLinearKernel(weight, dtype=torch.float16).rows(indices.to(device))
    assert_near(rows, numbers[indices], torch.float16)


def test_few_bits_take_few_bytes(device: torch.device) -> None:
    sizes = {kind: TritonLinearKernel(made(kind, 64, 128, device)[0], dtype=torch.float16).num_bytes for kind in KINDS}
    assert sizes == {"plain": 64 * 128 * 2, "8 bits": 64 * 128 + 64 * 4, "4 bits": 64 * 64 + 64 * 4 * 4}


def test_what_kernels_cannot_multiply_with_is_named() -> None:
    odd = round_to_nearest(torch.randn(4, 40), bits=4, group_size=32, symmetric=True)
    assert "groups of 32" in str(unsupported_reason(odd, None))
    wide = QuantizedWeight(4, 16, torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 2), torch.ones(4, 2))
    assert "groups of 16" in str(unsupported_reason(wide, None))
    assert "activation" in str(unsupported_reason(torch.zeros(4, 4), "softplus"))
    assert "float64" in str(unsupported_reason(torch.zeros(4, 4).double(), None))
    assert unsupported_reason(torch.zeros(4, 4), "silu") is None


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_torchs(device: torch.device, name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 50) * 4
    torch.testing.assert_close(finish(x.to(device), name, layout="").cpu(), activation(name)(x), atol=2e-6, rtol=2e-6)
    pairs, residual = torch.randn(3, 50, 2) * 2, torch.randn(3, 50)
    gated = finish(pairs.flatten(1).to(device), name, layout="pairs", residual=residual.to(device))
    expected = activation(name)(pairs[..., 0]) * pairs[..., 1] + residual
    torch.testing.assert_close(gated.cpu(), expected, atol=4e-6, rtol=4e-6)


def permuted(first: int, second: int, selector: int) -> int:
    """What `prmt` does: each nibble of the selector picks a byte of two registers, those of the first one first."""
    both = first.to_bytes(4, "little") + second.to_bytes(4, "little")
    return int.from_bytes(bytes(both[selector >> 4 * i & 7] for i in range(4)), "little")


def halves(register: int, dtype: torch.dtype) -> list[float]:
    """The two 16-bit numbers of a register."""
    signed = [(register >> shift & 0xFFFF ^ 0x8000) - 0x8000 for shift in (0, 16)]
    return torch.tensor(signed, dtype=torch.int16).view(dtype).tolist()


@pytest.mark.parametrize(("dtype", "magic", "offset"), [(torch.bfloat16, 0x43, 128), (torch.float16, 0x64, 1024)])
def test_selected_bytes_are_floats_of_the_integers(dtype: torch.dtype, magic: int, offset: int) -> None:
    integers = [3, 15, 0, 9]
    register = int.from_bytes(bytes(integers), "little")
    pairs = [permuted(register, magic * 0x01010101, part) for part in (unpacking.FIRST_PAIR, unpacking.SECOND_PAIR)]
    assert [number for pair in pairs for number in halves(pair, dtype)] == [offset + integer for integer in integers]


def test_byte_assembly_gives_signed_numbers() -> None:
    """bfloat16: 128 + the low 7 bits, less 256 where the top bit is clear and less 128 where it is set."""
    for byte in range(256):
        kept = torch.tensor([0x4300 | byte & 0x7F], dtype=torch.int16).view(torch.bfloat16)
        taken = torch.tensor([(0xC300 | ~byte & 0x80) - 0x10000], dtype=torch.int16).view(torch.bfloat16)
        assert (kept + taken).item() == byte - 128
        half = torch.tensor([0x6400 | byte], dtype=torch.int16).view(torch.float16)
        offset = torch.tensor([0xE480 - 0x10000], dtype=torch.int16).view(torch.float16)
        assert (half + offset).item() == byte - 128


def test_many_rows_use_8_bit_inputs_when_asked(device: torch.device) -> None:
    torch.manual_seed(0)
    weight, _ = made("8 bits", 70, 200, device)
    weight = dataclasses.replace(weight, input_bits=8)
    bias, x = torch.randn(70), torch.randn(130, 200)
    x[3, 128:] = 0
    x[5, 7] = torch.inf
    result = TritonLinearKernel(weight, bias.to(device), dtype=torch.float32)(x.to(device)).cpu()
    expected = bias.double().expand(130, 70)
    integers = (weight.values.cpu().double() - 128) * weight.scales.cpu().double()
    for inputs in (slice(0, 128), slice(128, 200)):
        largest = x[:, inputs].abs().amax(1, keepdim=True)
        rounded = (x[:, inputs] * (127 / largest.clamp(min=1e-30))).round().double()
        expected = expected + rounded @ integers[:, inputs].T * (largest / 127).double()
    assert result[5].isnan().all()
    finite = torch.arange(130) != 5
    torch.testing.assert_close(result[finite].double(), expected[finite], atol=1e-5, rtol=1e-5)
    few = TritonLinearKernel(weight, bias.to(device), dtype=torch.float32)(x[:4].to(device)).cpu().double()
    torch.testing.assert_close(few, x[:4].double() @ integers.T + bias.double(), atol=1e-4, rtol=1e-4)

"""Converts 4-bit and 8-bit weights in registers to the numbers that tensor cores multiply."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FIRST_PAIR = 0x4140
"""`prmt` selector, lowest byte first: byte 0 of the integers, magic byte, byte 1, magic byte."""
SECOND_PAIR = 0x4342
"""The same for bytes 2 and 3."""
EVEN_PAIR = 0x4240
"""The same for bytes 0 and 2."""
ODD_PAIR = 0x4341
"""The same for bytes 1 and 3."""
SINGLE = 0x7044
"""Two zero bytes, a byte of the integers (0 by default), magic byte: 128 + q in float32."""

_NIBBLES = """{{
.reg .b32 low, high;
and.b32 low, $4, 0x0f0f0f0f;
shr.b32 high, $4, 4;
and.b32 high, high, 0x0f0f0f0f;
prmt.b32 $0, low, {magic}, {first};
prmt.b32 $1, low, {magic}, {second};
prmt.b32 $2, high, {magic}, {first};
prmt.b32 $3, high, {magic}, {second};
}}"""
_WEIGHTS = """{{
.reg .b32 low, high, a, b;
and.b32 low, $4, 0x0f0f0f0f;
shr.b32 high, $4, 4;
and.b32 high, high, 0x0f0f0f0f;
{low_pairs}
{high_pairs}
}}"""
_WEIGHT_PAIR = """prmt.b32 a, {integers}, 0x43000000, {first};
prmt.b32 b, {integers}, 0x43000000, {second};
fma.rn.f32 a, a, ${scale}, ${offset};
fma.rn.f32 b, b, ${next_scale}, ${next_offset};
cvt.rn.{kind}x2.f32 ${result}, b, a;"""
_BYTES_BFLOAT16 = """{{
.reg .b32 low, top, a, b, c, d, one;
mov.b32 one, 0x3f803f80;
and.b32 low, $2, 0x7f7f7f7f;
not.b32 top, $2;
and.b32 top, top, 0x80808080;
prmt.b32 a, low, 0x43434343, {first};
prmt.b32 b, low, 0x43434343, {second};
prmt.b32 c, top, 0xc3c3c3c3, {first};
prmt.b32 d, top, 0xc3c3c3c3, {second};
fma.rn.bf16x2 $0, a, one, c;
fma.rn.bf16x2 $1, b, one, d;
}}"""
_BYTES_FLOAT16 = """{{
.reg .b32 a, b, offset;
mov.b32 offset, 0xe480e480;
prmt.b32 a, $2, 0x64646464, {first};
prmt.b32 b, $2, 0x64646464, {second};
add.rn.f16x2 $0, a, offset;
add.rn.f16x2 $1, b, offset;
}}"""

_BYTE_PAIRS_BFLOAT16 = """{{
.reg .b32 low, top, a, b, c, d, one;
mov.b32 one, 0x3f803f80;
and.b32 low, $2, 0x7f7f7f7f;
and.b32 top, $2, 0x80808080;
prmt.b32 a, low, 0x43434343, {even};
prmt.b32 b, low, 0x43434343, {odd};
prmt.b32 c, top, 0xc3c3c3c3, {even};
prmt.b32 d, top, 0xc3c3c3c3, {odd};
fma.rn.bf16x2 $0, a, one, c;
fma.rn.bf16x2 $1, b, one, d;
}}"""
_BYTE_PAIRS_FLOAT16 = """{{
.reg .b32 shifted, a, b, offset;
mov.b32 offset, 0xe480e480;
xor.b32 shifted, $2, 0x80808080;
prmt.b32 a, shifted, 0x64646464, {even};
prmt.b32 b, shifted, 0x64646464, {odd};
add.rn.f16x2 $0, a, offset;
add.rn.f16x2 $1, b, offset;
}}"""
_FLOAT8_PAIR = """prmt.b32 a, $2, 0, {select};
and.b32 sign, a, 0x80008000;
and.b32 a, a, 0x7f007f00;
shr.b32 a, a, {shift};
or.b32 a, a, sign;
fma.rn.{kind}x2 ${result}, a, factor, zero;"""
_ONES = """{{
mov.b32 $0, {one};
mov.b32 $1, {one};
}}"""


def _filled(code: str, **values: str) -> tl.constexpr:
    selects = {"first": FIRST_PAIR, "second": SECOND_PAIR, "even": EVEN_PAIR, "odd": ODD_PAIR}
    return tl.constexpr(code.format(**{name: hex(select) for name, select in selects.items()}, **values))


def _float8(first: int, second: int, kind: str) -> tl.constexpr:
    """Two numbers per result. The exponent of e4m3 becomes the low exponent bits of the wider type.

    This leaves a power of 2 to multiply by. Subnormals stay subnormal.
    """
    shift, factor = ("4", "0x7b807b80") if kind == "bf16" else ("1", "0x5c005c00")
    pairs = [
        _FLOAT8_PAIR.format(select=hex(select), shift=shift, kind=kind, result=result)
        for result, select in enumerate((first, second))
    ]
    head = ".reg .b32 a, sign, factor, zero;\nmov.b32 factor, " + factor + ";\nmov.b32 zero, 0x80008000;"
    return tl.constexpr("\n".join(["{", head, *pairs, "}"]))


def _weights(kind: str) -> tl.constexpr:
    """Two weights per result: low integers in the first two results, high integers in the others."""
    pairs = []
    for result in range(4):
        # operands: results, integers, then four scales and four offsets of low and of high integers
        byte, scale = 2 * (result % 2), 5 + 8 * (result // 2) + 2 * (result % 2)
        pair = _WEIGHT_PAIR.format(
            integers=("low", "high")[result // 2], first=hex(SINGLE | byte << 8), second=hex(SINGLE | byte + 1 << 8),
            scale=scale, next_scale=scale + 1, offset=scale + 4, next_offset=scale + 5, kind=kind, result=result,
        )  # fmt: skip
        pairs.append(pair)
    return tl.constexpr(_WEIGHTS.format(low_pairs="\n".join(pairs[:2]), high_pairs="\n".join(pairs[2:])))


WEIGHTS_BFLOAT16 = _weights("bf16")
WEIGHTS_FLOAT16 = _weights("f16")
WEIGHTS_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 4 + ["r"] + ["f"] * 16))
NIBBLES_BFLOAT16 = _filled(_NIBBLES, magic="0x43434343")
NIBBLES_FLOAT16 = _filled(_NIBBLES, magic="0x64646464")
BYTE_PAIRS_BFLOAT16 = _filled(_BYTE_PAIRS_BFLOAT16)
BYTE_PAIRS_FLOAT16 = _filled(_BYTE_PAIRS_FLOAT16)
FLOAT8_BFLOAT16, FLOAT8_FLOAT16 = (_float8(0x1404, 0x3424, kind) for kind in ("bf16", "f16"))
FLOAT8_PAIRS_BFLOAT16, FLOAT8_PAIRS_FLOAT16 = (_float8(0x2404, 0x3414, kind) for kind in ("bf16", "f16"))
ONES_BFLOAT16 = _filled(_ONES, one="0x3f803f80")
ONES_FLOAT16 = _filled(_ONES, one="0x3c003c00")
BYTES_BFLOAT16 = _filled(_BYTES_BFLOAT16)
BYTES_FLOAT16 = _filled(_BYTES_FLOAT16)


def has_assembly(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


@triton.jit
def nibbles(packed, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Low and high 4 bits of uint8, each as ``q + shift(DTYPE)``.

    ``0x4300 | q`` is 128 + q in bfloat16, ``0x6400 | q`` is 1024 + q in float16. ASSEMBLY: `prmt` picks bytes of two
    registers, for two weights at a time.
    """
    if ASSEMBLY and tl.float32 != DTYPE:
        code: tl.constexpr = NIBBLES_BFLOAT16 if tl.bfloat16 == DTYPE else NIBBLES_FLOAT16
        low, high = tl.inline_asm_elementwise(
            code, "=r,=r,=r,=r,r", [packed], dtype=(DTYPE.value, DTYPE.value), is_pure=True, pack=4
        )
    else:
        low = ((packed & 15).to(tl.float32) + shift(DTYPE)).to(DTYPE)
        high = ((packed >> 4).to(tl.float32) + shift(DTYPE)).to(DTYPE)
    return low, high


@triton.jit
def dequantized(
    packed, scales, minimums, high_scales, high_minimums, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr
):  # fmt: skip
    """Low and high 4 bits of uint8 in float32, rounded to DTYPE.

    scales, minimums: float32, of the low bits; all broadcast to the shape of `packed`.
    """
    if ASSEMBLY and tl.float32 != DTYPE:
        # prmt gives 128 + q
        offsets, high_offsets = minimums - 128.0 * scales, high_minimums - 128.0 * high_scales
        arguments = [packed, scales, offsets, high_scales, high_offsets]
        code: tl.constexpr = WEIGHTS_BFLOAT16 if tl.bfloat16 == DTYPE else WEIGHTS_FLOAT16
        low, high = tl.inline_asm_elementwise(
            code, WEIGHTS_CONSTRAINTS, arguments, dtype=(DTYPE.value, DTYPE.value), is_pure=True, pack=4
        )
    else:
        low = ((packed & 15).to(tl.float32) * scales + minimums).to(DTYPE)
        high = ((packed >> 4).to(tl.float32) * high_scales + high_minimums).to(DTYPE)
    return low, high


@triton.jit
def shift(DTYPE: tl.constexpr):
    return 1024.0 if tl.float16 == DTYPE else 128.0


@triton.jit
def ones(packed, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """1.0 for each uint8, in the register layout of `nibbles`. Constants have another layout."""
    if ASSEMBLY and tl.float32 != DTYPE:
        code: tl.constexpr = ONES_BFLOAT16 if tl.bfloat16 == DTYPE else ONES_FLOAT16
        result = tl.inline_asm_elementwise(code, "=r,=r,r", [packed], dtype=DTYPE.value, is_pure=True, pack=4)
    else:
        result = tl.full(packed.shape, 1.0, DTYPE)
    return result


@triton.jit
def signed_bytes(packed, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Convert uint8 with 128 as zero to numbers from -128 to 127."""
    if ASSEMBLY and tl.float32 != DTYPE:
        code: tl.constexpr = BYTES_BFLOAT16 if tl.bfloat16 == DTYPE else BYTES_FLOAT16
        result = tl.inline_asm_elementwise(code, "=r,=r,r", [packed], dtype=DTYPE.value, is_pure=True, pack=4)
    else:
        result = (packed.to(tl.float32) - 128.0).to(DTYPE)
    return result


@triton.jit
def byte_pairs(packed, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Low and high int8 of each int16.

    Tensor cores can transpose 16-bit numbers in shared memory, but not bytes.
    """
    if ASSEMBLY and tl.float32 != DTYPE:
        code: tl.constexpr = BYTE_PAIRS_BFLOAT16 if tl.bfloat16 == DTYPE else BYTE_PAIRS_FLOAT16
        low, high = tl.inline_asm_elementwise(
            code, "=r,=r,r", [packed], dtype=(DTYPE.value, DTYPE.value), is_pure=True, pack=2
        )
    else:
        low, high = packed.to(tl.int8).to(DTYPE), (packed >> 8).to(DTYPE)
    return low, high


@triton.jit
def float8_numbers(packed, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Convert uint8 with float8 e4m3 bits, without NaN."""
    if ASSEMBLY and tl.float32 != DTYPE:
        code: tl.constexpr = FLOAT8_BFLOAT16 if tl.bfloat16 == DTYPE else FLOAT8_FLOAT16
        result = tl.inline_asm_elementwise(code, "=r,=r,r", [packed], dtype=DTYPE.value, is_pure=True, pack=4)
    else:
        result = _float8_by_bits(packed.to(tl.int32)).to(DTYPE)
    return result


@triton.jit
def float8_pairs(packed, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Like `byte_pairs`, for float8 e4m3."""
    if ASSEMBLY and tl.float32 != DTYPE:
        code: tl.constexpr = FLOAT8_PAIRS_BFLOAT16 if tl.bfloat16 == DTYPE else FLOAT8_PAIRS_FLOAT16
        low, high = tl.inline_asm_elementwise(
            code, "=r,=r,r", [packed], dtype=(DTYPE.value, DTYPE.value), is_pure=True, pack=2
        )
    else:
        wide = packed.to(tl.int32)
        low, high = _float8_by_bits(wide).to(DTYPE), _float8_by_bits(wide >> 8).to(DTYPE)
    return low, high


@triton.jit
def _float8_by_bits(packed):
    bits = ((packed & 0x80) << 24) | ((packed & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def to_float8(x):
    """Round float32 up to 448 to float8 e4m3 in int32, to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # numbers are multiples of 2^-9; adding 1.5 * 2^23 rounds to an integer
    small = ((tl.abs(x) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    return tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def load_groups(scales_ptr, minimums_ptr, blocks, outputs, out_features, GROUPS: tl.constexpr, WHICH: tl.constexpr):
    """``[blocks, outputs]`` of low integers (WHICH 0) or high integers (1). One group has the same for both."""
    at = (blocks * GROUPS + (WHICH if GROUPS == 2 else 0)) * out_features + outputs
    return tl.load(scales_ptr + at), tl.load(minimums_ptr + at)


@triton.jit
def scaled(products, totals, scales, minimums, DTYPE: tl.constexpr):
    """Convert sums of `nibbles` products. totals: sums of the inputs.

    scales, minimums: float16, broadcast over tokens.
    """
    scales = scales.to(tl.float32)
    return scales * products + (minimums.to(tl.float32) - shift(DTYPE) * scales) * totals

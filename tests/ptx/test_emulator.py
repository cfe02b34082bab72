"""What the emulator computes, and which faults of kernels it finds."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from tests.ptx.emulator import Executable, Fault
from tests.ptx.program import UnknownInstruction, parse

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")

FRAME = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u64 .ptr .global .align 1 kernel_param_1,
    .param .u32 kernel_param_2
)
.reqntid 64
{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<99>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b64 %rd2, [kernel_param_1];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mad.lo.s32 %r3, %r2, 64, %r1;
    mad.wide.u32 %rd3, %r3, 4, %rd1;
    mad.wide.u32 %rd4, %r3, 4, %rd2;
    shl.b32 %r4, %r1, 2;
    mov.b32 %r5, global_smem;
    add.s32 %r6, %r5, %r4;
    BODY
    ret;
}
"""
"""Each thread has the addresses of an int32: %rd3 of the inputs, %rd4 of the results, %r6 in shared memory."""


def run(body: str, inputs: np.ndarray, programs: int = 1, shared: int = 256, backwards: bool = False) -> np.ndarray:
    """The int32 results of programs of 64 threads."""
    executable = Executable(parse(FRAME.replace("BODY", body)))
    results = np.zeros(64 * programs, np.int32)
    ranges = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in (inputs, results)]
    parameters = executable.packed([inputs.ctypes.data, results.ctypes.data, 7])
    executable.run(parameters, (programs,), shared, ranges, backwards=backwards)
    return results


NUMBERS = np.arange(64, dtype=np.int32)


def test_threads_of_all_programs_compute() -> None:
    inputs = np.arange(192, dtype=np.int32)
    body = "ld.param.b32 %r7, [kernel_param_2]; ld.global.b32 %r8, [%rd3]; mad.lo.s32 %r9, %r8, %r7, 1; "
    assert np.array_equal(run(body + "st.global.b32 [%rd4], %r9;", inputs, programs=3), inputs * 7 + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_floats_are_those_of_torch(dtype: torch.dtype) -> None:
    kind = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    every = np.arange(65536, dtype=np.int32)
    widened = run(
        f"ld.global.b32 %r7, [%rd3]; cvt.u16.u32 %rs1, %r7; cvt.f32.{kind} %r8, %rs1; st.global.b32 [%rd4], %r8;",
        every,
        1024,
    )
    expected = torch.from_numpy(every.astype(np.int16)).view(dtype).float()
    torch.testing.assert_close(torch.from_numpy(widened).view(torch.float32), expected, atol=0, rtol=0, equal_nan=True)
    torch.manual_seed(0)
    numbers = torch.randn(65536) * 10 ** torch.empty(65536).uniform_(-9, 6)
    rounded = run(
        f"ld.global.b32 %r7, [%rd3]; cvt.rn.{kind}.f32 %rs1, %r7; cvt.s32.s16 %r8, %rs1; st.global.b32 [%rd4], %r8;",
        numbers.view(torch.int32).numpy(),
        1024,
    )
    assert torch.equal(torch.from_numpy(rounded).short().view(dtype), numbers.to(dtype))


def test_threads_part_and_meet_again() -> None:
    body = """
    setp.lt.u32 %p1, %r1, 10;
    mov.b32 %r7, 100;
    @%p1 bra $L__low;
    mov.b32 %r7, 200;
$L__loop:
    add.s32 %r7, %r7, 1;
    setp.lt.u32 %p2, %r7, 205;
    @%p2 bra $L__loop;
$L__low:
    shfl.sync.bfly.b32 %r8, %r7, 1, 31, -1;
    st.global.b32 [%rd4], %r8;
    """
    assert np.array_equal(run(body, NUMBERS), np.where(NUMBERS < 10, 100, 205))


def exchanged(wait: str) -> str:
    """Each thread reads what one of the other warp wrote to shared memory."""
    return f"""
    ld.global.b32 %r7, [%rd3];
    st.shared.b32 [%r6], %r7;
    {wait}
    xor.b32 %r8, %r4, 128;
    add.s32 %r9, %r5, %r8;
    ld.shared.b32 %r10, [%r9];
    st.global.b32 [%rd4], %r10;
    """


@pytest.mark.parametrize("backwards", [False, True])
def test_a_barrier_that_is_missing_shows(backwards: bool) -> None:
    expected = NUMBERS ^ 32
    assert np.array_equal(run(exchanged("bar.sync 0;"), NUMBERS, backwards=backwards), expected)
    assert not np.array_equal(run(exchanged(""), NUMBERS, backwards=backwards), expected)


def test_barriers_wait_for_blocks_behind_them() -> None:
    """A compiler may place the block of some lanes after the barrier that all lanes reach."""
    barrier = """
    setp.lt.u32 %p1, %r1, 10;
    @%p1 bra $L__behind;
$L__together:
    bar.sync 0;
    bra $L__on;
$L__behind:
    bra $L__together;
$L__on:
    """
    assert np.array_equal(run(exchanged(barrier), NUMBERS), NUMBERS ^ 32)


def test_asynchronous_copies_arrive_when_awaited() -> None:
    copy = """
    cp.async.ca.shared.global [%r6], [%rd3], 4;
    cp.async.commit_group;
    {wait}
    ld.shared.b32 %r7, [%r6];
    st.global.b32 [%rd4], %r7;
    """
    assert np.array_equal(run(copy.format(wait="cp.async.wait_group 0;"), NUMBERS), NUMBERS)
    assert np.array_equal(run(copy.format(wait="cp.async.wait_group 1;"), NUMBERS), np.full(64, -1))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("ld.global.b32 %r7, [%rd3+4];", "was not given"),
        ("st.global.b32 [%rd4+-4], %r1;", "was not given"),
        ("ld.global.v2.b32 {%r7, %r8}, [%rd3];", "not aligned"),
        ("ld.shared.b32 %r7, [%r6+4];", "does not have"),
        ("setp.lt.u32 %p1, %r1, 10; @%p1 bar.sync 0;", "only a part of a warp"),
        ("$L__loop: bra $L__loop;", "does it end"),
    ],
)
def test_faults_are_found(body: str, why: str) -> None:
    with pytest.raises(Fault, match=why):
        run(body, NUMBERS)


def test_what_is_not_executed_is_named() -> None:
    with pytest.raises(UnknownInstruction, match=r"tex\.2d"):
        run("tex.2d.b32 %r7, %r8;", NUMBERS)


def test_tensor_cores_multiply() -> None:
    """The elements of a lane are where the instruction set has them."""
    torch.manual_seed(0)
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    lane = torch.arange(32)
    group, place = lane // 4, lane % 4 * 2
    rows = torch.stack([group, group + 8, group, group + 8])
    columns = torch.stack([place, place, place + 8, place + 8])
    of_a = torch.stack([a[rows, columns], a[rows, columns + 1]], -1).contiguous().view(torch.int32)[..., 0]
    inputs = torch.stack([place, place + 8])
    of_b = torch.stack([b[inputs, group], b[inputs + 1, group]], -1).contiguous().view(torch.int32)[..., 0]
    registers = torch.cat([of_a, of_b, torch.zeros(2, 32, dtype=torch.int32)]).reshape(4, 64)
    loads = "".join(f"ld.global.b32 %r{10 + i}, [%rd5+{128 * i}];" for i in range(6))
    zeros = "".join(f"mov.b32 %r{20 + i}, 0;" for i in range(4))
    stores = "".join(f"st.global.b32 [%rd6+{128 * i}], %r{20 + i};" for i in range(4))
    product = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    body = f"""
    setp.ge.u32 %p1, %r1, 32;
    @%p1 ret;
    mad.wide.u32 %rd5, %r1, 4, %rd1;
    mad.wide.u32 %rd6, %r1, 4, %rd2;
    {loads} {zeros}
    {product} {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r20, %r21, %r22, %r23}};
    {stores}
    """
    results = torch.from_numpy(run(body, registers.flatten().numpy(), programs=2)[:128]).view(torch.float32).view(4, 32)
    found = torch.zeros(16, 8)
    for register, (row, column) in enumerate(
        [(group, place), (group, place + 1), (group + 8, place), (group + 8, place + 1)]
    ):
        found[row, column] = results[register]
    torch.testing.assert_close(found, a.float() @ b.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("stride", "waves"), [(4, 1), (8, 2), (128, 32), (0, 1)])
def test_bank_conflicts_are_counted(stride: int, waves: int) -> None:
    """Of loads of 4 bytes with a stride, by 2 warps. Threads that read the same word do so at once."""
    executable = Executable(parse(FRAME.replace("BODY", f"mul.lo.s32 %r7, %r1, {stride}; ld.shared.b32 %r8, [%r7];")))
    executable.run(executable.packed([0, 0, 0]), (1,), 64 * 128, counted=True)
    total = executable.total()
    assert (total.waves, total.least_waves) == (2 * waves, 2)


@pytest.mark.parametrize(("bytes_apart", "sectors"), [(4, 4), (32, 32), (64, 32)])
def test_sectors_are_counted(bytes_apart: int, sectors: int) -> None:
    memory = np.zeros(64 * 16 + 8, np.int32)
    start = -(-memory.ctypes.data // 32) * 32
    body = f"mad.wide.u32 %rd5, %r1, {bytes_apart}, %rd1; ld.global.b32 %r8, [%rd5];"
    executable = Executable(parse(FRAME.replace("BODY", body)))
    ranges = [(memory.ctypes.data, memory.ctypes.data + memory.nbytes)]
    for counted in (False, True):
        executable.run(executable.packed([start, 0, 0]), (1,), 0, ranges, counted=counted)
    total = executable.total()
    assert (total.sectors, total.least_sectors) == (2 * sectors, 8)
    of_load = next(count for count in executable.counts if count.sectors)
    assert of_load.executed == 2

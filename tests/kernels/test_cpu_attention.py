"""The native attention kernels, each instruction set of this machine, against float64 and the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.attending import CHUNKS, CPU, Chunk, attend, attention_specs
from tests.native import built
from tests.paged import BlockTables
from vlmserve.kernels.attention import AttentionContext, RotaryRows
from vlmserve.kernels.cpu_attention import CpuAttention, unsupported_reason
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.layer_specs import AttentionSpec, CacheType
from vlmserve.layers.rope import Rope, RopeTables, apply_rope

DTYPES = (torch.float32, torch.bfloat16)
HEAD_SIZES = (32, 40, 64, 72, 80, 96, 112, 128, 192, 256, 512)
SMOL = AttentionSpec(9, 3, 64, 0.125)

either_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Numbers of threads, of which 3 cuts ranges of keys at odd places."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, spec: AttentionSpec) -> None:
    if actual.dtype == torch.float32:
        # A score is off by rounding its terms, and so is a weight.
        torch.testing.assert_close(actual.double(), expected, atol=1e-5 + 5e-7 * spec.head_size * spec.scale, rtol=1e-5)
    else:
        # Weights and results are rounded to 8 bits.
        torch.testing.assert_close(actual.double(), expected, atol=0.02, rtol=0.01)


@built
@settings(max_examples=40, deadline=None)
@given(
    chunks=CHUNKS,
    spec=attention_specs(HEAD_SIZES, groups=8),
    block_size=st.sampled_from([8, 16, 32, 48]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
@example([(0, 1)], AttentionSpec(1, 1, 32, 1.0), 16, torch.bfloat16, 0)
@example([(40, 1), (0, 9)], AttentionSpec(4, 1, 512, 1.0), 16, torch.float32, 0)
@example([(31, 1), (32, 1), (33, 2)], AttentionSpec(40, 2, 128, 0.1), 16, torch.bfloat16, 0)
@pytest.mark.usefixtures("isa")
def test_any_batch_equals_naive_attention_amid_nans(
    chunks: list[Chunk], spec: AttentionSpec, block_size: int, dtype: torch.dtype, seed: int
) -> None:
    output, expected = attend(CpuAttention(), chunks, spec, block_size, dtype, seed=seed)
    assert_close(output, expected, spec)


@built
@either_dtype
@pytest.mark.parametrize(
    "chunks",
    [[(700, 1)], [(900, 1), (3, 1)], [(500, 5), (1, 1)], [(0, 200), (400, 40), (12, 1)]],
    ids=["one decode", "a long and a short one", "a few tokens late", "mixed"],
)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.usefixtures("isa", "threads")
def test_long_ranges_may_be_cut(chunks: list[Chunk], window: int | None, dtype: torch.dtype) -> None:
    spec = AttentionSpec(9, 3, 64, 0.3, window)
    output, expected = attend(CpuAttention(), chunks, spec, 16, dtype)
    assert_close(output, expected, spec)


@built
@pytest.mark.parametrize(
    ("head_size", "block_size", "window", "soft_cap"),
    [(64, 16, None, None), (80, 8, 50, None), (96, 32, None, 5.0), (128, 24, 300, None), (256, 16, 40, 3.0)],
)
@pytest.mark.usefixtures("isa")
def test_rows_around_blocks_equal_naive_attention(
    head_size: int, block_size: int, window: int | None, soft_cap: float | None
) -> None:
    for group, chunks in ((1, [(30, 12), (31, 13), (250, 33)]), (3, [(0, 5), (257, 6), (15, 43)]), (2, [(17, 300)])):
        spec = AttentionSpec(2 * group, 2, head_size, head_size**-0.5, window, soft_cap)
        output, expected = attend(CpuAttention(), chunks, spec, block_size, torch.bfloat16)
        assert_close(output, expected, spec)


@built
@either_dtype
@pytest.mark.usefixtures("isa")
def test_scores_far_apart_keep_the_weights_finite(dtype: torch.dtype) -> None:
    output, expected = attend(CpuAttention(), [(400, 1), (0, 300)], SMOL, 16, dtype, spread=30.0)
    error = (output.double() - expected).abs()
    # Scores are in the thousands, so that most rows see one value, of around 30, and few are between two.
    assert error.max() < (0.1 if dtype == torch.float32 else 3.0)
    assert error.mean() < (1e-3 if dtype == torch.float32 else 0.15)


@built
@either_dtype
@pytest.mark.usefixtures("isa")
def test_nans_stay_within_their_sequence(dtype: torch.dtype) -> None:
    blocks = BlockTables([20, 20], 16)
    backend = CpuAttention()
    cache = backend.allocate(blocks.num_blocks, 16, SMOL, dtype, CPU)
    metadata = blocks.metadata([(0, 0, 20), (1, 0, 20)])
    query, key, value = (torch.randn(40, heads, 64).to(dtype) for heads in (9, 3, 3))
    value[3, 1, 5] = float("nan")
    output = backend.attend(
        query, key, value, AttentionContext(cache, SMOL, metadata, backend.prepare(metadata, 16, [SMOL], dtype))
    ).view(40, 9, 64)
    assert output[3:20, 3:6, 5].isnan().all()
    output[3:20, 3:6, 5] = 0
    # Rows before the token that share a product with it may have it as well; no other sequence, head or column.
    output[:3, 3:6, 5] = 0
    assert not output.isnan().any()


@built
@either_dtype
@settings(max_examples=40, deadline=None)
@given(
    chunks=CHUNKS,
    spec=attention_specs((32, 48, 64, 80, 128), groups=4),
    kept=st.sampled_from([0, 8, 16]),
    wider=st.sampled_from([0, 6]),
    own_rows=st.booleans(),
)
@pytest.mark.usefixtures("isa")
def test_turning_on_the_way_is_turning_before(
    chunks: list[Chunk], spec: AttentionSpec, kept: int, wider: int, own_rows: bool, dtype: torch.dtype
) -> None:
    """kept: elements of a head that do not turn. wider: elements by which rows of the batch are further apart.
    own_rows: whether each token has a row of cosines and sines of its own."""
    torch.manual_seed(0)
    chunks = sorted(chunks, key=lambda chunk: chunk[1] > 1)
    blocks = BlockTables([before + new for before, new in chunks], 16)
    backend = CpuAttention()
    caches = [backend.allocate(blocks.num_blocks, 16, spec, dtype, CPU) for _ in range(2)]
    size = spec.head_size - kept
    frequencies = 1.0 / 1e4 ** (torch.arange(0, size, 2) / size)
    # Everything that is in the cache before goes the same two ways.
    for parts in ([(i, 0, b) for i, (b, _) in enumerate(chunks) if b], [(i, b, n) for i, (b, n) in enumerate(chunks)]):
        if not parts:
            continue
        parts.sort(key=lambda part: part[2] > 1)
        metadata = blocks.metadata(parts)
        positions = torch.cat([torch.arange(before, before + new) for _, before, new in parts])
        tables = RopeTables(Rope(frequencies), positions, int(positions.max()) + 1, torch.float32)
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size
        qkv = torch.randn(len(positions), width + wider).to(dtype)[:, :width]
        heads = qkv.float().view(len(positions), -1, spec.head_size)
        rotated = torch.cat((apply_rope(heads[..., :size], tables), heads[..., size:]), -1).to(dtype)
        query, key, _ = rotated.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), 1)
        value = qkv.view(len(positions), -1, spec.head_size)[:, -spec.num_kv_heads :]
        plan = backend.prepare(metadata, 16, [spec], dtype)
        expected = backend.attend(query, key, value, AttentionContext(caches[0], spec, metadata, plan))
        cos, sin, _ = tables.rows
        rope = RotaryRows(cos[positions], sin[positions], None) if own_rows else tables.rows
        actual = backend.attend_rotated(qkv, rope, AttentionContext(caches[1], spec, metadata, plan))
    assert torch.equal(caches[0].values, caches[1].values)
    torch.testing.assert_close(caches[1].keys, caches[0].keys, atol=1e-6, rtol=2**-7)
    # A product and its sum may be rounded once or twice, and then to either side, in queries and in keys: a score is
    # off by as much as its terms together, and a weight by the error of its score.
    term, least = (1e-6, 1e-5) if dtype == torch.float32 else (1e-3, 0.05)
    tolerance = least + term * spec.head_size * spec.scale
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=least)


@built
@either_dtype
@pytest.mark.usefixtures("isa")
def test_the_reference_gives_the_same(dtype: torch.dtype) -> None:
    chunks = [(300, 1), (17, 1), (0, 50), (64, 33)]
    output, _ = attend(CpuAttention(), chunks, SMOL, 16, dtype)
    expected, _ = attend(TorchReference(), chunks, SMOL, 16, dtype)
    assert_close(output, expected.double(), SMOL)


@built
def test_slices_of_wider_rows_are_read_in_place() -> None:
    torch.manual_seed(0)
    blocks = BlockTables([30], 16)
    backend = CpuAttention()
    metadata = blocks.metadata([(0, 0, 30)])
    plan = backend.prepare(metadata, 16, [SMOL], torch.float32)
    rows = torch.randn(30, 15, 64)
    query, key, value = rows.split((9, 3, 3), 1)
    outputs = []
    for parts in ((query, key, value), tuple(part.contiguous() for part in (query, key, value))):
        cache = backend.allocate(blocks.num_blocks, 16, SMOL, torch.float32, CPU)
        outputs.append(backend.attend(*parts, AttentionContext(cache, SMOL, metadata, plan)))
    spread_out = torch.randn(30, 9, 128)[..., ::2]
    spread_out.copy_(query)
    cache = backend.allocate(blocks.num_blocks, 16, SMOL, torch.float32, CPU)
    outputs.append(backend.attend(spread_out, key, value, AttentionContext(cache, SMOL, metadata, plan)))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@built
def test_a_cache_of_another_type_is_refused() -> None:
    blocks = BlockTables([1], 16)
    backend = CpuAttention()
    cache = backend.allocate(blocks.num_blocks, 16, SMOL, torch.bfloat16, CPU)
    metadata = blocks.metadata([(0, 0, 1)])
    with pytest.raises(ValueError, match="bfloat16"):
        backend.attend(
            torch.zeros(1, 9, 64),
            torch.zeros(1, 3, 64),
            torch.zeros(1, 3, 64),
            AttentionContext(cache, SMOL, metadata, backend.prepare(metadata, 16, [SMOL], torch.float32)),
        )


@built
@pytest.mark.parametrize(
    ("spec", "dtype", "device", "reason"),
    [
        (SMOL, torch.float16, "cpu", "float16"),
        (SMOL, torch.float32, "meta", "meta"),
        (AttentionSpec(2, 2, 7, 1.0), torch.bfloat16, "cpu", "pairs"),
        (AttentionSpec(2, 2, 514, 1.0), torch.bfloat16, "cpu", "512"),
        (AttentionSpec(3, 2, 64, 1.0), torch.bfloat16, "cpu", "evenly"),
    ],
)
def test_what_the_kernels_cannot_serve_has_a_reason(
    spec: AttentionSpec, dtype: torch.dtype, device: str, reason: str
) -> None:
    assert reason in str(unsupported_reason(spec, dtype, torch.device(device)))
    with pytest.raises(ValueError, match=reason):
        CpuAttention().allocate(4, 16, spec, dtype, torch.device(device))


def answers(
    chunks: list[tuple[int, ...]],
    spec: AttentionSpec,
    dtype: torch.dtype,
    cache_type: CacheType = "auto",
    block_size: int = 16,
    key_mean: float = 0.0,
) -> torch.Tensor:
    """The first sequence's rows. chunks: new tokens of each sequence, step by step."""
    generator = torch.Generator().manual_seed(1)
    lengths = [sum(counts) for counts in zip(*chunks, strict=True)]
    backend, blocks = CpuAttention(cache_type=cache_type), BlockTables(lengths, block_size)
    cache = backend.allocate(blocks.num_blocks, block_size, spec, dtype, CPU)
    tokens = [
        [(mean + torch.randn(length, heads, spec.head_size, generator=generator)).to(dtype) for length in lengths]
        for heads, mean in ((spec.num_heads, 0.0), (spec.num_kv_heads, key_mean), (spec.num_kv_heads, 0.0))
    ]
    done, found = [0] * len(lengths), []
    for counts in chunks:
        parts = [(i, done[i], count) for i, count in enumerate(counts) if count]
        parts.sort(key=lambda part: part[2] > 1)
        query, key, value = (torch.cat([of[i][first : first + count] for i, first, count in parts]) for of in tokens)
        metadata = blocks.metadata(parts)
        plan = backend.prepare(metadata, block_size, [spec], dtype)
        output = backend.attend(query, key, value, AttentionContext(cache, spec, metadata, plan))
        start = 0
        for i, _, count in parts:
            if i == 0:
                found.append(output[start : start + count])
            start += count
            done[i] += count
    return torch.cat(found)


@built
@pytest.mark.parametrize("cache_type", ["auto", "int8"])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 1)])
@either_dtype
def test_rows_are_the_same_in_any_step(
    isa: str, threads: int, dtype: torch.dtype, heads: int, kv_heads: int, window: int | None, cache_type: CacheType
) -> None:
    """To the last bit: alone, in chunks of any size, and beside another sequence."""
    if isa == "amx" and dtype == torch.bfloat16 and cache_type == "int8":
        pytest.skip("weights of quantized values have 16 bits for few rows, and are bfloat16 for many")
    spec = AttentionSpec(heads, kv_heads, 64, 0.125, window)
    expected = answers([(700,)] + [(1,)] * 3, spec, dtype, cache_type)
    for size in (3, 4, 7, 33, 256):
        sizes = [(min(size, 703 - first),) for first in range(0, 703, size)]
        assert torch.equal(answers(sizes, spec, dtype, cache_type), expected), size
    beside = answers([(650, 40), (50, 400), (1, 1), (1, 30), (1, 0)], spec, dtype, cache_type)
    whole = answers([(703, 0), (0, 471)], spec, dtype, cache_type)
    assert torch.equal(beside, whole)


@built
@either_dtype
@pytest.mark.parametrize(
    ("head_size", "block_size", "group", "window", "soft_cap"),
    [(40, 24, 8, None, 500.0), (80, 8, 1, 50, None), (18, 15, 5, 33, 90.0), (112, 32, 4, None, None)],
)
@pytest.mark.usefixtures("isa")
def test_any_geometry_gives_rows_the_same_bits(
    head_size: int, block_size: int, group: int, window: int | None, soft_cap: float | None, dtype: torch.dtype
) -> None:
    spec = AttentionSpec(2 * group, 2, head_size, 0.1, window, soft_cap)

    def outputs(*sizes: int) -> torch.Tensor:
        # Large scores that differ little: rounding a score otherwise changes weights.
        return answers([(size,) for size in sizes], spec, dtype, block_size=block_size, key_mean=256.0)

    expected = outputs(330)
    for sizes in ([290] + [1] * 40, [3, 20, 130, 2, 9, 166], [257, 73]):
        assert torch.equal(outputs(*sizes), expected), sizes

"""Attention over the paged cache, beside attention written out in float64."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import triton.language as tl
from triton import knobs

from tests.attending import Bidirectional, Chunk, attend, naive_attention
from tests.paged import BlockTables
from vlmserve.kernels.attention import AttentionBackend, AttentionContext, HeadNorms, RotaryRows, RotatingBackend
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.kernels.triton import attention, attention_kernels, fresh_prompts
from vlmserve.kernels.triton.attention import AttentionTile, TritonAttention, unsupported_reason
from vlmserve.kernels.triton.attention_kernels import CHUNK_SPLIT, FEW_QUERIES
from vlmserve.layer_specs import AttentionSpec, CacheType

PLAIN = AttentionSpec(4, 2, 8, 8**-0.5)
MIXED: list[Chunk] = [(15, 1), (0, 1), (0, 18), (5, 9)]
FEW: list[Chunk] = [(15, 1), (5, 9)]
"""Each program that is interpreted takes time."""
FILLED_BY = TorchReference()
"""What writes long contexts: the kernels themselves would take most of a test's time for it. They write short ones in
other tests."""
SPECS = {
    "plain": PLAIN,
    "no groups": AttentionSpec(3, 3, 16, 0.3),
    "groups of three": AttentionSpec(6, 2, 6, 0.4),
    "one head of keys": AttentionSpec(17, 1, 8, 0.4),
    "large heads": AttentionSpec(2, 1, 512, 512**-0.5),
    "window": dataclasses.replace(PLAIN, window=7),
    "window of one": dataclasses.replace(PLAIN, window=1),
    "soft cap": dataclasses.replace(PLAIN, soft_cap=2.0),
    "sinks": dataclasses.replace(PLAIN, sinks=(0.5, -1.0, 2.0, 0.0)),
    "all of it": AttentionSpec(4, 2, 12, 0.3, window=9, soft_cap=5.0, sinks=(1.0, 0.0, -1.0, 3.0)),
}


@pytest.fixture
def chunk_sizes(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """A sixteenth of a part of a chunk's context, and the most rows of chunks whose contexts are split: as few as the
    interpreter gets through in time, where blocks have 8 rows."""
    if not knobs.runtime.interpret:
        return CHUNK_SPLIT.value // 16, FEW_QUERIES.value
    for constant, value in (("CHUNK_SPLIT", 16), ("FEW_QUERIES", 10)):
        for module in (attention, attention_kernels):
            monkeypatch.setattr(module, constant, tl.constexpr(value))
    return 1, 10


@pytest.mark.parametrize("name", SPECS)
def test_a_mixed_batch_equals_naive_attention(device: torch.device, name: str) -> None:
    output, expected = attend(TritonAttention(), MIXED if name == "plain" else FEW, SPECS[name], 4, device=device)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "cache_type"), [("plain", "int8"), ("all of it", "int8"), ("plain", "fp8"), ("all of it", "fp8")]
)
def test_a_cache_of_8_bits(device: torch.device, name: str, cache_type: CacheType) -> None:
    output, expected = attend(TritonAttention(cache_type=cache_type), FEW, SPECS[name], 4, device=device)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "chunks", "is_fresh"),
    [
        ("plain", [(0, 18), (0, 33)], True),
        ("no groups", [(0, 17)], True),
        ("plain", [(0, 18), (2, 17)], False),
        ("plain", [(0, 18), (0, 15)], False),
        ("plain", [(3, 1), (0, 18)], False),
        ("window", [(0, 18)], False),
        ("sinks", [(0, 18)], False),
    ],
)
def test_library_attends_for_long_fresh_prompts(
    device: torch.device, name: str, chunks: list[Chunk], is_fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(TritonAttention, "by_library", True)
    monkeypatch.setattr(fresh_prompts, "LEAST_ROWS", 16)
    kernel = attention.attend_rows

    class Counting:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launched.append(grid)
            return kernel[grid]

    monkeypatch.setattr(attention, "attend_rows", Counting())
    output, expected = attend(TritonAttention(), chunks, SPECS[name], 4, device=device, filled_by=FILLED_BY)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)
    assert bool(launched) != is_fresh


def test_decodes_by_other_tiles(device: torch.device) -> None:
    backend = TritonAttention(cache_type="int8")
    backend.decode_tile = AttentionTile(16, 32, 2)
    output, expected = attend(backend, [(40, 1), (3, 1)], PLAIN, 16, device=device)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("new", [[1, 1], [1, 4]], ids=["decodes", "mixed"])
def test_layers_use_the_blocks_of_their_column(device: torch.device, new: list[int]) -> None:
    """A column alone gives what it gives among others."""
    backend, lengths = TritonAttention(), [9, 6]
    tables = [BlockTables(lengths, 4, seed) for seed in range(2)]
    chunks = [(number, lengths[number] - count, count) for number, count in enumerate(new)]
    alone = [one.metadata(chunks, device) for one in tables]
    both = dataclasses.replace(
        alone[0],
        block_tables=torch.cat([one.block_tables for one in alone]),
        slot_mapping=torch.cat([one.slot_mapping for one in alone]),
    )
    torch.manual_seed(0)
    cache = backend.allocate(tables[0].num_blocks, 4, PLAIN, torch.float32, device)
    keys, values = (torch.randn(cache.keys.shape, device=device) for _ in range(2))
    rows = [torch.randn(sum(new), heads, PLAIN.head_size, device=device) for heads in (4, 2, 2)]
    outputs = []
    for metadata, column in ((both, 0), (alone[0], 0), (both, 1), (alone[1], 0)):
        own = dataclasses.replace(cache, keys=keys.clone(), values=values.clone(), column=column)
        plan = backend.prepare(metadata, 4, [PLAIN], torch.float32)
        outputs.append((backend.attend(*rows, AttentionContext(own, PLAIN, metadata, plan)), own.keys))
    for one, other in (outputs[:2], outputs[2:]):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert not torch.equal(outputs[0][0], outputs[2][0])


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_blocks_have_any_size(device: torch.device, block_size: int) -> None:
    output, expected = attend(TritonAttention(), [(15, 1), (6, 7)], PLAIN, block_size, device=device)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


def test_contexts_are_split_among_programs(device: torch.device) -> None:
    chunks = [(3, 1), (141, 1)]
    for spec in (AttentionSpec(2, 1, 8, 0.5, sinks=(1.0, -1.0)), AttentionSpec(2, 1, 8, 0.5, window=130)):
        output, expected = attend(TritonAttention(), chunks, spec, 16, device=device, filled_by=FILLED_BY)
        torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("lengths", [[1], [700], [70, 3, 129], [20] * 9, [400, *[1] * 6]], ids=str)
def test_decode_splits_follow_the_work_of_the_batch(
    device: torch.device, lengths: list[int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, spec = 8, dataclasses.replace(PLAIN, window=window)
    monkeypatch.setattr(attention, "PART", 16)
    monkeypatch.setattr(attention, "multiprocessors", lambda _: extra * PLAIN.num_kv_heads // attention.PROGRAMS_EACH)
    blocks, backend = BlockTables(lengths, 16), TritonAttention()
    metadata = blocks.metadata([(number, length - 1, 1) for number, length in enumerate(lengths)], device)
    plan = backend.prepare(metadata, 16, [spec], torch.float32)
    items, joins = (tensor.tolist() for tensor in plan.work[window or 0])
    assert (len(items), len(joins)) == (len(lengths) + extra, min(len(lengths), extra))
    used = [item[:5] for item in items if item[1] < item[2]]
    stride = metadata.block_tables.stride(1)
    for number, length in enumerate(lengths):
        own = [item for item in used if item[0] == number]
        starts = [max(0, length - window) if window else 0, *(item[2] for item in own)]
        assert [item[1] for item in own] == starts[:-1], "each item begins where the one before ends"
        assert starts[-1] == length
        assert all(item[3:] == [length, number * stride] for item in own)
        expected = [[number, used.index(own[0]), len(own)]] if len(own) > 1 else []
        assert [join[:3] for join in joins if join[2] and join[0] == number] == expected
    sizes = [item[2] - item[1] for item in used]
    work = sum(min(length, window or length) for length in lengths)
    assert max(sizes) < work / extra + 16


@pytest.mark.parametrize(("decodes", "extra"), [(1, 33), (32, 33), (64, 128), (128, 0)])
def test_decode_splits_follow_the_multiprocessors(decodes: int, extra: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "multiprocessors", lambda _: 132)
    backend, blocks, spec = TritonAttention(), BlockTables([20] * decodes, 16), AttentionSpec(32, 8, 128, 1.0)
    metadata = blocks.metadata([(number, 19, 1) for number in range(decodes)])
    plan = backend.prepare(metadata, 16, [spec], torch.float32)
    assert len(plan.work[0].items) == decodes + extra


@pytest.mark.parametrize(
    ("contexts", "chunk", "is_split"),
    [
        ([1000] * 128, None, False),
        ([200] * 127 + [9000], None, True),
        ([100] * 4, None, True),
        ([1000] * 64, 400, False),
        ([4000] * 2, 20, True),
        ([4000] * 2, 2000, False),
    ],
)
def test_full_gpus_split_only_outliers(
    contexts: list[int], chunk: int | None, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts stay whole if decodes or a chunk beside them keep all multiprocessors busy."""
    monkeypatch.setattr(attention, "multiprocessors", lambda _: 132)
    backend, spec = TritonAttention(), AttentionSpec(32, 8, 128, 1.0)
    blocks = BlockTables([*contexts, *([] if chunk is None else [chunk])], 16)
    chunks = [(number, length - 1, 1) for number, length in enumerate(contexts)]
    metadata = blocks.metadata([*chunks, *([] if chunk is None else [(len(contexts), 0, chunk)])])
    items, joins = backend.prepare(metadata, 16, [spec], torch.float32).work[0]
    used = [item for item in items.tolist() if item[1] < item[2]]
    assert (len(joins) > 0) == is_split
    assert is_split or len(items) == len(contexts)
    assert sum(item[2] - item[1] for item in used) == sum(contexts)


def test_few_splits_leave_most_contexts_whole(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "PART", 16)
    monkeypatch.setattr(attention, "multiprocessors", lambda _: 2)
    for spec, chunks in itertools.product((PLAIN, SPECS["sinks"]), ([(70, 1), (3, 1), (129, 1)], [(129, 1), (3, 7)])):
        output, expected = attend(TritonAttention(), chunks, spec, 16, device=device, filled_by=FILLED_BY)
        torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_rows_that_see_what_comes_after_them(device: torch.device, window: int | None) -> None:
    bidirectional: list[list[Bidirectional]] = [[], [(0, 3, 8)], [(1, 70, 75), (75, 79, 80)]]
    spec = dataclasses.replace(PLAIN, window=window)
    output, expected = attend(
        TritonAttention(), [(7, 1), (5, 9), (0, 80)], spec, 16, bidirectional=bidirectional, device=device
    )
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("cache_type", ["int8", "fp8"])
def test_float16_keeps_small_weights_of_8_bits(device: torch.device, cache_type: CacheType) -> None:
    """One key takes almost all of the weight, and its value is 0."""
    spec, blocks, length = AttentionSpec(2, 1, 16, 0.25), BlockTables([30], 16), 30
    backends = TritonAttention(cache_type=cache_type), TorchReference(cache_type=cache_type)
    torch.manual_seed(0)
    query, key, value = torch.ones(length, 2, 16), torch.zeros(length, 1, 16), torch.rand(length, 1, 16) + 1
    key[0], value[0] = 3, 0
    rows = [one.to(device, torch.float16) for one in (query, key, value)]
    cache = backends[0].allocate(blocks.num_blocks, 16, spec, torch.float16, device)
    outputs = []
    for backend, before in ((backends[1], 0), (backends[0], length - 1), (backends[1], length - 1)):
        metadata = blocks.metadata([(0, before, length - before)], device)
        plan = backend.prepare(metadata, 16, [spec], torch.float16)
        context = AttentionContext(cache, spec, metadata, plan)
        outputs.append(backend.attend(*(one[before:] for one in rows), context)[-1])
    torch.testing.assert_close(outputs[1], outputs[2], rtol=0.01, atol=0)


def test_float16_is_as_exact_as_its_inputs(device: torch.device) -> None:
    spec = AttentionSpec(6, 2, 32, 1.0)
    output, expected = attend(
        TritonAttention(), [(70, 1), (10, 20)], spec, 16, torch.float16, spread=1.2, device=device, filled_by=FILLED_BY
    )
    assert (output.double() - expected).abs().max() < 0.02
    assert (output.double() - expected).abs().mean() < 0.002


@pytest.mark.parametrize("name", ["sinks", "window"])
def test_decodes_equal_bitwise_alone_and_batched(device: torch.device, name: str) -> None:
    """Bit by bit: only the size of splits depends on others, here on none."""
    spec = SPECS[name]
    torch.manual_seed(0)
    lengths = [140, 3, 131]
    blocks = BlockTables(lengths, 16)
    backend = TritonAttention()
    cache = backend.allocate(blocks.num_blocks, 16, spec, torch.float32, device)
    cache.keys.normal_()
    cache.values.normal_()
    query = torch.randn(3, 4, 8, device=device)
    key, value = torch.randn(2, 3, 2, 8, device=device)

    def attended(rows: list[int]) -> torch.Tensor:
        metadata = blocks.metadata([(row, lengths[row] - 1, 1) for row in rows], device)
        plan = backend.prepare(metadata, 16, [spec], torch.float32)
        return backend.attend(query[rows], key[rows], value[rows], AttentionContext(cache, spec, metadata, plan))

    together = attended([0, 1, 2])
    for row in range(3):
        assert torch.equal(attended([row])[0], together[row])


def test_a_sequence_that_only_pads_changes_nothing(device: torch.device) -> None:
    """Steps that are captured have one behind their chunks."""
    torch.manual_seed(0)
    blocks, backend = BlockTables([25, 20, 16], 16), TritonAttention()
    chunks = [(0, 5, 20), (1, 0, 20)]
    outputs = []
    for batch in (chunks, [*chunks, (2, 0, 0)], [*chunks, (2, 0, 7)]):
        torch.manual_seed(1)
        cache = backend.allocate(blocks.num_blocks, 16, PLAIN, torch.float32, device)
        query, key, value = (torch.randn(47, heads, 8).to(device) for heads in (4, 2, 2))
        metadata = blocks.metadata(batch, device)
        rows = metadata.slot_mapping.shape[1]
        plan = backend.prepare(metadata, 16, [PLAIN], torch.float32)
        outputs.append(
            backend.attend(query[:rows], key[:rows], value[:rows], AttentionContext(cache, PLAIN, metadata, plan))[:40]
        )
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(("name", "split"), [("plain", False), ("all of it", True)])
def test_decode_count_may_be_on_the_device(
    device: torch.device, name: str, split: bool, chunk_sizes: tuple[int, int]
) -> None:
    """As in steps that are captured: there is room for more of them, and some sequences have no rows."""
    unit, few = chunk_sizes
    spec, lengths = SPECS[name], [140, 3, 40 * unit + few - 1, 25]
    blocks, backend = BlockTables([*lengths, 16], 16), TritonAttention()
    chunks = [(0, 139, 1), (1, 2, 1), (2, 40 * unit, few - 1), (3, 5, 20)]
    if not split:
        chunks[2] = (2, 3, few + 5)
    rows, outputs = sum(new for _, _, new in chunks), []
    for padded in (False, True):
        torch.manual_seed(1)
        cache = backend.allocate(blocks.num_blocks, 16, spec, torch.float32, device)
        cache.keys.normal_()
        cache.values.normal_()
        query, key, value = (
            torch.randn(rows + 7, heads, spec.head_size).to(device) for heads in (spec.num_heads, 2, 2)
        )
        batch = [*chunks, (4, 0, 7), (4, 0, 0), (4, 0, 0)] if padded else chunks
        metadata = blocks.metadata(batch, device)
        assert metadata.num_decodes == 2
        if padded:
            metadata = dataclasses.replace(metadata, decodes=torch.tensor([2], dtype=torch.int32, device=device))
        count = metadata.slot_mapping.shape[1]
        plan = backend.prepare(metadata, 16, [spec], torch.float32)
        assert plan.split_chunks == split
        output = backend.attend(
            query[:count], key[:count], value[:count], AttentionContext(cache, spec, metadata, plan)
        )
        outputs.append(output[:rows])
    assert torch.equal(*outputs)


def test_rotating_on_the_way_gives_the_same(device: torch.device) -> None:
    torch.manual_seed(0)
    blocks, backend = BlockTables([20], 4), TritonAttention()
    assert isinstance(backend, RotatingBackend)
    metadata = blocks.metadata([(0, 0, 20)], device)
    cache = backend.allocate(blocks.num_blocks, 4, PLAIN, torch.float32, device)
    plan = backend.prepare(metadata, 4, [PLAIN], torch.float32)
    qkv, angles = torch.randn(20, 64), torch.randn(20, 4)
    rope = RotaryRows(angles.cos().to(device), angles.sin().to(device), None)
    output = backend.attend_rotated(qkv.to(device), rope, AttentionContext(cache, PLAIN, metadata, plan))
    heads = qkv.view(20, 8, 8).double()
    first, second = heads[:, :6, :4], heads[:, :6, 4:]
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    expected = naive_attention(turned[:, :4], turned[:, 4:], heads[:, 6:], PLAIN)
    torch.testing.assert_close(output.cpu().double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("quantized", ["auto", "int8", "fp8"])
@pytest.mark.parametrize(("name", "rotated"), [("plain", 8), ("groups of three", 4), ("all of it", 0), ("window", 8)])
def test_fused_writes_equal_separate_writes(
    device: torch.device, name: str, rotated: int, quantized: CacheType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit but for norms, and caches too. Contexts of one part, of several, and whose last part is the newest
    token alone."""
    torch.manual_seed(rotated)
    monkeypatch.setattr(attention, "PART", 8)
    spec, contexts = SPECS[name], [5, 9, 1, 30]
    blocks, backend = BlockTables(contexts, 4), TritonAttention(cache_type=quantized)
    metadata = blocks.metadata([(index, context - 1, 1) for index, context in enumerate(contexts)], device)
    plan = backend.prepare(metadata, 4, [spec], torch.float32)
    qkv = torch.randn(4, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size).to(device)
    angles, positions = torch.randn(9, rotated // 2), torch.tensor([8, 0, 3, 3])
    rope = RotaryRows(angles.cos().to(device), angles.sin().to(device), positions.to(device)) if rotated else None
    weights = torch.randn(2, spec.head_size).to(device)
    norms = HeadNorms(weights[0], weights[1], 1e-6) if name in ("window", "groups of three") else None
    before = torch.randn(2, blocks.num_blocks, spec.num_kv_heads, 4, spec.head_size)
    before = {"auto": before, "int8": before * 30, "fp8": before.abs() * 25}[quantized]
    results = []
    for writes in (True, False):
        monkeypatch.setattr(TritonAttention, "writes", writes)
        cache = backend.allocate(blocks.num_blocks, 4, spec, torch.float32, device)
        for tensor, values in zip((cache.keys, cache.values), before, strict=True):
            tensor.copy_(values)
        if cache.scales is not None:
            cache.scales.fill_(0.01)
        context = AttentionContext(cache, spec, metadata, plan)
        if norms is None:
            output = backend.attend_rotated(qkv, rope, context)
        else:
            output = backend.attend_normed(qkv, norms, rope, context)
        results.append([output, *cache.tensors])
    # Each kernel adds squares in an order of its own.
    bound = 0.0 if norms is None else 1e-5
    for ours, theirs in zip(*results, strict=True):
        steps = 1 if ours.dtype in (torch.int8, torch.uint8) and norms is not None else bound
        torch.testing.assert_close(ours, theirs, atol=steps, rtol=bound)


def test_steps_can_be_captured_unless_rows_are_bidirectional() -> None:
    backend: AttentionBackend = TritonAttention()
    blocks = BlockTables([300, 4], 16)

    def key(chunks: list[tuple[int, int, int]]) -> object:
        return backend.prepare(blocks.metadata(chunks), 16, [PLAIN], torch.float32).capture_key  # type: ignore[attr-defined]

    assert key([(0, 260, 1), (1, 2, 1)]) == key([(0, 10, 1), (1, 3, 1)]), "one graph serves all lengths"
    assert key([(0, 260, 1), (1, 2, 1)]) != key([(0, 260, 1)])
    assert key([(0, 0, 260), (1, 0, 2)]) == key([(0, 0, 258), (1, 0, 4)])
    assert key([(0, 0, 260), (1, 0, 2)]) != key([(0, 260, 1), (1, 0, 2)])


def test_moved_items_invalidate_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LEAST_ITEMS", 1)
    backend, blocks = TritonAttention(), BlockTables([20] * 8, 16)
    plans = []
    for count in (2, 8, 2, 8):
        metadata = blocks.metadata([(number, 19, 1) for number in range(count)])
        plans.append(backend.prepare(metadata, 16, [PLAIN], torch.float32))
    keys = [plan.capture_key for plan in plans]
    assert keys[0] != keys[2]
    assert keys[1] == keys[3]


def test_mixed_steps_share_one_capture_key() -> None:
    backend, blocks = TritonAttention(), BlockTables([300, 4, 4, 40], 16)
    keys = []
    for decodes in (1, 2):
        chunks = [(number, 3 - 3 * (number >= decodes), 1 if number < decodes else 3) for number in (1, 2)]
        metadata = blocks.metadata([(0, 260, 1), *chunks, (3, 0, 2)])
        metadata = dataclasses.replace(metadata, decodes=torch.tensor([metadata.num_decodes], dtype=torch.int32))
        keys.append(backend.prepare(metadata, 16, [PLAIN], torch.float32).capture_key)
    assert keys[0] == keys[1]


def test_what_the_kernels_do_not_serve_is_named() -> None:
    assert unsupported_reason([PLAIN, SPECS["all of it"]], torch.bfloat16) is None
    assert "larger than 512" in str(unsupported_reason([AttentionSpec(2, 2, 1024, 1.0)], torch.float32))
    assert "evenly" in str(unsupported_reason([AttentionSpec(3, 2, 8, 1.0)], torch.float32))
    assert "float64" in str(unsupported_reason([PLAIN], torch.float64))


def test_queries_of_another_dtype_are_rejected(device: torch.device) -> None:
    backend, blocks = TritonAttention(), BlockTables([2], 4)
    cache = backend.allocate(blocks.num_blocks, 4, PLAIN, torch.float32, device)
    metadata = blocks.metadata([(0, 0, 2)], device)
    plan = backend.prepare(metadata, 4, [PLAIN], torch.float16)
    rows = [torch.zeros(2, heads, 8, dtype=torch.float16, device=device) for heads in (4, 2, 2)]
    with pytest.raises(ValueError, match="do not fit"):
        backend.attend(*rows, AttentionContext(cache, PLAIN, metadata, plan))


@pytest.mark.parametrize("everything", [False, True])
def test_chunks_of_few_rows_split_their_contexts(
    device: torch.device, everything: bool, chunk_sizes: tuple[int, int]
) -> None:
    unit, few = chunk_sizes
    spec, reaches = AttentionSpec(8, 1, 8, 0.4), None
    if everything:
        spec = dataclasses.replace(spec, window=37 * unit, soft_cap=5.0, sinks=tuple(range(-4, 4)))
        reaches = [[], [(1, 5, 60 * unit + 8)], [], []]
    chunks: list[Chunk] = [(20 * unit, 1), (60 * unit, few), (3 * unit, 2), (30 * unit, few + 1)]
    output, expected = attend(
        TritonAttention(), chunks, spec, 4, device=device, bidirectional=reaches, filled_by=FILLED_BY
    )
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


def test_contexts_of_many_chunks_are_not_split() -> None:
    def splits(count: int, new: int, context: int) -> bool:
        blocks = BlockTables([context] * count, 16)
        metadata = blocks.metadata([(number, context - new, new) for number in range(count)])
        plan = TritonAttention().prepare(metadata, 16, [PLAIN], torch.float32)
        return plan.split_chunks

    assert splits(1, 64, 1024)
    assert splits(4, 2, 2000)
    assert not splits(5, 2, 2000)
    assert not splits(1, 65, 2000)
    assert not splits(1, 2, 1023)
    assert not splits(1, 1, 2000)

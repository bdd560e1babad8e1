"""Compiled CUDA kernels against the oracle and the codec, on the GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from kernel_cases import Batch, StoreCase, make_params, relative_error

from fourfold.kernels.cuda.decode import Decode, Tiling
from fourfold.kernels.cuda.dequantise import dequantise
from fourfold.kernels.cuda.pack import pack_params
from fourfold.kernels.cuda.store import store
from fourfold.kernels.cuda.tiling import choose_tiling
from fourfold.layout import PageLayout
from fourfold.quant import codec

pytestmark = pytest.mark.gpu
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 2e-3}


def decode(batch, params, device, *, soft_cap=0.0, window=0, tiling=None, usual=None, multiprocessors=None, extra=None):
    """Outputs of the CUDA path; poisoned first, so that an element left out shows."""
    layout, scale = batch.layout, batch.layout.head_size**-0.5
    kernel = Decode(
        layout,
        batch.heads,
        scale=scale,
        dtype=batch.dtype,
        device=device,
        soft_cap=soft_cap,
        window=window,
        tiling=tiling,
    )
    kernel.multiprocessors = multiprocessors or kernel.multiprocessors
    lengths = torch.tensor(batch.lengths, dtype=torch.int32, device=device)
    start = batch.query_start.to(device)
    cut = kernel.cut(len(batch.lengths), len(batch.query), max(batch.queries), usual)
    plan = kernel.plan(lengths, start, cut if extra is None else replace(cut, extra=extra))
    shape = (*batch.query.shape[:2], layout.head_size_v)
    out = torch.full(shape, float("nan"), dtype=batch.dtype, device=device)
    packed = pack_params(params, batch.dtype, device)
    kernel(batch.query.to(device), batch.cache.to(device), batch.table.to(device), plan, packed, out)
    torch.cuda.synchronize()
    return out


RAGGED = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300]


@pytest.mark.parametrize(("dtype", "warps"), [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, 1)])
@pytest.mark.parametrize("block", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256])
def test_decode_of_ragged_lengths(cuda, head_size, block, dtype, warps):
    batch = Batch(PageLayout(block, 1, head_size, head_size), RAGGED, [1] * len(RAGGED), 4, dtype)
    params = make_params(1, head_size, head_size, sink=True, metric=False)
    tiling = warps and choose_tiling(batch.layout, 4, 100 << 10, warps=warps)  # else what a batch of this size gets
    out = decode(batch, params, cuda, tiling=tiling)
    expected = batch.oracle(params, head_size**-0.5)
    assert (out[0] == 0).all()  # length 0
    assert relative_error(out, expected) < LIMIT[dtype]


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_speculative_rows_are_causal(cuda, group, drafts):
    lengths = [drafts + 1, drafts + 20, 200]
    batch = Batch(PageLayout(16, 2, 128, 128), lengths, [drafts + 1] * 3, 2 * group, torch.bfloat16)
    params = make_params(2, 128, 128, sink=True, metric=False)
    assert relative_error(decode(batch, params, cuda), batch.oracle(params, 128**-0.5)) < LIMIT[torch.bfloat16]


def test_sequences_may_have_different_query_lengths(cuda):
    batch = Batch(PageLayout(16, 2, 128, 128), [40, 9, 100, 5], [4, 1, 2, 5], 8, torch.bfloat16)
    params = make_params(2, 128, 128, sink=False, metric=False)
    assert relative_error(decode(batch, params, cuda), batch.oracle(params, 128**-0.5)) < LIMIT[torch.bfloat16]


@pytest.mark.parametrize(("head_size", "heads"), [(64, 6), (128, 8), (256, 4)])
def test_short_chunks_run_as_decodes(cuda, head_size, heads):
    """Hundreds of query rows a sequence, chunks of different lengths, with and without context."""
    batch = Batch(
        PageLayout(16, 2, head_size, head_size), [180, 512, 40, 700], [180, 30, 3, 256], heads, torch.bfloat16
    )
    params = make_params(2, head_size, head_size, sink=True, metric=False)
    assert relative_error(decode(batch, params, cuda), batch.oracle(params, head_size**-0.5)) < LIMIT[torch.bfloat16]


@pytest.mark.parametrize("usual", [1, 2, 6])
@pytest.mark.parametrize(("head_size", "group"), [(64, 1), (128, 4), (128, 6), (128, 16), (256, 3)])
def test_decodes_and_chunks_share_a_launch(cuda, head_size, group, usual):
    """More sequences than a block has threads, and chunks among them, with tiles made for ``usual`` tokens."""
    lengths = [1 + i % 37 for i in range(1100)] + [180, 90, 40]
    queries = [1] * 1100 + [180, 30, 3]
    batch = Batch(PageLayout(16, 1, head_size, head_size), lengths, queries, group, torch.bfloat16)
    params = make_params(1, head_size, head_size, sink=True, metric=False)
    out = decode(batch, params, cuda, window=50, usual=usual)
    assert relative_error(out, batch.oracle(params, head_size**-0.5, window=50)) < LIMIT[torch.bfloat16]


@pytest.mark.parametrize(("soft_cap", "window"), [(20.0, 0), (0.0, 1), (0.0, 33), (15.0, 100)])
@pytest.mark.parametrize("drafts", [0, 3])
def test_soft_cap_and_window(cuda, soft_cap, window, drafts):
    batch = Batch(PageLayout(16, 2, 128, 128), [250, 30, drafts + 1], [drafts + 1] * 3, 8, torch.bfloat16)
    params = make_params(2, 128, 128, sink=True, metric=False)
    out = decode(batch, params, cuda, soft_cap=soft_cap, window=window)
    expected = batch.oracle(params, 128**-0.5, soft_cap, window)
    assert relative_error(out, expected) < LIMIT[torch.bfloat16]


@pytest.mark.parametrize(
    "tiling",
    [
        *(Tiling(1, 1, 3, 1), Tiling(1, 2, 3, 4), Tiling(1, 1, 4, 2), Tiling(2, 1, 3, 2), Tiling(4, 1, 3, 1)),
        *(Tiling(1, 1, 2, 16, 1), Tiling(1, 2, 3, 8, 2), Tiling(2, 2, 3, 8, 1), Tiling(3, 1, 4, 2, 1)),
        *(
            Tiling(1, 2, 2, 16, 1),
            Tiling(1, 2, 2, 4),
            Tiling(1, 2, 4, 1, 8),
            Tiling(2, 2, 3, 1, 8),
            Tiling(3, 1, 3, 1, 8),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("queries", [1, 5])
def test_every_tiling_gives_the_same(cuda, tiling, queries):
    batch = Batch(PageLayout(16, 2, 128, 128), [700, 0, 129], [queries] * 3, 8, torch.float16)
    params = make_params(2, 128, 128, sink=True, metric=False)
    out = decode(batch, params, cuda, tiling=tiling)
    assert relative_error(out, batch.oracle(params, 128**-0.5)) < LIMIT[torch.float16]


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(
    "tiling",
    [Tiling(1, 2, 2, 4), Tiling(1, 2, 2, 16, 1), Tiling(1, 1, 4, 16, 1), Tiling(1, 2, 4, 1, 8)],
    ids=str,
)
def test_a_run_of_many_tiles(cuda, tiling, window, extra):
    """One run a KV head, hundreds of short sequences in it and long gaps of empty ones."""
    lengths = [1] * 70 + [0] * 50 + [33, 0, 260, 5] * 12 + [0] * 40 + [700, 16]
    batch = Batch(PageLayout(16, 2, 128, 128), lengths, [1] * len(lengths), 8, torch.float16)
    params = make_params(2, 128, 128, sink=True, metric=False)
    out = decode(batch, params, cuda, tiling=tiling, window=window, multiprocessors=1, extra=extra)
    assert relative_error(out, batch.oracle(params, 128**-0.5, window=window)) < LIMIT[torch.float16]


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([([30, 400, 7], [1, 1, 1]), ([500, 0, 16], [1, 1, 1])], id="decodes"),
        pytest.param([([30, 400, 7], [1, 1, 1]), ([60, 0, 16], [55, 0, 3]), ([9, 200], [2, 60])], id="mixed"),
    ],
)
def test_a_captured_graph_follows_new_batches(cuda, steps):
    """Lengths, chunks, tables and queries change between replays; grids and scratch do not."""
    layout = PageLayout(16, 2, 128, 128)
    params = make_params(2, 128, 128, sink=True, metric=False)
    packed = pack_params(params, torch.bfloat16, cuda)
    kernel = Decode(layout, 8, scale=128**-0.5, dtype=torch.bfloat16, device=cuda)
    batches = [Batch(layout, lengths, queries, 8, torch.bfloat16) for lengths, queries in steps]
    pages, width = max(len(b.cache) for b in batches), max(b.table.shape[1] for b in batches)
    tokens = max(len(b.query) for b in batches)
    cache = torch.zeros(pages, *batches[0].cache.shape[1:], dtype=torch.uint8, device=cuda)
    table = torch.zeros(3, width, dtype=torch.int32, device=cuda)
    lengths = torch.ones(3, dtype=torch.int32, device=cuda)
    start = batches[0].query_start.to(cuda)
    query = torch.zeros(tokens, *batches[0].query.shape[1:], dtype=torch.bfloat16, device=cuda)
    out = torch.zeros_like(query)
    cut = kernel.cut(3, tokens, 1) if tokens == 3 else kernel.cut(3, tokens, usual=1)
    scratch = torch.empty(kernel.scratch_bytes(cut), dtype=torch.uint8, device=cuda)

    def step() -> None:
        plan = kernel.plan(lengths, start, cut)
        kernel(query, cache, table, plan, packed, out, scratch)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for batch in batches:
        count, rows = len(batch.lengths), len(batch.query)
        cache[: len(batch.cache)] = batch.cache.to(cuda)
        table.zero_()
        table[:count, : batch.table.shape[1]] = batch.table.to(cuda)
        lengths.fill_(7)  # of a sequence that is not there: its query tokens are none
        lengths[:count].copy_(torch.tensor(batch.lengths))
        start.fill_(rows)
        start[: count + 1] = batch.query_start.to(cuda)
        query[:rows] = batch.query.to(cuda)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(out[:rows], batch.oracle(params, 128**-0.5)) < LIMIT[torch.bfloat16]
        assert out[rows:].isnan().all()  # rows of no sequence are left as they are


@pytest.mark.parametrize("tokens", [3, 300, 1500])
def test_queries_are_transformed_beside_the_store(cuda, tokens):
    """Right behind ``store`` the first kernel does not wait for it; everything after it must."""
    layout = PageLayout(16, 8, 128, 128)
    packed = pack_params(make_params(8, 128, 128, sink=True, metric=True), torch.bfloat16, cuda)
    kernel = Decode(layout, 32, scale=128**-0.5, dtype=torch.bfloat16, device=cuda)
    cache = torch.zeros(tokens * 4, 8, layout.head_page_bytes, dtype=torch.uint8, device=cuda)
    table = torch.randperm(tokens * 4, dtype=torch.int32, device=cuda).view(tokens, 4)
    lengths = torch.randint(1, 65, (tokens,), dtype=torch.int32, device=cuda)
    start = torch.arange(tokens + 1, dtype=torch.int32, device=cuda)
    positions = lengths.long() - 1
    slots = table.gather(1, positions[:, None] // 16)[:, 0].long() * 16 + positions % 16
    plan = kernel.plan(lengths, start, kernel.cut(tokens, tokens, 1))
    scratch = torch.empty(kernel.scratch_bytes(plan.cut), dtype=torch.uint8, device=cuda)
    query = torch.zeros(tokens, 32, 128, dtype=torch.bfloat16, device=cuda)
    key, value = (torch.zeros(tokens, 8, 128, dtype=torch.bfloat16, device=cuda) for _ in range(2))
    new, out = [torch.zeros_like(x) for x in (query, key, value)], torch.zeros_like(query)

    def step() -> None:
        for held, fresh in zip((query, key, value), new, strict=True):
            held.copy_(fresh)
        store(key, value, cache, slots, positions, layout, packed)
        kernel(query, cache, table, plan, packed, out, scratch, after_store=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            step()
    for _ in range(10):
        for fresh in new:
            fresh.normal_()
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = torch.full_like(out, float("nan"))
        kernel(query, cache, table, plan, packed, expected, scratch)
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        assert out.isfinite().all()


def test_offsets_beyond_four_gib(cuda):
    layout = PageLayout(16, 8, 128, 128)
    pages = (5 << 30) // layout.page_bytes
    cache = torch.zeros(pages, 8, layout.head_page_bytes, dtype=torch.uint8, device=cuda)
    batch = Batch(layout, [40], [1], 8, torch.bfloat16)
    moved = batch.table.clone()
    for i, page in enumerate(batch.table[0].tolist()):
        moved[0, i] = pages - 1 - i
        cache[pages - 1 - i] = batch.cache[page].to(cuda)
    params = make_params(8, 128, 128, sink=False, metric=False)
    kernel = Decode(layout, 8, scale=128**-0.5, dtype=torch.bfloat16, device=cuda)
    out = torch.zeros_like(batch.query, device=cuda)
    lengths, start = torch.tensor([40], dtype=torch.int32, device=cuda), batch.query_start.to(cuda)
    plan = kernel.plan(lengths, start, kernel.cut(1, 1, 1))
    packed = pack_params(params, torch.bfloat16, cuda)
    kernel(batch.query.to(cuda), cache, moved.to(cuda), plan, packed, out)
    assert relative_error(out, batch.oracle(params, 128**-0.5)) < LIMIT[torch.bfloat16]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("metric", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_size", "block"), [(64, 16), (80, 32), (96, 16), (128, 64), (192, 16), (256, 128)])
def test_store_is_as_good_as_the_codec(cuda, head_size, block, dtype, metric, dense):
    case = StoreCase(head_size, block, dtype, metric=metric, dense=dense)
    cache = torch.zeros_like(case.want, device=cuda)
    packed = pack_params(case.params, dtype, cuda)
    inputs = (x.to(cuda) for x in (case.slots, case.positions))
    store(case.key.to(cuda), case.value.to(cuda), cache, *inputs, case.layout, packed)
    case.check(cache.cpu())


@pytest.mark.parametrize("metric", [False, True])
def test_store_gives_the_same_bytes_however_many_tokens(cuda, metric):
    """The number of tokens decides how the work is spread, never what is written."""
    layout, tokens = PageLayout(16, 3, 128, 128), 6000
    packed = pack_params(make_params(3, 128, 128, sink=True, metric=metric), torch.bfloat16, cuda)
    key, value = (torch.randn(tokens, 3, 128, dtype=torch.bfloat16, device=cuda) for _ in range(2))
    slots, positions = torch.randperm(tokens, device=cuda), torch.arange(tokens, device=cuda) % 40
    caches = []
    for step in (16, 700, 1400, 2800, tokens):
        cache = torch.zeros(tokens // 16, 3, layout.head_page_bytes, dtype=torch.uint8, device=cuda)
        for i in range(0, tokens, step):
            part = slice(i, i + step)
            store(key[part], value[part], cache, slots[part], positions[part], layout, packed)
        caches.append(cache)
    assert all((cache == caches[0]).all() for cache in caches)
    assert (caches[0].float().std() > 30).item()


def test_dequantised_pages_are_the_codecs_rows(cuda):
    layout = PageLayout(32, 2, 80, 80)
    batch = Batch(layout, [70, 0, 33], [1] * 3, 2, torch.bfloat16)
    params = make_params(2, 80, 80, sink=True, metric=False)
    key, value = (torch.full((103, 2, 80), float("nan"), dtype=torch.bfloat16, device=cuda) for _ in range(2))
    lengths = torch.tensor(batch.lengths, dtype=torch.int32, device=cuda)
    start = torch.tensor([0, 70, 70], dtype=torch.int32, device=cuda)
    sinks = params.sink_key.to(cuda), params.sink_value.to(cuda)
    dequantise(batch.cache.to(cuda), batch.table.to(cuda), lengths, start, key, value, layout, *sinks, end=70)
    k, v, ks, vs = codec.page_views(batch.cache, layout)
    row = 0
    for b, n in enumerate(batch.lengths):
        for t in range(n):
            page, slot = int(batch.table[b, t // 32]), t % 32
            for out, codes, scales, sink in ((key, k, ks, params.sink_key), (value, v, vs, params.sink_value)):
                want = codec.dequantise(codec.unpack_row(codes[page, :, slot]), scales[page, :, slot])
                want = want + (sink if t == 0 else 0.0)
                torch.testing.assert_close(out[row].float().cpu(), want.bfloat16().float(), rtol=0.01, atol=0.01)
            row += 1
    assert row == 103

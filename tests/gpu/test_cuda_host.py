"""The CUDA path's host side: orders of packed operands, tilings, and that every kernel compiles for every target."""

from __future__ import annotations

import itertools
import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from kernel_cases import make_params

from fourfold.kernels.cuda import pack, store
from fourfold.kernels.cuda.compile import compile_cubin
from fourfold.kernels.cuda.decode import choose_tiling
from fourfold.kernels.cuda.store import shared_bytes
from fourfold.layout import HEAD_SIZES, PageLayout
from fourfold.quant.rotation import hadamard


@pytest.mark.parametrize("size", HEAD_SIZES)
def test_operand_order_is_a_permutation_with_padding(size):
    order = pack.operand_order(size)
    assert sorted(order[order >= 0].tolist()) == list(range(size))
    assert len(order) == 32 * pack.chunks(size)
    # the two nibbles of a byte are neighbours but one: low codes at b = 0, high codes of the same bytes at b = 1
    pairs = order.view(-1, 2, 2)
    real = pairs[:, 0] >= 0
    assert (pairs[:, 1][real] - pairs[:, 0][real] == size // 2).all()


@pytest.mark.parametrize("size", [64, 80, 192])
def test_packed_matrix_multiplies_like_the_matrix(size):
    matrix = torch.randn(2, size, size, dtype=torch.float64)
    packed = pack.pack_matrix(matrix, torch.arange(size))
    row = torch.randn(size, dtype=torch.float64)
    padded = torch.zeros(32 * pack.chunks(size), dtype=torch.float64)
    padded[:size] = row
    # lane 4 g + q of tile j, chunk c: rows 32 c + 8 q .. + 7 of column 8 j + g
    lanes = packed.view(2, size // 8, pack.chunks(size), 8, 4, 8)
    out = torch.einsum("hjcgqr,cqr->hjg", lanes, padded.view(-1, 4, 8)).reshape(2, size)
    torch.testing.assert_close(out, torch.einsum("d,hde->he", row, matrix))


def test_packed_factor_is_the_feedback_of_later_groups():
    params = make_params(2, 64, 64, sink=False, metric=True)
    packed = pack.pack_factor(params)
    pair, i, block, g, q, b, x = 1, 1, 2, 5, 1, 1, 0
    row, column = 16 * pair + 8 * i + g, 16 * block + 8 * b + 2 * q + x
    assert packed[1, pair, block, 4 * g + q, 4 * i + 2 * b + x] == params.feedback[1, column, row].half()
    assert (packed[:, 1, 1, :, 4:] == 0).all()  # tile 3's own block: its elements do not wait for each other


@pytest.mark.parametrize(("size", "outer"), [(64, 2), (80, 1), (96, 1), (128, 4), (192, 2), (256, 8)])
def test_a_scaled_rotation_is_blocks_and_a_hadamard_matrix(size, outer):
    matrix = make_params(2, size, size, sink=False, metric=False).key_matrix.bfloat16()
    assert pack.outer_size(matrix) == outer
    assert pack.outer_size(make_params(2, size, size, sink=False, metric=False, dense=True).key_matrix) == 1
    signs = hadamard(outer).sign().float()
    blocks = pack.outer_blocks(matrix, outer).unflatten(0, (2, outer)).float()
    row, bias, sink = (torch.randn(2, size) for _ in range(3))
    inner = torch.einsum("hae,haef->haf", row.unflatten(1, (outer, -1)), blocks)
    out = torch.einsum("haf,ab->hbf", inner, signs).flatten(1)
    torch.testing.assert_close(out, torch.einsum("hd,hde->he", row, matrix.float()))
    packed = pack.pack_bias(bias, sink, outer)
    assert packed.shape == (2, 2, 2 * size)
    start = packed.reshape(2, 2, size // 2, 2, 2)  # pairs of elements, each twice
    assert torch.equal(start[..., 0, :], start[..., 1, :])
    before = start[..., 0, :].reshape(2, 2, outer, -1)
    after = torch.einsum("shaf,ab->shbf", before, signs).flatten(2)
    torch.testing.assert_close(after, torch.stack([bias, bias - sink]))


@pytest.mark.parametrize("limit", [100 << 10, 164 << 10, 228 << 10])
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_tilings_fit_the_multiprocessor(size, limit):
    layout = PageLayout(16, 1, size, size)
    for rows, warps in itertools.product((1, 4, 8, 9, 16, 24, 32, 64, 1000), (1, 4, 8)):
        tiling = choose_tiling(layout, rows, limit, warps)
        assert tiling.blocks * (tiling.shared(layout) + 1024) <= limit
        assert tiling.stages >= 2
        assert 1 <= tiling.row_tiles <= 3


@pytest.mark.parametrize("tokens", [1, 16, 17, 500, 8192, 100_000])
@pytest.mark.parametrize("heads", [1, 8, 300])
def test_launches_of_the_store_cover_all_tokens_at_once(monkeypatch, tokens, heads):
    calls = []

    class Recorder:
        def __init__(self, kernel, arguments, grid, threads, shared):
            self.shape = len(arguments), grid, threads

        def __call__(self, stream, *arguments):
            calls.append((*self.shape, arguments))

    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(store, "load", lambda name, defines, device, shared: name)
    monkeypatch.setattr(store, "Launch", Recorder)
    monkeypatch.setattr(store, "stream_of", lambda device: 0)
    monkeypatch.setattr(store, "_prepare", store._prepare.__wrapped__)
    layout = PageLayout(16, heads, 64, 64)
    packed = pack.pack_params(make_params(heads, 64, 64, sink=True, metric=True), torch.bfloat16, "cpu")
    rows = torch.zeros(1, 1, 1).expand(tokens, heads, 64)
    at = torch.zeros(tokens, dtype=torch.int64)
    store.store(rows, rows, torch.zeros(1, heads, layout.head_page_bytes, dtype=torch.uint8), at, at, layout, packed)
    ((count, grid, threads, arguments),) = calls
    assert len(arguments) == count
    size = arguments[-1]
    assert 16 <= size <= threads // 2
    assert grid[0] == heads
    assert grid[0] * grid[1] <= max(2 * 132, 2 * heads)  # two blocks a multiprocessor
    assert grid[1] % 2 == 0
    assert grid[1] // 2 <= -(-tokens // size)


@pytest.mark.parametrize("size", HEAD_SIZES)
def test_a_block_of_the_store_fits_the_smallest_multiprocessor(size):
    """99 KB is what a block may have on compute capability 8.6 and 8.9."""
    outer = pack.outer_size(make_params(1, size, size, sink=False, metric=False).key_matrix)
    assert shared_bytes(PageLayout(16, 1, size, size), True, outer, outer) <= 99 << 10


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
def test_every_kernel_compiles(capability):
    """NVRTC needs no GPU; it is one of the tests' requirements."""
    common = {"D": 80, "DV": 80, "PS": 48, "GROUP": 3, "SINK": 1, "ACT_BF16": 1}
    tiling = {"NB": 2, "NT": 1, "NW": 4, "ST": 3, "MINB": 2, "SOFTCAP": 1, "WINDOW": 1}
    for name, more in (
        ("plan", {}),
        ("positions", {}),
        ("query", {}),
        ("merge", {}),
        ("dequantise", {}),
        ("decode", tiling),
        ("decode", {**tiling, "NW": 1}),
        ("decode", {**tiling, "NW": 8, "MINB": 1}),
        ("store", store.kernel_defines(PageLayout(48, 1, 80, 80), True, True, 1, 1, torch.bfloat16)),
    ):
        assert compile_cubin(name, common | more, capability)[:4] == b"\x7fELF"

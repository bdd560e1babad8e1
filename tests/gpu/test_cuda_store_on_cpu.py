"""The CUDA store on a CPU, against the codec: the same source, without a GPU (cuda_on_cpu.h)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import cuda_on_cpu
from kernel_cases import StoreCase, make_params

from fourfold.kernels.cuda.pack import pack_params
from fourfold.layout import PageLayout
from fourfold.quant import codec
from fourfold.quant.codec import page_views


@pytest.mark.parametrize("metric", [False, True])
@pytest.mark.parametrize(
    ("head_size", "block", "dtype", "dense"),
    [
        (64, 16, torch.bfloat16, False),
        (80, 32, torch.float16, False),
        (96, 16, torch.bfloat16, False),
        (128, 64, torch.bfloat16, False),
        (128, 16, torch.float16, True),
        (192, 16, torch.bfloat16, False),
        (256, 128, torch.float16, False),
    ],
)
def test_store_is_as_good_as_the_codec(head_size, block, dtype, dense, metric):
    case = StoreCase(head_size, block, dtype, metric=metric, dense=dense)
    cache = torch.zeros_like(case.want)
    packed = pack_params(case.params, dtype, "cpu")
    cuda_on_cpu.store(case.key, case.value, cache, case.slots, case.positions, case.layout, packed)
    case.check(cache)


@pytest.mark.parametrize("metric", [False, True])
def test_bytes_do_not_depend_on_how_the_work_is_spread(metric):
    layout, tokens = PageLayout(16, 2, 128, 128), 200
    packed = pack_params(make_params(2, 128, 128, sink=True, metric=metric), torch.bfloat16, "cpu")
    generator = torch.Generator().manual_seed(9)
    key, value = (torch.randn(tokens, 2, 128, generator=generator).bfloat16() for _ in range(2))
    slots, positions = torch.randperm(208, generator=generator)[:tokens], torch.arange(tokens) % 40
    caches = []
    for block_tokens, blocks in ((16, 13), (32, 3), (128, 1)):
        cache = torch.zeros(13, 2, layout.head_page_bytes, dtype=torch.uint8)
        cuda_on_cpu.store(key, value, cache, slots, positions, layout, packed, block_tokens=block_tokens, blocks=blocks)
        caches.append(cache)
    assert all(torch.equal(cache, caches[0]) for cache in caches)
    assert caches[0].float().std() > 30


@pytest.mark.parametrize("metric", [False, True])
def test_scales_of_rows_of_any_size_are_finite(metric):
    layout, sizes = PageLayout(16, 2, 128, 128), (0.0, 1e-7, 3e-5, 1.0, 1e4, 3e4, 6e4, 3e38)
    packed = pack_params(make_params(2, 128, 128, sink=False, metric=metric), torch.bfloat16, "cpu")
    row = torch.randn(1, 2, 128, generator=torch.Generator().manual_seed(5)).sign()
    rows = torch.cat([row * size for size in sizes]).bfloat16()
    cache = torch.zeros(1, 2, layout.head_page_bytes, dtype=torch.uint8)
    at = torch.arange(len(sizes))
    cuda_on_cpu.store(rows, rows, cache, at, at + 5, layout, packed)
    for scales in page_views(cache, layout)[2:]:
        assert torch.isfinite(scales).all()
    values = codec.stored_rows(cache, layout, at)[1]
    exact = codec.transformed(rows, rows, at + 5, make_params(2, 128, 128, sink=False, metric=metric))[1]
    small = slice(0, 5)
    assert (values - exact)[small].norm() < 0.15 * exact[small].norm()

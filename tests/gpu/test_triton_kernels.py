"""Triton kernels against the oracle: in the interpreter on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from kernel_cases import Batch, make_params, relative_error

from fourfold.layout import PageLayout
from fourfold.quant import codec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def kernels():
    """decode, store and the class of their parameters, imported while the interpreter is chosen."""
    before = os.environ.get("TRITON_INTERPRET")
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield (
            importlib.import_module("fourfold.kernels.triton.decode"),
            importlib.import_module("fourfold.kernels.triton.store"),
            importlib.import_module("fourfold.kernels.triton.params").TritonParams,
        )
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = before


@pytest.mark.parametrize(
    ("head_size", "block", "lengths", "queries", "group", "soft_cap", "window"),
    [
        (64, 16, [0, 1, 17], [1, 1, 1], 2, 0.0, 0),
        (80, 32, [40, 5], [4, 2], 3, 15.0, 0),
        (128, 16, [50], [3], 1, 0.0, 20),
    ],
)
def test_attention_matches_the_oracle(kernels, head_size, block, lengths, queries, group, soft_cap, window):
    layout = PageLayout(block, 2, head_size, head_size)
    batch = Batch(layout, lengths, queries, 2 * group, torch.float32)
    params = make_params(2, head_size, head_size, sink=True, metric=False)
    scale = head_size**-0.5
    moved = [
        t.to(DEVICE)
        for t in (batch.query, batch.cache, batch.table, torch.tensor(lengths, dtype=torch.int32), batch.query_start)
    ]
    out = kernels[0].attend(
        *moved, max(queries), layout, kernels[2].of(params, DEVICE), scale=scale, soft_cap=soft_cap, window=window
    )
    expected = batch.oracle(params, scale, soft_cap, window)
    live = torch.cat([torch.full((q,), n > 0) for n, q in zip(lengths, queries, strict=True)])
    assert relative_error(out[live.to(DEVICE)], expected[live]) < 2e-5


@pytest.mark.parametrize(("head_size", "block", "metric"), [(64, 16, True), (80, 16, False), (128, 32, False)])
def test_store_writes_what_the_codec_writes(kernels, head_size, block, metric):
    layout = PageLayout(block, 2, head_size, head_size)
    params = make_params(2, head_size, head_size, sink=True, metric=metric)
    generator = torch.Generator().manual_seed(5)
    key, value = (torch.randn(3, 2, head_size, generator=generator) for _ in range(2))
    slots = torch.tensor([3, -1, 40])
    positions = torch.tensor([0, 1, 2])
    expected = torch.zeros(4, 2, layout.head_page_bytes, dtype=torch.uint8)
    codec.store_tokens(expected, layout, slots, codec.encode(key, value, positions, params))
    cache = torch.zeros_like(expected).to(DEVICE)
    kernels[1].store(
        *(t.to(DEVICE) for t in (key, value)), cache, slots.to(DEVICE), positions.to(DEVICE), layout,
        kernels[2].of(params, DEVICE),
    )  # fmt: skip
    for got, want in zip(codec.page_views(cache.cpu(), layout), codec.page_views(expected, layout), strict=True):
        if got.dtype == torch.float16:
            torch.testing.assert_close(got, want, rtol=2e-3, atol=0)
        else:
            # an element on the middle between two codes may go either way in float32
            assert (got != want).float().mean() < 0.005

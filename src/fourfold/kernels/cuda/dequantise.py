"""Pages to dense keys and values, so that a prefill chunk can run in any dense attention kernel (dequantise.cu).

A chunk of many queries is bound by arithmetic, not bytes: reading its context once, expanding it into a workspace and
attending there costs a few per cent more than attention on a 16-bit cache.  Queries must be transformed
(``q @ query_matrix``) and outputs rotated back (``o @ value_matrix.T + value_centre``).
"""

from __future__ import annotations

import torch

from fourfold.kernels.cuda.compile import load, pointer, stream_of
from fourfold.kernels.cuda.launch import Launch
from fourfold.layout import PageLayout

_ARGUMENTS = "PqqPiPPPPPPiii"
"""cache and its strides, table and its stride, lengths, start, sink_key, sink_value, key, value, KV heads, range."""


def dequantise(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    start: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PageLayout,
    sink_key: torch.Tensor,
    sink_value: torch.Tensor,
    *,
    begin: int = 0,
    end: int,
) -> None:
    """Expand tokens ``begin`` to ``min(end, length)`` of each sequence.

    Args:
        cache: [pages, HK, head_page_bytes] uint8; block_table: [B, pages] int32; lengths: [B] int32.
        start: [B] int32 or longer, row of ``key`` and ``value`` where each sequence's token ``begin`` goes.
        key: [rows, HK, D], value: [rows, HK, Dv], float16 or bfloat16, contiguous.
        sink_key: [HK, D], sink_value: [HK, Dv] float32, added to token 0.
        begin: a multiple of 16; end: at least the longest length, or where this piece of the context ends.
    """
    if begin % 16:
        raise ValueError(f"begin must be a multiple of 16, not {begin}")
    if end <= begin:
        return
    defines = {
        "D": layout.head_size,
        "DV": layout.head_size_v,
        "PS": layout.block_size,
        "ACT_BF16": int(key.dtype == torch.bfloat16),
    }
    kernel = load("dequantise", defines, key.device)
    grid = (-(-(end - begin) // 16), layout.num_kv_heads, lengths.numel())
    Launch(kernel, _ARGUMENTS, grid, 128)(
        stream_of(key.device),
        cache.data_ptr(),
        cache.stride(0),
        cache.stride(1),
        block_table.data_ptr(),
        block_table.stride(0),
        *map(pointer, (lengths, start, sink_key, sink_value, key, value)),
        layout.num_kv_heads,
        begin,
        end,
    )

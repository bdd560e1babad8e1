"""Quantise-and-store: keys and values of new tokens into their pages, one launch (store.cu)."""

from __future__ import annotations

from ctypes import c_int, c_longlong, c_void_p

import torch

from fourfold.kernels.cuda.compile import load, pointer, stream_of, structure
from fourfold.kernels.cuda.pack import PackedParams, chunks
from fourfold.layout import PageLayout

_Args = structure(
    "StoreArgs",
    [
        ("key", c_void_p),
        ("value", c_void_p),
        ("key_stride", c_longlong),
        ("value_stride", c_longlong),
        ("slots", c_void_p),
        ("positions", c_void_p),
        ("cache", c_void_p),
        ("page_stride", c_longlong),
        ("head_stride", c_longlong),
        ("wk", c_void_p),
        ("wv", c_void_p),
        ("key_bias", c_void_p),
        ("value_bias", c_void_p),
        ("factor", c_void_p),
        ("corner", c_void_p),
        ("weight", c_void_p),
        ("tokens", c_int),
        ("kv_heads", c_int),
    ],
)
_BLOCK_TOKENS = 128


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    layout: PageLayout,
    params: PackedParams,
) -> None:
    """Write ``slots.numel()`` tokens; a negative slot is skipped.

    Args:
        key: [T, HK, D], value: [T, HK, Dv], of the parameters' dtype; heads and elements contiguous, token strides
            a multiple of 8 elements.  T may exceed ``slots`` (padding of a graph).
        cache: [pages, HK, head_page_bytes] uint8; any page and head stride.
        slots, positions: [tokens] int64; position of each token in its sequence.
    """
    tokens = slots.numel()
    if tokens == 0:
        return
    device = key.device
    defines = {
        "D": layout.head_size,
        "DV": layout.head_size_v,
        "PS": layout.block_size,
        "SINK": int(params.sink),
        "METRIC_KEYS": int(params.metric_keys),
        "TABLES_SHARED": 0,
        "ACT_BF16": int(params.dtype == torch.bfloat16),
    }
    d, dv = layout.head_size, layout.head_size_v
    shared = max(n // 8 * chunks(n) * 512 for n in (d, dv))
    if params.metric_keys:
        defines["TABLES_SHARED"] = int(d <= 128)
        shared = max(shared, d // 8 * chunks(d) * 512 + (d * d * 2 if d <= 128 else 0) + d * 64 + d * 4)
    kernel = load("store", defines, device, shared)
    blocks = -(-tokens // _BLOCK_TOKENS)
    per_head = torch.cuda.get_device_properties(device).multi_processor_count * 2 // (2 * layout.num_kv_heads)
    grid = min(blocks, max(per_head, 1))
    grid = -(-blocks // -(-blocks // grid))  # the same number of blocks for each
    arguments = _Args(
        pointer(key),
        pointer(value),
        key.stride(0),
        value.stride(0),
        pointer(slots),
        pointer(positions),
        pointer(cache),
        cache.stride(0),
        cache.stride(1),
        pointer(params.wk),
        pointer(params.wv),
        pointer(params.key_bias),
        pointer(params.value_bias),
        *map(pointer, (params.factor, params.corner, params.weight)),
        tokens,
        layout.num_kv_heads,
    )
    kernel.launch((grid, 2 * layout.num_kv_heads), 256, shared, arguments, stream_of(device))

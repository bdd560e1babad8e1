"""Quantise-and-store: keys and values of new tokens into their pages, one launch (store.cu)."""

from __future__ import annotations

import functools
from ctypes import c_int, c_longlong, c_void_p

import torch

from fourfold.kernels.cuda.compile import Kernel, load, pointer, stream_of, structure
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
_PositionArgs = structure(
    "PositionArgs",
    [(n, c_void_p) for n in ("lengths", "q_start", "out")] + [("batch", c_int), ("tokens", c_int)],
)
_BLOCK_TOKENS = 128


def write_positions(lengths: torch.Tensor, query_start: torch.Tensor, out: torch.Tensor) -> None:
    """Write the position of each new token into ``out`` [T] int64; -1 for tokens of no sequence.

    Args:
        lengths: [B] int32, new tokens included; query_start: [B + 1] int32, not decreasing.
    """
    if not out.numel():
        return
    kernel = load("positions", {"ACT_BF16": 1}, out.device, dependent=False)
    arguments = _PositionArgs(*map(pointer, (lengths, query_start, out)), lengths.numel(), out.numel())
    kernel.launch((-(-out.numel() // 256), 1, 1), 256, 0, arguments, stream_of(out.device))


@functools.cache
def _prepare(
    layout: PageLayout, sink: bool, metric: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Kernel, int, int]:
    """Kernel, bytes of shared memory, and the most thread blocks of a head that are resident at once."""
    d, dv = layout.head_size, layout.head_size_v
    defines = {
        "D": d, "DV": dv, "PS": layout.block_size, "SINK": int(sink), "METRIC_KEYS": int(metric),
        "TABLES_SHARED": int(metric and d <= 128), "ACT_BF16": int(dtype == torch.bfloat16),
    }  # fmt: skip
    shared = max(n // 8 * chunks(n) * 512 for n in (d, dv))
    if metric:
        shared = max(shared, d // 8 * chunks(d) * 512 + (d * d * 2 if d <= 128 else 0) + d * 64 + d * 4)
    resident = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return load("store", defines, device, shared), shared, max(resident // (2 * layout.num_kv_heads), 1)


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
    kernel, shared, per_head = _prepare(layout, params.sink, params.metric_keys, params.dtype, device)
    blocks = -(-tokens // _BLOCK_TOKENS)
    grid = -(-blocks // -(-blocks // min(blocks, per_head)))  # the same number of blocks for each
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
    kernel.launch((grid, 2 * layout.num_kv_heads, 1), 256, shared, arguments, stream_of(device))

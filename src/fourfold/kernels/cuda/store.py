"""Quantise-and-store: keys and values of new tokens into their pages, one launch (store.cu)."""

from __future__ import annotations

import functools

import torch

from fourfold.kernels.cuda.compile import load, pointer, stream_of
from fourfold.kernels.cuda.launch import Launch
from fourfold.kernels.cuda.pack import PackedParams, chunks
from fourfold.layout import PageLayout
from fourfold.quant.params import CLIP_APART, middle_clip

_ARGUMENTS = "PPqqPPPqqPPPPPiii"
"""key, value and their strides, slots, positions, cache and its strides, the parameters' five, three sizes."""
_POSITION_ARGUMENTS = "PPPii"
"""lengths, query_start, out, batch, tokens."""
_BLOCK_TOKENS = (16, 32, 64, 128)
"""Tokens that a block may take at once."""
_TABLES_SHARED = 128
"""Largest head size whose factor is kept in shared memory."""


def write_positions(lengths: torch.Tensor, query_start: torch.Tensor, out: torch.Tensor) -> None:
    """Write the position of each new token into ``out`` [T] int64; -1 for tokens of no sequence.

    Args:
        lengths: [B] int32, new tokens included; query_start: [B + 1] int32, not decreasing.
    """
    if not out.numel():
        return
    kernel = load("positions", {"ACT_BF16": 1}, out.device, dependent=False)
    batch, tokens = lengths.numel(), out.numel()
    Launch(kernel, _POSITION_ARGUMENTS, (-(-tokens // 256), 1, 1), 256)(
        stream_of(out.device), *map(pointer, (lengths, query_start, out)), batch, tokens
    )


def shared_bytes(layout: PageLayout, metric: bool, outer_k: int, outer_v: int) -> int:
    """Shared memory of a block: the matrix and both biases of its rows, and the table of ``pack_factor``."""
    d, dv = layout.head_size, layout.head_size_v
    keys, values = (n // 8 * (chunks(n) // o) * 512 + n * 16 for n, o in ((d, outer_k), (dv, outer_v)))
    if metric and d <= _TABLES_SHARED:
        keys += d * d * 2
    return max(keys, values)


def kernel_defines(
    layout: PageLayout, sink: bool, metric: bool, outer_k: int, outer_v: int, dtype: torch.dtype
) -> dict[str, int]:
    """What store.cu is compiled for."""
    d, dv = layout.head_size, layout.head_size_v
    return {
        "D": d, "DV": dv, "PS": layout.block_size, "SINK": int(sink), "METRIC_KEYS": int(metric),
        "TABLES_SHARED": int(metric and d <= _TABLES_SHARED), "OUTER_K": outer_k, "OUTER_V": outer_v,
        "KEY_CLIP": round(1000 * middle_clip(d)), "VALUE_CLIP": round(1000 * middle_clip(dv)),
        "CLIP_APART": round(1000 * CLIP_APART),
        "ACT_BF16": int(dtype == torch.bfloat16),
    }  # fmt: skip


@functools.lru_cache(maxsize=256)
def _prepare(
    layout: PageLayout,
    sink: bool,
    metric: bool,
    outer_k: int,
    outer_v: int,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
) -> tuple[Launch, int]:
    """The launch for so many tokens, which all layers of a step share, and the tokens that a block takes at once."""
    heads, multiprocessors = layout.num_kv_heads, torch.cuda.get_device_properties(device).multi_processor_count
    # Rounding is a chain of dependent steps, so few tokens are spread over as many multiprocessors as there are.
    size = next((n for n in _BLOCK_TOKENS if -(-tokens // n) * heads <= multiprocessors), _BLOCK_TOKENS[-1])
    units, resident = -(-tokens // size), 2 if max(layout.head_size, layout.head_size_v) <= 128 else 1
    # of keys, and as many of values: all run at once, with as many pieces for each
    blocks = min(units, max(resident * multiprocessors // (2 * heads), 1))
    blocks = -(-units // -(-units // blocks))
    shared = shared_bytes(layout, metric, outer_k, outer_v)
    kernel = load("store", kernel_defines(layout, sink, metric, outer_k, outer_v, dtype), device, shared)
    return Launch(kernel, _ARGUMENTS, (heads, 2 * blocks, 1), 256, shared), size


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
    launch, size = _prepare(
        layout, params.sink, params.metric_keys, params.outer_k, params.outer_v, params.dtype, device, tokens
    )
    launch(
        stream_of(device), key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0), slots.data_ptr(),
        positions.data_ptr(), cache.data_ptr(), cache.stride(0), cache.stride(1), *params.store_addresses, tokens,
        layout.num_kv_heads, size,
    )  # fmt: skip

"""Attention over 4-bit pages in Triton: one kernel, one program a sequence, KV head and block of query rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fourfold.kernels.triton.params import TritonParams
from fourfold.layout import PageLayout


@triton.jit
def _decode_kernel(  # type: ignore[no-untyped-def]
    query, cache, scales, table, lengths, query_start, sink_key, sink_value, out,
    page_stride, head_stride, table_stride, kv_heads, scale, cap, window,
    D: tl.constexpr, DV: tl.constexpr, PS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    KPAD: tl.constexpr, VPAD: tl.constexpr,
):  # fmt: skip
    """query [tokens, H, D] float32 transformed; out [tokens, H, DV] float32 in the values' rotated basis."""
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    first_query = tl.load(query_start + sequence)
    queries = tl.load(query_start + sequence + 1) - first_query
    r = block * ROWS + tl.arange(0, ROWS)
    real = r < queries * GROUP
    position = length - queries + r // GROUP
    i, j, t = tl.arange(0, KPAD), tl.arange(0, VPAD), tl.arange(0, PS)
    k_ok, v_ok = i < D // 2, j < DV // 2
    q_row = query + ((first_query + r // GROUP) * kv_heads * GROUP + head * GROUP + r % GROUP)[:, None] * D
    q_low = tl.load(q_row + i[None, :], mask=real[:, None] & k_ok[None, :], other=0.0)
    q_high = tl.load(q_row + D // 2 + i[None, :], mask=real[:, None] & k_ok[None, :], other=0.0)
    sk_low = tl.load(sink_key + head * D + i, mask=k_ok, other=0.0)
    sk_high = tl.load(sink_key + head * D + D // 2 + i, mask=k_ok, other=0.0)
    sv_low = tl.load(sink_value + head * DV + j, mask=v_ok, other=0.0)
    sv_high = tl.load(sink_value + head * DV + DV // 2 + j, mask=v_ok, other=0.0)
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    o_low = tl.zeros([ROWS, VPAD], tl.float32)
    o_high = tl.zeros([ROWS, VPAD], tl.float32)
    begin = tl.maximum(length - queries - window + 1, 0) // PS if window > 0 else 0
    for page in range(begin, (length + PS - 1) // PS):
        at = tl.load(table + sequence * table_stride + page).to(tl.int64) * page_stride + head * head_stride
        token = page * PS + t
        used = token < length
        zero = (token == 0)[:, None]
        ks = tl.load(scales + (at + PS * (D // 2 + DV // 2)) // 2 + t, mask=used, other=0.0).to(tl.float32)[:, None]
        vs = tl.load(scales + (at + PS * (D // 2 + DV // 2 + 2)) // 2 + t, mask=used, other=0.0).to(tl.float32)[:, None]
        kw = tl.load(cache + at + t[:, None] * (D // 2) + i[None, :], mask=k_ok[None, :], other=0)
        k_low = ((kw & 15).to(tl.float32) - 7.5) * ks + tl.where(zero, sk_low[None, :], 0.0)
        k_high = ((kw >> 4).to(tl.float32) - 7.5) * ks + tl.where(zero, sk_high[None, :], 0.0)
        s = tl.dot(q_low, tl.trans(k_low), input_precision="ieee") + tl.dot(
            q_high, tl.trans(k_high), input_precision="ieee"
        )
        s *= scale
        if cap > 0:
            s = cap * (1.0 - 2.0 / (1.0 + tl.exp(tl.minimum(2.0 * s / cap, 80.0))))
        seen = used[None, :] & (token[None, :] <= position[:, None])
        if window > 0:
            seen &= token[None, :] + window > position[:, None]
        s = tl.where(seen, s, -1e30)
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.where(seen, tl.exp(s - new_top[:, None]), 0.0)
        keep = tl.exp(top - new_top)
        total = total * keep + tl.sum(p, 1)
        vw = tl.load(cache + at + PS * (D // 2) + t[:, None] * (DV // 2) + j[None, :], mask=v_ok[None, :], other=0)
        v_low = ((vw & 15).to(tl.float32) - 7.5) * vs + tl.where(zero, sv_low[None, :], 0.0)
        v_high = ((vw >> 4).to(tl.float32) - 7.5) * vs + tl.where(zero, sv_high[None, :], 0.0)
        o_low = o_low * keep[:, None] + tl.dot(p, v_low, input_precision="ieee")
        o_high = o_high * keep[:, None] + tl.dot(p, v_high, input_precision="ieee")
        top = new_top
    inverse = tl.where(total > 0, 1.0 / tl.maximum(total, 1e-30), 0.0)[:, None]
    o_row = out + ((first_query + r // GROUP) * kv_heads * GROUP + head * GROUP + r % GROUP)[:, None] * DV
    tl.store(o_row + j[None, :], o_low * inverse, mask=real[:, None] & v_ok[None, :])
    tl.store(o_row + DV // 2 + j[None, :], o_high * inverse, mask=real[:, None] & v_ok[None, :])


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    query_start: torch.Tensor,
    max_query: int,
    layout: PageLayout,
    params: TritonParams,
    *,
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
) -> torch.Tensor:
    """Attention of the newest tokens of each sequence to all its codes, its own included.

    Args:
        query: [tokens, H, D] float, untransformed; cache: [pages, HK, head_page_bytes] uint8.
        block_table: [B, pages] int32; lengths: [B] int32, new tokens included; query_start: [B + 1] int32.
        max_query: most new tokens of a sequence; scale, soft_cap, window as in
            ``fourfold.kernels.cuda.decode.Decode``.

    Returns:
        [tokens, H, Dv] of the query's dtype.
    """
    tokens, heads, d = query.shape
    kv_heads, dv = layout.num_kv_heads, layout.head_size_v
    group = heads // kv_heads
    grouped = query.view(tokens, kv_heads, group, d).to(torch.float32)
    transformed = torch.einsum("thgd,hde->thge", grouped, params.layer.query_matrix).contiguous()
    rotated = torch.zeros(tokens, kv_heads, group, dv, dtype=torch.float32, device=query.device)
    rows = max(16, min(64, triton.next_power_of_2(max_query * group)))
    _decode_kernel[(lengths.numel(), kv_heads, -(-max_query * group // rows))](
        transformed, cache, cache.view(torch.float16), block_table, lengths, query_start,
        params.layer.sink_key, params.layer.sink_value, rotated,
        cache.stride(0), cache.stride(1), block_table.stride(0), kv_heads, scale, soft_cap, window,
        D=d, DV=dv, PS=layout.block_size, GROUP=group, ROWS=rows,
        KPAD=max(16, triton.next_power_of_2(d // 2)), VPAD=max(16, triton.next_power_of_2(dv // 2)),
    )  # fmt: skip
    out = rotated @ params.value_inverse + params.layer.value_centre[:, None]
    return out.reshape(tokens, heads, dv).to(query.dtype)

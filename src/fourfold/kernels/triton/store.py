"""Quantise and store in Triton: scale search, rounding (plain, or by groups in the metric of the queries), packing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fourfold.kernels.triton.params import TritonParams
from fourfold.layout import PageLayout
from fourfold.quant.codec import transform_key
from fourfold.quant.params import CLIP_APART, middle_clip


@triton.jit
def _round(x, inverse):  # type: ignore[no-untyped-def]
    # to nearest; only exact ties (which need an exact half) may differ from the codec's
    return tl.minimum(tl.maximum(tl.floor(x * inverse + 8.0), 0.0), 15.0)


@triton.jit
def _store_kernel(  # type: ignore[no-untyped-def]
    key, value, slots, cache, scales, feedback,
    page_stride, head_stride, heads,
    D: tl.constexpr, DV: tl.constexpr, PS: tl.constexpr, PAD: tl.constexpr, METRIC: tl.constexpr,
    KEY_CLIP: tl.constexpr, VALUE_CLIP: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """One program a (token, head, key or value); key and value [T, HK, D or DV] float32 are already transformed."""
    token, head, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + token)
    if slot >= 0:
        size = D if which == 0 else DV
        half = size // 2
        i = tl.arange(0, PAD)
        valid = i < half
        row = (key if which == 0 else value) + (token * heads + head) * size
        low = tl.load(row + i, mask=valid, other=0.0)
        high = tl.load(row + half + i, mask=valid, other=0.0)
        peak = tl.maximum(tl.maximum(tl.max(tl.abs(low), 0), tl.max(tl.abs(high), 0)), 1e-8)
        best = peak * 0.0 + 3e38
        middle = KEY_CLIP if which == 0 else VALUE_CLIP
        scale = peak * middle / 7.5
        for n in range(1 if METRIC and which == 0 else 2):
            s = scale if METRIC and which == 0 else peak * (middle + APART - 2 * APART * n) / 7.5
            a = tl.where(valid, low - (_round(low, 1.0 / s) - 7.5) * s, 0.0)
            b = tl.where(valid, high - (_round(high, 1.0 / s) - 7.5) * s, 0.0)
            error = tl.sum(a * a, 0) + tl.sum(b * b, 0)
            scale = tl.where(error < best, s, scale)
            best = tl.minimum(error, best)
        code_low = _round(low, 1.0 / scale)
        code_high = _round(high, 1.0 / scale)
        dot = tl.sum(tl.where(valid, low * (code_low - 7.5) + high * (code_high - 7.5), 0.0), 0)
        den = tl.sum(
            tl.where(valid, (code_low - 7.5) * (code_low - 7.5) + (code_high - 7.5) * (code_high - 7.5), 0.0), 0
        )
        if METRIC and which == 0:
            target_low, target_high = low, high
            for step in range(D):
                e = D - 1 - step
                is_low, is_high = i == e, i + half == e
                wanted = tl.sum(tl.where(is_low, target_low, 0.0), 0) + tl.sum(
                    tl.where(is_high & valid, target_high, 0.0), 0
                )
                code = _round(wanted, 1.0 / scale)
                x = tl.sum(tl.where(is_low, low, 0.0) + tl.where(is_high & valid, high, 0.0), 0)
                missed = x - (code - 7.5) * scale
                code_low, code_high = tl.where(is_low, code, code_low), tl.where(is_high, code, code_high)
                carry = feedback + (head * D + e) * D
                target_low += missed * tl.load(carry + i, mask=valid, other=0.0)
                target_high += missed * tl.load(carry + half + i, mask=valid, other=0.0)
        fitted = scale if METRIC and which == 0 else tl.maximum(dot / den, 0.0)
        page = (slot // PS) * page_stride + head * head_stride
        codes = 0 if which == 0 else PS * (D // 2)
        packed = code_low.to(tl.uint8) | (code_high.to(tl.uint8) << 4)
        tl.store(cache + page + codes + (slot % PS) * half + i, packed, mask=valid)
        at = page + PS * (D // 2 + DV // 2) + which * 2 * PS
        tl.store(scales + at // 2 + slot % PS, fitted.to(tl.float16))


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    layout: PageLayout,
    params: TritonParams,
) -> None:
    """As ``fourfold.kernels.cuda.store.store``, any float dtype."""
    tokens, layer = slots.numel(), params.layer
    first = (positions == 0)[:, None, None]
    k = (transform_key(key[:tokens], layer) - torch.where(first, layer.sink_key, 0.0)).contiguous()
    rotated = (value[:tokens].to(torch.float32) - layer.value_centre) @ params.value_matrix
    v = (rotated - torch.where(first, layer.sink_value, 0.0)).contiguous()
    metric = layer.query_factor.numel() > 0
    _store_kernel[(tokens, layout.num_kv_heads, 2)](
        k, v, slots, cache, cache.view(torch.float16),
        params.feedback if metric else k,
        cache.stride(0), cache.stride(1), layout.num_kv_heads,
        D=layout.head_size, DV=layout.head_size_v, PS=layout.block_size,
        PAD=triton.next_power_of_2(max(layout.k_row, layout.v_row)), METRIC=metric,
        KEY_CLIP=middle_clip(layout.head_size), VALUE_CLIP=middle_clip(layout.head_size_v), APART=CLIP_APART,
    )  # fmt: skip

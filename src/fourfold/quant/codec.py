"""The 4-bit codec in PyTorch: transformed rows to codes and scales and back, and both to and from a page.

This is the definition.  The kernels produce the same codes, up to values that lie within float32 rounding of the middle
between two codes.
"""

from __future__ import annotations

import itertools

import torch

from fourfold.layout import LEVELS, ZERO_POINT, PageLayout
from fourfold.quant.params import LayerParams, clips


def quantise(x: torch.Tensor, params: LayerParams | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale of each row.

    Args:
        x: [..., D] float, transformed values, or with ``params`` transformed keys [T, HK, D].
        params: round in the metric of the layer's queries (``LayerParams.query_factor``), a group of elements
            at a time; None for plain rounding.

    Returns:
        codes [..., D] uint8 in 0..15 and scale [...] float16; ``(codes - 7.5) * scale`` is the dequantised row.
        The scale is the better of two clips of the absolute maximum, then fitted by least squares to the codes; in the
        metric it is the middle clip (a search gains nothing there, a fit 1% of the error for twice the work).
    """
    x = x.to(torch.float32)
    peak = x.abs().amax(-1, keepdim=True).clamp_min(1e-8)
    best = torch.full_like(peak, torch.inf)
    scale = peak / ZERO_POINT
    for clip in clips(x.shape[-1]) if params is None else params.key_clips:
        s = peak * clip / ZERO_POINT
        error = (x - (_round(x, s) - ZERO_POINT) * s).square().sum(-1, keepdim=True)
        scale = torch.where(error < best, s, scale)
        best = torch.minimum(error, best)
    if params is None or not params.query_factor.numel():
        codes = _round(x, scale)
        centred = codes - ZERO_POINT
        scale = ((x * centred).sum(-1, keepdim=True) / centred.square().sum(-1, keepdim=True)).clamp_min(0)
    else:
        feedback = params.feedback
        target = x.clone()
        codes = torch.empty_like(x)
        for i in range(x.shape[-1] - 1, -1, -1):
            codes[..., i] = _round(target[..., i], scale[..., 0])
            error = x[..., i] - (codes[..., i] - ZERO_POINT) * scale[..., 0]
            target[..., :i] += error[..., None] * feedback[..., i, :i]
    return codes.to(torch.uint8), scale[..., 0].to(torch.float16)


def _round(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x * (1 / scale) + ZERO_POINT).round().clamp(0, LEVELS - 1)


def dequantise(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[..., D] float32 rows from codes [..., D] and scale [...]."""
    return (codes.to(torch.float32) - ZERO_POINT) * scale.to(torch.float32)[..., None]


def transform_key(key: torch.Tensor, params: LayerParams) -> torch.Tensor:
    """k' of keys [T, HK, D]: [T, HK, D] float32 (without the sink centre)."""
    return torch.einsum("thd,hde->the", key.to(torch.float32) - params.key_centre, params.key_matrix)


def transform_value(value: torch.Tensor, params: LayerParams) -> torch.Tensor:
    """v' of values [T, HK, Dv]: [T, HK, Dv] float32 (without the sink centre)."""
    return (value.to(torch.float32) - params.value_centre) @ params.value_matrix


def transformed(
    key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, params: LayerParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """What codes hold of new tokens: k' and v', less position 0's own centre; as ``encode``, float32."""
    first = (positions == 0)[:, None, None]
    return (
        transform_key(key, params) - torch.where(first, params.sink_key, 0.0),
        transform_value(value, params) - torch.where(first, params.sink_value, 0.0),
    )


def encode(
    key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, params: LayerParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key codes, key scales, value codes, value scales of new tokens.

    Args:
        key: [T, HK, D]; value: [T, HK, Dv]; positions: [T] position of each token in its sequence.
    """
    k, v = transformed(key, value, positions, params)
    return *quantise(k, params), *quantise(v)


def pack_row(codes: torch.Tensor) -> torch.Tensor:
    """[..., D] codes to [..., D/2] bytes: element j in the low, element j + D/2 in the high nibble."""
    half = codes.shape[-1] // 2
    return codes[..., :half] | (codes[..., half:] << 4)


def unpack_row(row: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_row``."""
    return torch.cat([row & 15, row >> 4], -1)


def page_views(
    cache: torch.Tensor, layout: PageLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a cache [pages, HK, head_page_bytes] uint8: key codes [pages, HK, block, D/2], value codes
    [pages, HK, block, Dv/2], key scales and value scales [pages, HK, block] float16."""
    pages, heads, _ = cache.shape
    block = layout.block_size
    edges = (0, layout.v_codes_offset, layout.k_scales_offset, layout.v_scales_offset, layout.head_page_bytes)
    k, v, ks, vs = (cache[..., a:b] for a, b in itertools.pairwise(edges))
    return (
        k.unflatten(-1, (block, layout.k_row)),
        v.unflatten(-1, (block, layout.v_row)),
        ks.view(torch.float16).view(pages, heads, block),
        vs.view(torch.float16).view(pages, heads, block),
    )


def stored_rows(cache: torch.Tensor, layout: PageLayout, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, HK, D] and [T, HK, Dv] float32: what the slots [T] hold of ``transformed`` keys and values."""
    page, slot = slots // layout.block_size, slots % layout.block_size
    k, v, ks, vs = (view[page, :, slot] for view in page_views(cache, layout))
    return dequantise(unpack_row(k), ks), dequantise(unpack_row(v), vs)


def stored_errors(
    cache: torch.Tensor,
    layout: PageLayout,
    slots: torch.Tensor,
    exact: tuple[torch.Tensor, torch.Tensor],
    params: LayerParams,
) -> tuple[float, float]:
    """‖stored − exact‖ / ‖exact‖ of keys, in the metric of the queries where there is one, and of values.

    Args:
        exact: what ``transformed`` returns of the tokens in the slots [T].
    """
    errors: list[float] = []
    for rows, truth in zip(stored_rows(cache, layout, slots), exact, strict=True):
        missed, size = rows - truth, truth
        if not errors and params.query_factor.numel():
            missed, size = (torch.einsum("thd,hed->the", x, params.query_factor) for x in (missed, size))
        errors.append(float(missed.norm() / size.norm()))
    return errors[0], errors[1]


def store_tokens(
    cache: torch.Tensor,
    layout: PageLayout,
    slots: torch.Tensor,
    codes: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Write what ``encode`` returned into the slots (negative slots are skipped)."""
    keep = slots >= 0
    page, slot = slots[keep] // layout.block_size, slots[keep] % layout.block_size
    key_codes, key_scales, value_codes, value_scales = codes
    k, v, ks, vs = page_views(cache, layout)
    k[page, :, slot] = pack_row(key_codes[keep])
    v[page, :, slot] = pack_row(value_codes[keep])
    ks[page, :, slot] = key_scales[keep]
    vs[page, :, slot] = value_scales[keep]

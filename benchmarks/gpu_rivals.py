"""What Fourfold's decode is compared with: vLLM's own attention kernels, each on pages of its own format.

A rival is ``(shape, device) -> (relative error against float64 on its own bytes, µs)``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch

from gpu_inputs import Shape
from gpu_timing import error, graph_us

_MODULES = {
    "fa3_bf16": "vllm.vllm_flash_attn",
    "fa3_fp8": "vllm.vllm_flash_attn",
    "turboquant_4bit_nc": "vllm.v1.attention.ops.triton_turboquant_decode",
    "int4_per_token_head": "vllm.v1.attention.ops.int4_per_token_head",
}


@functools.cache
def unavailable(name: str) -> str | None:
    """Why a rival cannot run here, or None."""
    try:
        importlib.import_module(_MODULES[name])
    except Exception as problem:  # a half-installed vLLM fails in many ways
        return f"{type(problem).__name__}: {problem}"
    return None


def _tables(shape: Shape, device: torch.device, page_bytes: int) -> tuple[list[torch.Tensor], int]:
    """Block tables of several input sets, and the pages they need."""
    each = shape.batch * -(-shape.context // shape.block_size)
    sets = max(1, min(64, (400 << 20) // (each * page_bytes)))
    order = torch.randperm(each * sets, device=device).int()
    return [order[i * each : (i + 1) * each].view(shape.batch, -1).contiguous() for i in range(sets)], each * sets


def _dense(pages: torch.Tensor, table: torch.Tensor, shape: Shape) -> torch.Tensor:
    """[context, HK, D] float64 of one sequence."""
    return pages[table.long()].double().reshape(-1, shape.kv_heads, shape.head_size)[: shape.context]


def _exact(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Last sequence's outputs [n, H, D] float64."""
    n = 1 + shape.drafts
    grouped = query[-n:].double().view(n, shape.kv_heads, -1, shape.head_size)
    scores = torch.einsum("nhgd,lhd->nhgl", grouped, keys) * shape.head_size**-0.5
    position = torch.arange(shape.context - n, shape.context, device=query.device)
    hidden = torch.arange(shape.context, device=query.device)[None] > position[:, None]
    scores.masked_fill_(hidden[:, None, None], -torch.inf)
    return torch.einsum("nhgl,lhd->nhgd", torch.softmax(scores, -1), values).reshape(n, shape.heads, shape.head_size)


def _flash_attention(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    n = 1 + shape.drafts
    width = torch.empty(0, dtype=dtype).element_size()
    tables, pages = _tables(shape, device, shape.block_size * shape.kv_heads * shape.head_size * 2 * width)
    size = (pages, shape.block_size, shape.kv_heads, shape.head_size)
    keys, values = (torch.empty(size, dtype=torch.bfloat16, device=device).normal_().to(dtype) for _ in range(2))
    query = torch.randn(shape.batch * n, shape.heads, shape.head_size, device=device).to(dtype)
    start = torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * n
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
    out = torch.empty(query.shape, dtype=torch.bfloat16, device=device)
    scales = torch.ones(shape.batch, shape.kv_heads, device=device) if width == 1 else None
    best = float("inf")
    for splits in (0, 32):  # its heuristic; what vLLM passes when it captures graphs
        metadata = get_scheduler_metadata(
            shape.batch, n, shape.context, shape.heads, shape.kv_heads, shape.head_size, lengths, qkv_dtype=dtype,
            cu_seqlens_q=start, page_size=shape.block_size, causal=True, num_splits=splits,
        )  # fmt: skip

        def call(table: torch.Tensor, metadata: torch.Tensor = metadata, splits: int = splits) -> None:
            flash_attn_varlen_func(
                q=query, k=keys, v=values, out=out, cu_seqlens_q=start, max_seqlen_q=n, seqused_k=lengths,
                max_seqlen_k=shape.context, softmax_scale=shape.head_size**-0.5, causal=True, block_table=table,
                scheduler_metadata=metadata, num_splits=splits, fa_version=3, q_descale=scales, k_descale=scales,
                v_descale=scales,
            )  # fmt: skip

        call(tables[0])
        expected = _exact(query, *(_dense(x, tables[0][-1], shape) for x in (keys, values)), shape)
        wrong = error(out[-n:], expected)
        best = min(best, graph_us([functools.partial(call, t) for t in tables]))
    return wrong, best


def _turboquant(shape: Shape, device: torch.device) -> tuple[float, float]:
    """Time only, with identity rotation and a made-up table; its outputs are compared with nothing: error 0."""
    from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention

    slot = shape.head_size // 2 + 2 + shape.head_size // 2 + 4
    tables, pages = _tables(shape, device, shape.block_size * shape.kv_heads * slot)
    cache = torch.randint(0, 255, (pages, shape.block_size, shape.kv_heads, slot), device=device, dtype=torch.uint8)
    half = shape.head_size // 2
    one = torch.tensor([0x00, 0x3C], dtype=torch.uint8, device=device)
    cache[..., half : half + 2] = one
    cache[..., 2 * half + 2 : 2 * half + 4] = one
    cache[..., 2 * half + 4 :] = 0
    query = torch.randn(shape.batch, shape.heads, shape.head_size, device=device).bfloat16()
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
    identity, centroids = torch.eye(shape.head_size, device=device), torch.linspace(-0.2, 0.2, 16, device=device)

    def call(table: torch.Tensor) -> None:
        triton_turboquant_decode_attention(
            query,
            cache,
            table,
            lengths,
            identity,
            centroids,
            shape.head_size**-0.5,
            4,
            half + 2,
            4,
            False,
            True,
            identity,
        )

    return 0.0, graph_us([functools.partial(call, t) for t in tables])


def _int4(shape: Shape, device: torch.device) -> tuple[float, float]:
    """Pages written by vLLM's own store; the error is against attention on what was stored, so its quantiser's."""
    from vllm.v1.attention.backends.triton_attn import MIN_LAUNCH_GRID_SIZE_2D, NUM_PAR_SOFTMAX_SEGMENTS
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
        triton_reshape_and_cache_flash_per_token_head_quant,
    )
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    n, row = 1 + shape.drafts, shape.head_size // 2 + 4
    tables, pages = _tables(shape, device, shape.block_size * shape.kv_heads * 2 * row)
    cache = torch.zeros(pages, 2, shape.block_size, shape.kv_heads, row, dtype=torch.uint8, device=device)
    scales = cache.view(torch.float32)[..., -1]
    size = (pages, shape.block_size, shape.kv_heads, shape.head_size)
    keys, values = (torch.empty(size, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
    triton_reshape_and_cache_flash_per_token_head_quant(
        keys.flatten(0, 1), values.flatten(0, 1), cache[:, 0], cache[:, 1], scales[:, 0], scales[:, 1],
        torch.arange(pages * shape.block_size, device=device), kv_quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD,
    )  # fmt: skip
    query = torch.randn(shape.batch * n, shape.heads, shape.head_size, device=device).bfloat16()
    start = torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * n
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
    out = torch.empty_like(query)
    threshold = MIN_LAUNCH_GRID_SIZE_2D // shape.kv_heads
    segments = (threshold, shape.heads, NUM_PAR_SOFTMAX_SEGMENTS)
    partial = torch.empty(*segments, shape.head_size, device=device)
    top, total = torch.empty(segments, device=device), torch.empty(segments, device=device)

    def call(table: torch.Tensor) -> None:
        unified_attention(
            q=query, k=cache[:, 0], v=cache[:, 1], out=out, cu_seqlens_q=start, max_seqlen_q=n, seqused_k=lengths,
            max_seqlen_k=shape.context, softmax_scale=shape.head_size**-0.5, causal=True, window_size=(-1, -1),
            block_table=table, softcap=0, q_descale=None, k_descale=None, v_descale=None, seq_threshold_3D=threshold,
            num_par_softmax_segments=NUM_PAR_SOFTMAX_SEGMENTS, softmax_segm_output=partial, softmax_segm_max=top,
            softmax_segm_expsum=total, kv_quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD, k_scale_cache=scales[:, 0],
            v_scale_cache=scales[:, 1],
        )  # fmt: skip

    call(tables[0])
    wrong = error(out[-n:], _exact(query, *(_dense(x, tables[0][-1], shape) for x in (keys, values)), shape))
    del keys, values
    return wrong, graph_us([functools.partial(call, t) for t in tables])


RIVALS: dict[str, Callable[[Shape, torch.device], tuple[float, float]]] = {
    "fa3_bf16": lambda shape, device: _flash_attention(shape, device, torch.bfloat16),
    "fa3_fp8": lambda shape, device: _flash_attention(shape, device, torch.float8_e4m3fn),
    "turboquant_4bit_nc": _turboquant,
    "int4_per_token_head": _int4,
}
"""By the name of their column."""

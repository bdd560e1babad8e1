"""LayerParams in the order that the kernels' matrix units read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from fourfold.quant.params import LayerParams
from fourfold.quant.rotation import hadamard


def chunks(size: int) -> int:
    """Chunks of 32 elements that hold a row."""
    return (size + 31) // 32


def pack_matrix(matrix: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Operand order of project.h.

    Args:
        matrix: [heads, K, C] float.
        columns: [tiles * 8] column of ``matrix`` that each output column takes, -1 for zeros.

    Returns:
        [heads, tiles, chunks of 32 rows, 32 lanes, 8]: lane 4 g + q of tile j holds rows 32 c + 8 q .. + 7 of
        output column 8 j + g.
    """
    heads, rows, _ = matrix.shape
    n_chunks, tiles = chunks(rows), columns.numel() // 8
    picked = matrix[:, :, columns.clamp_min(0)] * (columns >= 0)
    padded = torch.zeros(heads, n_chunks * 32, tiles * 8, dtype=matrix.dtype, device=matrix.device)
    padded[:, :rows] = picked
    # [heads, chunk, q, 8, tile, g] -> [heads, tile, chunk, g, q, 8]
    split = padded.view(heads, n_chunks, 4, 8, tiles, 8)
    return split.permute(0, 4, 1, 5, 2, 3).reshape(heads, tiles, n_chunks, 32, 8).contiguous()


def operand_order(size: int) -> torch.Tensor:
    """Element of a key that each position of decode.cu's query operand holds, -1 for padding: [32 chunks].

    Position 32 c + 8 q + 4 h + 2 b + x belongs to byte 16 c + 4 q + 2 x + h of a row, low nibble for b = 0.
    """
    p = torch.arange(32 * chunks(size))
    c, q, h, b, x = p // 32, p // 8 % 4, p // 4 % 2, p // 2 % 2, p % 2
    byte = 16 * c + 4 * q + 2 * x + h
    return torch.where(byte < size // 2, byte + b * (size // 2), -1)


def query_columns(size: int) -> torch.Tensor:
    """Position of the query operand that each output column of query.cu is: lane q of a quad writes a quarter."""
    n = 32 * chunks(size)
    column = torch.arange(n)
    tile, g = column // 8, column % 8
    return (n // 4) * (g // 2) + 2 * tile + g % 2


@dataclass(frozen=True, slots=True)
class PackedParams:
    """One layer's quantiser on the GPU.

    Attributes:
        dtype: float16 or bfloat16, of activations and matrices.
        wq, wk: packed per KV head; wv, wo: packed once for all heads.  wk and wv: the blocks of ``outer_blocks``.
        key_bias, value_bias: [2, HK, 2 D or 2 Dv] float32, added to k Wk and v R, see ``pack_bias``.
        outer_k, outer_v: rows of the outer Hadamard matrices.
        value_centre: [HK, Dv] float32.
        sink_key: [HK, 32 chunks] float32 in the query operand's order; sink_value: [HK, Dv] float32.
        sink: whether position 0 has its own centre.
        factor: the metric of the queries for store.cu (empty without), see ``pack_factor``.
    """

    dtype: torch.dtype
    wq: torch.Tensor
    wk: torch.Tensor
    wv: torch.Tensor
    wo: torch.Tensor
    key_bias: torch.Tensor
    value_bias: torch.Tensor
    value_centre: torch.Tensor
    sink_key: torch.Tensor
    sink_value: torch.Tensor
    factor: torch.Tensor
    outer_k: int
    outer_v: int
    sink: bool
    head_size: int
    head_size_v: int
    kv_heads: int

    metric_keys: bool = field(init=False)
    """Whether keys are rounded in the metric of the queries."""
    store_addresses: tuple[int, ...] = field(init=False)
    """wk, wv, the biases and the metric's table, as store.cu takes them."""

    sink_addresses: tuple[int, int] = field(init=False)
    """sink_key and sink_value, or null, as query.cu and merge.cu take them."""

    def __post_init__(self) -> None:
        sinks = (self.sink_key.data_ptr(), self.sink_value.data_ptr()) if self.sink else (0, 0)
        object.__setattr__(self, "sink_addresses", sinks)
        tables = (self.wk, self.wv, self.key_bias, self.value_bias, self.factor)
        object.__setattr__(self, "metric_keys", self.factor.numel() > 0)
        object.__setattr__(self, "store_addresses", tuple(t.data_ptr() for t in tables))


def pack_factor(params: LayerParams) -> torch.Tensor:
    """Table of the rounding in the metric of the queries; empty without.

    Returns:
        [HK, D / 16 pairs of tiles, D / 16 blocks, 32 lanes, 8] float16: of ``LayerParams.feedback`` transposed, lane
        4 g + q of pair b and block k holds columns 16 k + 2 q, + 1, + 8, + 9 of row 16 b + g, then of row 16 b + 8 + g.
    """
    if not params.query_factor.numel():
        return torch.zeros(0)
    factor = params.feedback.transpose(1, 2)
    heads, size, _ = factor.shape
    # [head, pair, i, g, block, b, q, x] -> [head, pair, block, g, q, i, b, x]
    split = factor.reshape(heads, size // 16, 2, 8, size // 16, 2, 4, 2).permute(0, 1, 4, 3, 6, 2, 5, 7)
    return split.reshape(heads, size // 16, size // 16, 32, 8).to(torch.float16).contiguous()


def pack_params(params: LayerParams, dtype: torch.dtype, device: torch.device | str) -> PackedParams:
    """Round the matrices to ``dtype``, fold the centres into biases with the same rounding, and reorder."""
    params = params.to("cpu")
    d, dv = params.head_size, params.head_size_v
    wk = params.key_matrix.to(dtype)
    wv = params.value_matrix.to(dtype)[None]
    wo = params.value_matrix.T.contiguous().to(dtype)[None]
    order = operand_order(d)
    columns = order[query_columns(d)]
    nibble = torch.where(torch.arange(32 * chunks(d)) // 2 % 2 == 1, 16.0, 1.0)[query_columns(d)]
    picked = params.query_matrix.to(dtype)[:, :, columns.clamp_min(0)] * (columns >= 0)
    wq = pack_matrix((picked / nibble).to(dtype), torch.arange(columns.numel()))
    outer_k, outer_v = outer_size(wk), outer_size(wv)
    key_bias = -torch.einsum("hd,hde->he", params.key_centre, wk.float())
    value_bias = -params.value_centre @ wv[0].float()
    operand_nibble = torch.where(torch.arange(order.numel()) // 2 % 2 == 1, 16.0, 1.0)
    sink_key = params.sink_key[:, order.clamp_min(0)] * (order >= 0) * operand_nibble
    return PackedParams(
        factor=pack_factor(params).to(device),
        dtype=dtype,
        wq=wq.to(device),
        wk=pack_matrix(outer_blocks(wk, outer_k), torch.arange(d // outer_k)).to(device),
        wv=pack_matrix(outer_blocks(wv, outer_v), torch.arange(dv // outer_v)).to(device),
        wo=pack_matrix(wo, torch.arange(dv)).to(device),
        key_bias=pack_bias(key_bias, params.sink_key, outer_k).to(device),
        value_bias=pack_bias(value_bias, params.sink_value, outer_v).to(device),
        outer_k=outer_k,
        outer_v=outer_v,
        value_centre=params.value_centre.contiguous().to(device),
        sink_key=sink_key.contiguous().to(device),
        sink_value=params.sink_value.contiguous().to(device),
        sink=bool(params.sink_key.any() or params.sink_value.any()),
        head_size=d,
        head_size_v=dv,
        kv_heads=params.kv_heads,
    )


def outer_size(matrix: torch.Tensor) -> int:
    """Rows of the largest Hadamard matrix H such that each [K, K] of ``matrix`` is diag(M_0, M_1, …) (H ⊗ I), with
    blocks M of whole chunks of 32; 1 if there is none.  Row-scaled rotations of a power of two have one."""
    size = matrix.shape[-1]
    outer = 1
    while size % (64 * outer) == 0:
        wide = size // (2 * outer)
        signs = hadamard(2 * outer).sign().to(matrix)
        blocks = matrix.unflatten(-1, (2 * outer, wide)).unflatten(-3, (2 * outer, wide))  # [.., a, row, b, column]
        if not torch.equal(blocks, blocks[..., :1, :] * signs[:, None, :, None]):
            break
        outer *= 2
    return outer


def outer_blocks(matrix: torch.Tensor, outer: int) -> torch.Tensor:
    """[heads, K, K] to [heads * outer, K / outer, K / outer]: the M of ``outer_size``."""
    wide = matrix.shape[-1] // outer
    return matrix[..., :wide].reshape(-1, wide, wide)


def pack_bias(bias: torch.Tensor, sink: torch.Tensor, outer: int) -> torch.Tensor:
    """[2, HK, 2 D] float32: ``bias``, and at position 0 ``bias - sink`` (both [HK, D]), as store.cu adds them.

    That is before the outer Hadamard matrix, elements 2 q and 2 q + 1 of a tile of 8 twice for lane q.
    """
    both = torch.stack([bias, bias - sink])
    turned = torch.einsum("shae,ab->shbe", both.unflatten(-1, (outer, -1)), hadamard(outer).sign().to(bias) / outer)
    return turned.reshape(*both.shape[:2], -1, 1, 2).repeat(1, 1, 1, 2, 1).flatten(2).contiguous()


QUERY_GAIN = 16.0
"""Power of two that keeps small queries out of fp16's denormals; undone by decode.cu's ``k_factor``."""


def query_scale(scale: float) -> float:
    """Factor of query.cu: softmax scale, log2(e) and the gain."""
    return scale * math.log2(math.e) * QUERY_GAIN

"""Random 4-bit pages, and the attention over them in float64 that kernels are checked against before they are timed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fourfold.layout import PageLayout
from fourfold.quant.codec import dequantise, page_views, unpack_row
from fourfold.quant.params import LayerParams, identity_params


@dataclass(frozen=True)
class Shape:
    """``batch`` sequences of ``context`` tokens, query and KV heads, ``drafts`` extra query tokens a sequence."""

    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    drafts: int = 0

    @property
    def layout(self) -> PageLayout:
        return PageLayout(self.block_size, self.kv_heads, self.head_size, self.head_size)

    @property
    def bytes_4bit(self) -> int:
        """Codes and scales that one call must read."""
        return self.batch * self.context * self.layout.bytes_per_token

    @property
    def bytes_bf16(self) -> int:
        return self.batch * self.context * self.kv_heads * self.head_size * 4


class Pages:
    """A pool of random pages and as many block tables as it takes to exceed ``cold`` bytes."""

    def __init__(self, shape: Shape, device: torch.device, cold: int = 400 << 20, most_sets: int = 64) -> None:
        layout = shape.layout
        a_sequence = -(-shape.context // shape.block_size)
        need = shape.batch * a_sequence
        pages = max(need, cold // layout.page_bytes)
        generator = torch.Generator(device).manual_seed(1)
        size = (pages, layout.num_kv_heads, layout.head_page_bytes)
        self.cache = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
        for view in page_views(self.cache, layout)[2:]:
            view.copy_(torch.rand(view.shape, device=device, generator=generator) * 0.1 + 0.2)
        self.tables = []
        sets = max(1, min(most_sets, pages // need))
        order = torch.randperm(pages, device=device, generator=generator)
        for i in range(sets):
            self.tables.append(order[i * need : (i + 1) * need].view(shape.batch, a_sequence).int().contiguous())
        self.lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
        query = 1 + shape.drafts
        self.query_start = torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * query
        self.query = torch.randn(
            shape.batch * query, shape.heads, shape.head_size, device=device, generator=generator
        ).bfloat16()


def sequence_rows(
    pages: Pages, shape: Shape, table: torch.Tensor, params: LayerParams, length: int
) -> list[torch.Tensor]:
    """Transformed keys and values [length, HK, D] float64 of one sequence, sink centre included."""
    k, v, ks, vs = page_views(pages.cache, shape.layout)
    pages_used = table[: -(-length // shape.block_size)].long()
    rows = []
    for codes, scale, sink in ((k, ks, params.sink_key), (v, vs, params.sink_value)):
        x = dequantise(unpack_row(codes[pages_used]), scale[pages_used]).double()
        x = x.permute(0, 2, 1, 3).reshape(-1, shape.kv_heads, shape.head_size)[:length].clone()
        x[0] += sink.double()
        rows.append(x)
    return rows


def reference(
    pages: Pages, shape: Shape, sequence: int, table: torch.Tensor, params: LayerParams, scale: float,
    *, soft_cap: float = 0.0, window: int = 0, length: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Outputs [1 + drafts, H, D] float64 of one sequence."""
    length = shape.context if length is None else length
    n = 1 + shape.drafts
    keys, values = sequence_rows(pages, shape, table[sequence], params, length)
    group = shape.heads // shape.kv_heads
    query = pages.query.view(-1, n, shape.kv_heads, group, shape.head_size)[sequence].double()
    query = torch.einsum("nhgd,hde->nhge", query, params.query_matrix.double())
    scores = torch.einsum("nhge,lhe->nhgl", query, keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(length - n, length, device=keys.device)[:, None]
    token = torch.arange(length, device=keys.device)[None]
    hidden = token > position
    if window:
        hidden |= token <= position - window
    scores.masked_fill_(hidden[:, None, None], -math.inf)
    out = torch.einsum("nhgl,lhe->nhge", torch.softmax(scores, -1), values)
    out = out @ params.value_matrix.double().to(keys.device).T + params.value_centre.double()[None, :, None]
    return out.reshape(n, shape.heads, shape.head_size)


def random_params(shape: Shape, device: torch.device, sink: bool = True, metric: bool = True) -> LayerParams:
    """A rotation with a diagonal balance and non-zero centres, as calibration makes them."""
    generator = torch.Generator().manual_seed(2)
    plain = identity_params(shape.kv_heads, shape.head_size, shape.head_size)
    size = (shape.kv_heads, shape.head_size)
    factor = torch.zeros(0)
    if metric:  # as correlated as the queries of a real layer
        queries = torch.randn(shape.kv_heads, 4 * shape.head_size, shape.head_size, generator=generator)
        queries = queries * torch.exp(torch.randn(shape.head_size, generator=generator)) @ plain.query_matrix
        factor = torch.linalg.cholesky(queries.transpose(1, 2) @ queries).transpose(1, 2).contiguous()
    balance = torch.exp(0.3 * torch.randn(size, generator=generator))[..., None]
    return LayerParams(
        key_centre=torch.randn(size, generator=generator) * 4,
        key_matrix=plain.key_matrix * balance,
        query_matrix=plain.query_matrix / balance,
        value_centre=torch.randn(size, generator=generator),
        sink_key=torch.randn(size, generator=generator) * (2.0 if sink else 0.0),
        sink_value=torch.randn(size, generator=generator) * (1.0 if sink else 0.0),
        query_factor=factor,
    ).to(device)

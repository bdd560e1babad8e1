"""Inputs for the GPU kernels' tests and what the oracle says about them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from fourfold.kernels.reference import attend
from fourfold.layout import PageLayout
from fourfold.quant import codec
from fourfold.quant.codec import page_views
from fourfold.quant.params import LayerParams, identity_params


def make_params(
    kv_heads: int, head_size: int, head_size_v: int, *, sink: bool, metric: bool, dense: bool = False
) -> LayerParams:
    """A balanced rotation with centres, as calibration makes; with ``metric`` also a factor of correlated queries.
    ``dense``: a rotation of keys that is no Hadamard matrix."""
    generator = torch.Generator().manual_seed(3)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    plain = identity_params(kv_heads, head_size, head_size_v)
    balance = torch.exp(0.3 * normal(kv_heads, head_size))[..., None]
    if dense:
        turn = torch.linalg.qr(normal(kv_heads, head_size, head_size))[0].contiguous()
        plain = replace(plain, key_matrix=turn, query_matrix=turn)
    factor = torch.zeros(0)
    if metric:
        queries = normal(kv_heads, 4 * head_size, head_size) * torch.exp(0.7 * normal(head_size))
        queries = queries @ plain.query_matrix
        factor = torch.linalg.cholesky(queries.transpose(1, 2) @ queries).transpose(1, 2).contiguous()
    return LayerParams(
        key_centre=normal(kv_heads, head_size) * 3,
        key_matrix=plain.key_matrix * balance,
        query_matrix=plain.query_matrix / balance,
        value_centre=normal(kv_heads, head_size_v),
        sink_key=normal(kv_heads, head_size) * (2.0 if sink else 0.0),
        sink_value=normal(kv_heads, head_size_v) * (1.0 if sink else 0.0),
        query_factor=factor,
    )


@dataclass
class Batch:
    """Sequences in random pages; every slot that no token uses holds NaN scales and random codes."""

    layout: PageLayout
    lengths: list[int]
    queries: list[int]
    heads: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        layout, generator = self.layout, torch.Generator().manual_seed(4)
        needed = [-(-n // layout.block_size) for n in self.lengths]
        most = max(1, *needed)
        total = sum(needed) + 3
        order = torch.randperm(total, generator=generator).tolist()
        self.cache = torch.randint(
            0, 256, (total, layout.num_kv_heads, layout.head_page_bytes), dtype=torch.uint8, generator=generator
        )
        scales = page_views(self.cache, layout)[2:]
        for view in scales:
            view.fill_(float("nan"))
        self.table = torch.zeros(len(self.lengths), most, dtype=torch.int32)
        for b, n in enumerate(self.lengths):
            for page in range(needed[b]):
                self.table[b, page] = index = order.pop()
                used = min(layout.block_size, n - page * layout.block_size)
                for view in scales:
                    size = (layout.num_kv_heads, used)
                    view[index, :, :used] = torch.rand(size, generator=generator) * 0.2 + 0.1
        self.query_start = torch.tensor([0, *np.cumsum(self.queries)], dtype=torch.int32)
        tokens = sum(self.queries)
        self.query = torch.randn(tokens, self.heads, layout.head_size, generator=generator).to(self.dtype)

    def oracle(self, params: LayerParams, scale: float, soft_cap: float = 0.0, window: int = 0) -> torch.Tensor:
        """[tokens, H, Dv] float64; zeros for sequences of length 0."""
        layout = self.layout
        out = torch.zeros(*self.query.shape[:2], layout.head_size_v, dtype=torch.float64)
        for b, n in enumerate(self.lengths):
            rows = slice(int(self.query_start[b]), int(self.query_start[b + 1]))
            if n == 0:
                continue
            out[rows] = torch.from_numpy(
                attend(
                    self.query[rows].double().numpy(),
                    self.cache.numpy(),
                    self.table[b].tolist(),
                    n,
                    block_size=layout.block_size,
                    scale=scale,
                    query_matrix=params.query_matrix.double().numpy(),
                    value_inverse=params.value_matrix.double().T.numpy(),
                    value_centre=params.value_centre.double().numpy(),
                    sink_key=params.sink_key.double().numpy(),
                    sink_value=params.sink_value.double().numpy(),
                    soft_cap=soft_cap,
                    window=window,
                )
            )
        return out


class StoreCase:
    """150 tokens in random slots, one slot negative, one value zero, and what the codec makes of them."""

    def __init__(self, head_size: int, block: int, dtype: torch.dtype, *, metric: bool, dense: bool) -> None:
        self.layout, self.metric, tokens = PageLayout(block, 3, head_size, head_size), metric, 150
        self.params = params = make_params(3, head_size, head_size, sink=True, metric=metric, dense=dense)
        generator = torch.Generator().manual_seed(6)
        key, value = (torch.randn(tokens, 3, head_size, generator=generator) for _ in range(2))
        self.key, self.value = (key + params.key_centre).to(dtype), (value + params.value_centre).to(dtype)
        self.value[3] = 0
        self.slots = torch.randperm(256, generator=generator)[:tokens]
        self.slots[7] = -1
        self.positions = torch.arange(tokens) % 40
        self.want = torch.zeros(256 // block, 3, self.layout.head_page_bytes, dtype=torch.uint8)
        codes = codec.encode(self.key, self.value, self.positions, params)
        codec.store_tokens(self.want, self.layout, self.slots, codes)

    def check(self, got: torch.Tensor) -> None:
        """Nearly all bytes are the codec's; rows that differ (matrices are rounded to the dtype) are no worse."""
        layout, params, block = self.layout, self.params, self.layout.block_size
        kept = self.slots >= 0
        page, slot = self.slots[kept] // block, self.slots[kept] % block
        unused = torch.ones(256 // block, block, dtype=torch.bool)
        unused[page, slot] = False
        for view in page_views(got, layout):
            assert (view.transpose(1, 2)[unused] == 0).all()
        exact = codec.transformed(self.key[kept], self.value[kept], self.positions[kept], params)
        errors, least = (codec.stored_errors(c, layout, self.slots[kept], exact, params) for c in (got, self.want))
        assert errors[0] < least[0] * 1.01
        assert errors[1] < least[1] * 1.01
        # in the metric a code that falls the other way (matrices are rounded) changes the codes after it
        assert (got == self.want).float().mean() > (0.93 if self.metric else 0.97)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """‖out − expected‖ / ‖expected‖; NaN if any element is."""
    return ((out.double().cpu() - expected).norm() / expected.norm()).item()

"""Before it serves, the engine quantises and attends a few tokens of each layer shape and compares with the oracle and,
what it has stored, with the codec."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fourfold.errors import FourfoldError
from fourfold.kernels import reference
from fourfold.layout import PageLayout
from fourfold.quant import codec
from fourfold.quant.params import LayerParams
from fourfold.vllm_plugin.attention import FourfoldImpl

TOKENS = 37
LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest accepted relative error; float32 is the kernels' own, the others are the rounding of the output's dtype."""
STORE_LIMIT = 1.5
"""Largest accepted error of stored rows, in those of the codec: the kernels' is within 2%, a wrong one far off."""


def check(impls: Sequence[FourfoldImpl], dtype: torch.dtype, block: int = 16) -> float:
    """Largest relative error over one layer of each shape, in pages of ``block`` tokens.

    Raises:
        FourfoldError: when a kernel and the oracle disagree on the same bytes, or the stored bytes are not worth it.
    """
    if dtype not in LIMITS:
        raise FourfoldError(f"4-bit pages do not support {dtype} activations", fix="pass --dtype bfloat16 or float32")
    worst = 0.0
    seen = set()
    for impl in impls:
        assert impl.params is not None
        shape = (
            impl.num_heads, impl.num_kv_heads, impl.head_size, impl.params.head_size_v, impl.sliding_window,
            impl.logits_soft_cap,
        )  # fmt: skip
        if shape in seen:
            continue
        seen.add(shape)
        error = _one(impl, dtype, block)
        if not error <= LIMITS[dtype]:
            raise FourfoldError(
                f"the self-check of a layer with {impl.num_heads}/{impl.num_kv_heads} heads of {impl.head_size} failed",
                why=f"kernel and reference differ by {error:.1e} on the same bytes (limit {LIMITS[dtype]:.0e})",
                fix="clear the compiled kernels in the cache folder; if it persists, report processor and compiler",
            )
        worst = max(worst, error)
    return worst


def _stored(
    params: LayerParams,
    layout: PageLayout,
    cache: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> float:
    """Error of the stored keys or values over that of what the codec makes of them, the larger of both."""
    positions = torch.arange(len(slots))
    wanted = torch.zeros_like(cache)
    codec.store_tokens(wanted, layout, slots, codec.encode(key, value, positions, params))
    exact = codec.transformed(key, value, positions, params)
    got, least = (codec.stored_errors(pages, layout, slots, exact, params) for pages in (cache, wanted))
    ratios = [one / max(other, 1e-12) for one, other in zip(got, least, strict=True)]
    return float(np.max(ratios))


def _one(impl: FourfoldImpl, dtype: torch.dtype, block: int) -> float:
    params = impl.params
    assert params is not None
    layout = PageLayout(block, impl.num_kv_heads, impl.head_size, params.head_size_v)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    pages = -(-TOKENS // block)
    cache = torch.zeros(pages, impl.num_kv_heads, layout.head_page_bytes, dtype=torch.uint8)
    query = random(TOKENS, impl.num_heads, impl.head_size)
    # about where the calibration says that they are, of a size of 1 once they are transformed
    spread = torch.randn(TOKENS, impl.num_kv_heads, impl.head_size, generator=generator)
    key = (params.key_centre + torch.einsum("thd,hed->the", spread, params.query_matrix)).to(dtype).contiguous()
    value = (params.value_centre + random(TOKENS, impl.num_kv_heads, params.head_size_v)).to(dtype).contiguous()
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32)[None].contiguous()
    position = torch.arange(TOKENS)
    slots = table[0, position // block].long() * block + position % block
    outputs = impl.last_token(layout, query, key, value, cache, table, slots)
    worth = _stored(params, layout, cache, slots, key, value)
    if not worth <= STORE_LIMIT:
        raise FourfoldError(
            f"the self-check of the store for {impl.num_kv_heads} KV heads of {impl.head_size} failed",
            why=f"its errors are {worth:.1f} times those of the codec (limit {STORE_LIMIT})",
            fix="clear the compiled kernels in the cache folder; if it persists, report processor and compiler",
        )
    expected = reference.attend(
        query[-1:].double().numpy(),
        cache.numpy(),
        table[0].tolist(),
        TOKENS,
        block_size=block,
        scale=impl.scale,
        query_matrix=params.query_matrix.double().numpy(),
        value_inverse=params.value_matrix.T.double().numpy(),
        value_centre=params.value_centre.double().numpy(),
        sink_key=params.sink_key.double().numpy(),
        sink_value=params.sink_value.double().numpy(),
        soft_cap=impl.logits_soft_cap or 0.0,
        window=impl.sliding_window or 0,
    )
    return max(float(np.linalg.norm(o.double().numpy() - expected) / np.linalg.norm(expected)) for o in outputs)

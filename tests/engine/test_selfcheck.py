"""The self-check on layers that are right and wrong, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fourfold.errors import FourfoldError
from fourfold.kernels import reference
from fourfold.quant import codec
from fourfold.quant.calibration import Statistics
from fourfold.vllm_plugin import selfcheck


def layer(spoil=None):
    """A layer of 4/2 heads of 64 with a calibration far from zero; ``spoil`` changes what it has stored."""
    generator = torch.Generator().manual_seed(1)
    statistics = Statistics.empty(2, 64, 64)
    for _ in range(3):
        query, key, value = (torch.randn(64, heads, 64, generator=generator) for heads in (4, 2, 2))
        statistics.add(query, key + 50.0, value)
    params = statistics.params()

    def last_token(layout, query, key, value, cache, table, slots):
        positions = torch.arange(len(slots))
        codec.store_tokens(cache, layout, slots, codec.encode(key, value, positions, params))
        if spoil:
            spoil(cache, layout)
        out = reference.attend(
            query[-1:].double().numpy(), cache.numpy(), table[0].tolist(), len(slots), block_size=layout.block_size,
            scale=0.125, query_matrix=params.query_matrix.double().numpy(),
            value_inverse=params.value_matrix.T.double().numpy(), value_centre=params.value_centre.double().numpy(),
            sink_key=params.sink_key.double().numpy(), sink_value=params.sink_value.double().numpy(),
            soft_cap=0.0, window=0,
        )  # fmt: skip
        return [torch.from_numpy(out)]

    return SimpleNamespace(
        params=params, num_heads=4, num_kv_heads=2, head_size=64, sliding_window=0, logits_soft_cap=0.0, scale=0.125,
        last_token=last_token,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_right_layer_passes(dtype):
    assert selfcheck.check([layer()], dtype) < 1e-6


def swap_nibbles(cache, layout):
    keys = codec.page_views(cache, layout)[0]
    keys.copy_(keys >> 4 | keys << 4)


def shrink_values(cache, layout):
    codec.page_views(cache, layout)[3].mul_(0.5)


@pytest.mark.parametrize("spoil", [swap_nibbles, shrink_values])
def test_bytes_that_say_something_else_are_refused(spoil):
    with pytest.raises(FourfoldError, match="self-check of the store"):
        selfcheck.check([layer(spoil)], torch.float32)

"""CPU kernels against the float64 oracle on the same bytes, and against the codec that defines the codes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import FourfoldError
from fourfold.kernels import reference
from fourfold.kernels.cpu.attention import CpuLayer
from fourfold.layout import HEAD_SIZES, PageLayout
from fourfold.quant import codec
from fourfold.quant.params import LayerParams, identity_params

TIGHT = 1e-5


def random_params(kv_heads: int, d: int, dv: int, g: torch.Generator) -> LayerParams:
    """Parameters with every term in use: an invertible matrix, centres, a sink, feedback."""
    base = identity_params(kv_heads, d, dv)
    stretch = torch.exp(0.3 * torch.randn(kv_heads, d, generator=g))
    return replace(
        base,
        key_centre=torch.randn(kv_heads, d, generator=g),
        key_matrix=(base.key_matrix * stretch[:, :, None]).contiguous(),
        query_matrix=(base.query_matrix / stretch[:, :, None]).contiguous(),
        value_centre=torch.randn(kv_heads, dv, generator=g),
        sink_key=3 * torch.randn(kv_heads, d, generator=g),
        sink_value=torch.randn(kv_heads, dv, generator=g),
        query_factor=(torch.eye(d) + 0.1 * torch.randn(kv_heads, d, d, generator=g).triu(1)).contiguous(),
    )


@dataclass
class Batch:
    """Sequences stored in shuffled pages of a cache whose unused bytes are NaN scales."""

    layout: PageLayout
    group: int
    params: LayerParams
    lengths: list[int]
    seed: int = 0

    def __post_init__(self) -> None:
        self.g = torch.Generator().manual_seed(self.seed)
        lay, total = self.layout, sum(self.lengths)
        self.pages = max(1, max(-(-n // lay.block_size) for n in self.lengths))
        count = len(self.lengths) * self.pages + 2
        self.cache = torch.randint(
            0, 256, (count, lay.num_kv_heads, lay.head_page_bytes), dtype=torch.uint8, generator=self.g
        )
        _, _, ks, vs = codec.page_views(self.cache, lay)
        ks.fill_(float("nan"))
        vs.fill_(float("nan"))
        order = torch.randperm(count, generator=self.g)[: len(self.lengths) * self.pages]
        self.table = order.view(len(self.lengths), self.pages).to(torch.int32).contiguous()
        heads = self.group * lay.num_kv_heads
        self.query = torch.randn(total, heads, lay.head_size, generator=self.g)
        self.key = torch.randn(total, lay.num_kv_heads, lay.head_size, generator=self.g) + 1
        self.value = torch.randn(total, lay.num_kv_heads, lay.head_size_v, generator=self.g)
        self.position = torch.cat([torch.arange(n) for n in self.lengths])
        self.sequence = torch.cat([torch.full((n,), i) for i, n in enumerate(self.lengths)])
        self.slots = self.slots_of(self.position)
        self.start = torch.tensor([0, *np.cumsum(self.lengths)], dtype=torch.int32)

    def slots_of(self, position: torch.Tensor) -> torch.Tensor:
        block = self.layout.block_size
        return self.table[self.sequence, position // block].long() * block + position % block

    def layer(self, **options: float | int | bool) -> CpuLayer:
        return CpuLayer(
            self.layout, self.group * self.layout.num_kv_heads, self.layout.head_size**-0.5, self.params, **options
        )

    def run(self, layer: CpuLayer, chunks: list[list[int]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Feed each sequence in chunks (per step, how many new tokens of each sequence); outputs [T, H, Dv]."""
        heads = self.group * self.layout.num_kv_heads
        out = torch.full((sum(self.lengths), heads, self.layout.head_size_v), float("nan"))
        done = [0] * len(self.lengths)
        for step in chunks:
            rows = torch.cat([torch.arange(done[i], done[i] + n) + int(self.start[i]) for i, n in enumerate(step)])
            done = [a + n for a, n in zip(done, step, strict=True)]
            part = torch.full((len(rows), heads, self.layout.head_size_v), float("nan"), dtype=dtype)
            layer.attend(
                self.query[rows].to(dtype), self.key[rows].to(dtype), self.value[rows].to(dtype), self.cache, part,
                query_start=torch.tensor([0, *np.cumsum(step)], dtype=torch.int32),
                seq_lens=torch.tensor(done, dtype=torch.int32), block_table=self.table, slots=self.slots[rows],
            )  # fmt: skip
            out[rows] = part.float()
        assert done == self.lengths
        return out

    def expected(self, rows: int = 3, **options: float | int | bool) -> list[tuple[slice, np.ndarray]]:
        """The oracle's outputs of the last ``rows`` tokens of each sequence, from the bytes in the cache."""
        p, result = self.params, []
        for i, n in enumerate(self.lengths):
            take = min(rows, n)
            if take == 0:
                continue
            where = slice(int(self.start[i]) + n - take, int(self.start[i]) + n)
            result.append((where, reference.attend(
                self.query[where].double().numpy(), self.cache.numpy(), self.table[i].tolist(), n,
                block_size=self.layout.block_size, scale=self.layout.head_size**-0.5,
                query_matrix=p.query_matrix.double().numpy(), value_inverse=p.value_matrix.T.double().numpy(),
                value_centre=p.value_centre.double().numpy(), sink_key=p.sink_key.double().numpy(),
                sink_value=p.sink_value.double().numpy(), **options,
            )))  # fmt: skip
        return result


def batch(d: int, dv: int, kv: int, group: int, block: int, lengths: list[int], seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return Batch(PageLayout(block, kv, d, dv), group, random_params(kv, d, dv, g), lengths, seed)


def error(got: torch.Tensor, want: np.ndarray) -> float:
    return float(np.linalg.norm(got.double().numpy() - want) / np.linalg.norm(want))


def assert_close(b: Batch, out: torch.Tensor, limit: float = TIGHT, **options: float | int | bool) -> None:
    checked = b.expected(**options)
    assert checked
    for where, want in checked:
        assert error(out[where], want) <= limit


@pytest.mark.parametrize("d", HEAD_SIZES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_prefill_and_decode_match_the_oracle(d: int, group: int) -> None:
    block = (16, 32, 48, 64, 128)[group % 5]
    lengths = [0, 1, block - 1, block, block + 1, 2 * block + 5]
    b = batch(d, d, 1 + group % 2, group, block, lengths, seed=group)
    layer = b.layer()
    assert_close(b, b.run(layer, [lengths]))
    # the same tokens once more, the last one of each sequence as a decode step
    last = [min(1, n) for n in lengths]
    again = batch(d, d, 1 + group % 2, group, block, lengths, seed=group)
    out = again.run(again.layer(), [[n - k for n, k in zip(lengths, last, strict=True)], last])
    assert_close(again, out)


@pytest.mark.parametrize(("d", "dv"), [(64, 128), (192, 128), (96, 64), (80, 256)])
def test_keys_and_values_of_different_sizes(d: int, dv: int) -> None:
    b = batch(d, dv, 2, 3, 32, [70, 33], seed=d)
    assert_close(b, b.run(b.layer(), [[40, 33], [30, 0]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_activations(dtype: torch.dtype) -> None:
    b = batch(64, 64, 2, 3, 16, [50, 17])
    b.query, b.key, b.value = (x.to(dtype).float() for x in (b.query, b.key, b.value))
    assert_close(b, b.run(b.layer(), [b.lengths], dtype), limit=4e-3)


@pytest.mark.parametrize("window", [1, 7, 16, 64])
def test_sliding_window(window: int) -> None:
    b = batch(64, 64, 2, 2, 16, [100, 40, 5])
    assert_close(b, b.run(b.layer(window=window), [[60, 40, 5], [40, 0, 0]]), window=window)


def test_soft_cap() -> None:
    b = batch(128, 128, 1, 4, 32, [90, 20])
    assert_close(b, b.run(b.layer(soft_cap=2.5), [[89, 20], [1, 0]]), soft_cap=2.5)


def test_long_context_is_split_and_merged() -> None:
    b = batch(64, 64, 1, 3, 64, [4100, 2047])
    assert_close(b, b.run(b.layer(), [[4099, 2046], [1, 1]]))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_chunk_boundaries_do_not_matter(data: st.DataObject) -> None:
    """Any way of cutting sequences into chunks gives the same bytes and the same outputs (prefill = pages)."""
    d = data.draw(st.sampled_from(HEAD_SIZES))
    group = data.draw(st.integers(1, 8))
    block = data.draw(st.sampled_from([16, 32, 48, 64, 80, 96, 112, 128]))
    lengths = data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=3).filter(any))
    whole, cut = (batch(d, d, 1, group, block, lengths, seed=7) for _ in range(2))
    steps, left = [], list(lengths)
    while any(left):
        step = [data.draw(st.integers(0, n)) for n in left]
        if not any(step):
            step = list(left)
        steps.append(step)
        left = [a - n for a, n in zip(left, step, strict=True)]
    expected, got = whole.run(whole.layer(), [lengths]), cut.run(cut.layer(), steps)
    assert torch.equal(whole.cache, cut.cache)
    assert torch.equal(expected, got)


@pytest.mark.parametrize(
    ("d", "dv", "group", "options"),
    [
        (64, 64, 3, {}),
        (128, 128, 6, {}),
        (80, 96, 4, {}),
        (64, 64, 1, {"window": 700}),
        (64, 64, 3, {"window": 50, "soft_cap": 5.0}),
    ],
)
@pytest.mark.parametrize("step", [1, 2, 4, 11, 100])
def test_every_bit_is_the_same_however_many_tokens_are_computed_at_once(
    d: int, dv: int, group: int, options: dict[str, float | int], step: int
) -> None:
    """Decodes, drafts being verified and chunks give a token the same output, across KV splits, windows and threads.

    What speculation rests on: a difference of 1e-7 moves a key that lies on the boundary to another code.
    """
    length, first = 1200, 990
    whole, cut = (batch(d, dv, 1, group, 64, [length], seed=1) for _ in range(2))
    expected = whole.run(whole.layer(**options), [[length]])
    sizes = [min(step, length - done) for done in range(first, length, step)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        got = cut.run(cut.layer(**options), [[first], *([n] for n in sizes)])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(whole.cache, cut.cache)
    assert torch.equal(expected, got)


def test_codes_are_the_codecs() -> None:
    for d, block in zip(HEAD_SIZES, (16, 32, 48, 64, 96, 128), strict=True):
        b = batch(d, d, 2, 2, block, [77, 1, 30], seed=d)
        b.layer().store(b.key, b.value, b.cache, b.slots, b.start, torch.tensor(b.lengths, dtype=torch.int32))
        want = torch.zeros_like(b.cache)
        codec.store_tokens(want, b.layout, b.slots, codec.encode(b.key, b.value, b.position, b.params))
        page, slot = b.slots // block, b.slots % block
        for got, expected in zip(codec.page_views(b.cache, b.layout), codec.page_views(want, b.layout), strict=True):
            same = got[page, :, slot] == expected[page, :, slot]
            # values within float32 rounding of the middle between two codes may differ
            assert same.float().mean() > 0.999


def test_raw_chunks_attend_to_themselves_unquantised() -> None:
    b = batch(64, 64, 2, 3, 16, [50, 20])
    out = b.run(b.layer(raw=True), [[30, 20], [20, 0]])
    keys, values = codec.transform_key(b.key, b.params), codec.transform_value(b.value, b.params)
    p = b.params
    for i, (first, count) in enumerate([(30, 20), (50, 20)]):
        rows = slice(first, first + count)
        own = (keys[rows].double().numpy(), values[rows].double().numpy())
        want = reference.attend(
            b.query[rows].double().numpy(), b.cache.numpy(), b.table[i].tolist(), b.lengths[i], block_size=16,
            scale=64**-0.5, query_matrix=p.query_matrix.double().numpy(),
            value_inverse=p.value_matrix.T.double().numpy(), value_centre=p.value_centre.double().numpy(),
            sink_key=p.sink_key.double().numpy(), sink_value=p.sink_value.double().numpy(), own=own,
        )  # fmt: skip
        assert error(out[rows], want) <= TIGHT


def test_skipped_slots_leave_the_cache_alone() -> None:
    b = batch(64, 64, 2, 2, 16, [20])
    before = b.cache.clone()
    slots = torch.full_like(b.slots, -1)
    b.layer().store(b.key, b.value, b.cache, slots, b.start, torch.tensor([20], dtype=torch.int32))
    assert torch.equal(b.cache, before)


def test_result_does_not_depend_on_the_rest_of_the_batch() -> None:
    lengths = [1500, 3, 130, 64]
    together = batch(64, 64, 2, 3, 64, lengths)
    out = together.run(together.layer(), [[n - 1 for n in lengths], [1] * 4])
    for i, n in enumerate(lengths):
        alone = torch.zeros(1, 6, 64)
        row = int(together.start[i]) + n - 1
        together.layer().attend(
            together.query[row : row + 1], None, None, together.cache, alone,
            query_start=torch.tensor([0, 1], dtype=torch.int32), seq_lens=torch.tensor([n], dtype=torch.int32),
            block_table=together.table[i : i + 1].contiguous(), slots=None,
        )  # fmt: skip
        assert torch.equal(alone[0], out[row])


def test_wrong_parameters_are_refused() -> None:
    with pytest.raises(FourfoldError, match="does not fit"):
        CpuLayer(PageLayout(16, 2, 64, 64), 4, 1.0, identity_params(1, 64, 64))
    broken = replace(identity_params(2, 64, 64), key_centre=torch.full((2, 64), float("nan")))
    with pytest.raises(FourfoldError, match="not finite"):
        CpuLayer(PageLayout(16, 2, 64, 64), 4, 1.0, broken)


def test_groups_beyond_a_work_item_are_refused() -> None:
    with pytest.raises(FourfoldError, match="71 query heads"):  # Falcon-7B: 71 heads on one KV head
        CpuLayer(PageLayout(16, 1, 64, 64), 71, 1.0, identity_params(1, 64, 64))


def test_the_largest_group() -> None:
    b = batch(64, 64, 1, 64, 16, [20])
    assert_close(b, b.run(b.layer(), [[19], [1]]))

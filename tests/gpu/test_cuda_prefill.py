"""Chunk attention over pages against the oracle, with a dense attention in plain PyTorch in FlashAttention's place; and
the planner, which needs no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import itertools

from kernel_cases import Batch, make_params, relative_error

from fourfold.kernels.cuda.prefill import COMPUTE, Prefill, plan_prefill, workspace_tokens
from fourfold.layout import PageLayout


def dense(query, key, value, *, query_start, key_start, max_query, max_key, causal, scale, window, soft_cap):
    """The contract of ``prefill.Attention``."""
    group = query.shape[1] // key.shape[1]
    outs, lses = [], []
    starts = zip(query_start.tolist(), key_start.tolist(), strict=True)
    spans = list(starts)
    for (q0, k0), (q1, k1) in itertools.pairwise(spans):
        assert q1 - q0 <= max_query
        assert k1 - k0 <= max_key
        q = query[q0:q1].float()
        k, v = (x[k0:k1].float().repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if causal:
            at = torch.arange(q1 - q0, device=q.device)[:, None] + (k1 - k0) - (q1 - q0)
            token = torch.arange(k1 - k0, device=q.device)[None]
            hidden = token > at
            if window:
                hidden |= token <= at - window
            scores = scores.masked_fill(hidden, -torch.inf)
        lses.append(torch.logsumexp(scores, -1))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outs).to(query.dtype), torch.cat(lses, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("workspace", [512, 144])
@pytest.mark.parametrize(("soft_cap", "window"), [(0.0, 0), (20.0, 0), (0.0, 40)])
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_chunks_match_the_oracle(cuda, head_size, soft_cap, window, workspace):
    lengths, queries = [5, 90, 70, 300, 30], [1, 90, 30, 64, 2]
    batch = Batch(PageLayout(32, 2, head_size, head_size), lengths, queries, 8, torch.bfloat16)
    params = make_params(2, head_size, head_size, sink=True, metric=False)
    scale = head_size**-0.5
    prefill = Prefill(params, 8, dense, cuda, scale=scale, soft_cap=soft_cap, window=window)
    # the first sequence is a decode and not ours
    pieces = plan_prefill(
        lengths[1:], queries[1:], first_sequence=1, first_row=1, workspace=workspace, window=window, raw=False,
        device=cuda,
    )  # fmt: skip
    assert (len(pieces) > 2) == (workspace == 144)
    query = batch.query.to(cuda)
    out = torch.full((*query.shape[:2], head_size), float("nan"), dtype=torch.bfloat16, device=cuda)
    space = [torch.full((workspace, 2, head_size), float("nan"), dtype=COMPUTE, device=cuda) for _ in range(2)]
    nothing = query[:, :2]
    prefill(
        query, nothing, nothing, batch.cache.to(cuda), batch.table.to(cuda),
        torch.tensor(lengths, dtype=torch.int32, device=cuda), pieces, batch.layout, out, space,
    )  # fmt: skip
    assert out[0].isnan().all()
    expected = batch.oracle(params, scale, soft_cap, window)
    assert relative_error(out[1:], expected[1:]) < 6e-3


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 40])
def test_raw_chunks_read_themselves_unquantised(cuda, window):
    """A first chunk is plain attention; a later one merges it with its context's pages."""
    lengths, queries = [50, 200], [50, 64]
    batch = Batch(PageLayout(16, 2, 128, 128), lengths, queries, 8, torch.bfloat16)
    params = make_params(2, 128, 128, sink=True, metric=False)
    generator = torch.Generator().manual_seed(8)
    key, value = (torch.randn(114, 2, 128, generator=generator).bfloat16() for _ in range(2))
    prefill = Prefill(params, 8, dense, cuda, scale=0.1, window=window)
    pieces = plan_prefill(
        lengths, queries, first_sequence=0, first_row=0, workspace=144, window=window, raw=True, device=cuda
    )
    query, k, v = (x.to(cuda) for x in (batch.query, key, value))
    out = torch.zeros_like(query)
    space = [torch.zeros(144, 2, 128, dtype=COMPUTE, device=cuda) for _ in range(2)]
    table, length = batch.table.to(cuda), torch.tensor(lengths, dtype=torch.int32, device=cuda)
    prefill(query, k, v, batch.cache.to(cuda), table, length, pieces, batch.layout, out, space)
    one = torch.tensor([0, 50], dtype=torch.int32)
    want, _ = dense(
        query[:50].cpu().float(), key[:50].float(), value[:50].float(), query_start=one, key_start=one, max_query=50,
        max_key=50, causal=True, scale=0.1, window=window, soft_cap=0.0,
    )  # fmt: skip
    assert relative_error(out[:50], want) < 6e-3
    if window:
        expected = batch.oracle(params, 0.1, 0.0, window)[50:]
    else:
        # dense keys of the whole second sequence: its context's pages expanded, then its own keys
        from fourfold.kernels.cuda.dequantise import dequantise

        rows = [torch.zeros(136, 2, 128, dtype=torch.float16, device=cuda) for _ in range(2)]
        at = torch.zeros(1, dtype=torch.int32, device=cuda)
        short = torch.tensor([136], dtype=torch.int32, device=cuda)
        sinks = params.sink_key.to(cuda), params.sink_value.to(cuda)
        dequantise(batch.cache.to(cuda), table[1:], short, at, *rows, batch.layout, *sinks, end=136)
        inverse = torch.linalg.inv(params.key_matrix)
        keys = torch.einsum("the,hed->thd", rows[0].cpu().float(), inverse) + 0  # the centre is not seen by softmax
        values = rows[1].cpu().float() @ params.value_matrix.T + params.value_centre
        # own keys must lose the same centre that stored keys have lost
        keys = torch.cat([keys + params.key_centre, key[50:].float()])
        values = torch.cat([values, value[50:].float()])
        expected, _ = dense(
            batch.query[50:].float(), keys, values, query_start=torch.tensor([0, 64]), key_start=torch.tensor([0, 200]),
            max_query=64, max_key=200, causal=True, scale=0.1, window=0, soft_cap=0.0,
        )  # fmt: skip
    assert relative_error(out[50:], expected) < 1e-2


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(1, 100)), min_size=1, max_size=6),
    st.integers(0, 120),
    st.booleans(),
)
def test_pieces_cover_every_query_and_key_once(chunks, window, raw):
    lengths, queries = [c + q for c, q in chunks], [q for _, q in chunks]
    workspace = workspace_tokens(100, 800, window, least=150)
    pieces = plan_prefill(
        lengths, queries, first_sequence=2, first_row=3, workspace=workspace, window=window, raw=raw,
        device=torch.device("cpu"),
    )  # fmt: skip
    seen: dict[int, list[tuple[int, int]]] = {}
    started = set()
    for piece in pieces:
        assert piece.raw or piece.keys <= workspace
        rows = piece.query_start.diff().tolist()
        keys = piece.key_start.diff().tolist()
        assert piece.rows.start == 3 + sum(queries[: piece.sequences.start - 2])
        for i, (n, k) in enumerate(zip(rows, keys, strict=True)):
            s = piece.sequences.start - 2 + i
            context = lengths[s] - queries[s]
            assert n == queries[s]
            assert piece.first == (s not in started)
            started.add(s)
            begin = context if piece.raw else piece.begin
            end = lengths[s] if piece.raw else min(piece.end, lengths[s])
            assert k == end - begin
            assert piece.causal or end <= context
            assert piece.raw or begin % 16 == 0
            seen.setdefault(s, []).append((begin, end))
    for s, (length, query) in enumerate(zip(lengths, queries, strict=True)):
        spans = sorted(seen[s])
        first_visible = max(0, length - query - window + 1) if window else 0
        assert spans[0][0] <= first_visible
        assert spans[-1][1] == length
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))

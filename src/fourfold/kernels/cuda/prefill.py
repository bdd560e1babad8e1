"""Attention of prompt chunks over 4-bit pages: pages to dense rows, then a dense attention kernel.

A chunk of many queries is bound by arithmetic, not bytes, and FlashAttention's arithmetic is hard to beat; so its
context is expanded once into a workspace of fixed size (``dequantise``) and attended there, in the transformed basis.
Sequences are taken in groups that fit the workspace; one that does not fit is cut into pieces whose results are merged
by their log-sum-exp.

    plan = plan_prefill(lengths, queries, …)                                  once a step, on the host
    prefill(query, key, value, cache, block_table, lengths, plan, out, …)     once a layer

``pages``: a chunk reads its own tokens from the pages too, so that text does not depend on where chunks end.
``raw``: a chunk attends to itself unquantised, and only to earlier tokens through the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from fourfold.kernels.cuda.dequantise import dequantise
from fourfold.layout import PageLayout
from fourfold.quant.params import LayerParams

COMPUTE = torch.float16
"""Of expanded keys and values and of transformed queries: codes times scales lose less in it than in bfloat16."""


class Attention(Protocol):
    """A dense attention kernel over concatenated sequences, aligned at their ends if causal."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        query_start: torch.Tensor,
        key_start: torch.Tensor,
        max_query: int,
        max_key: int,
        causal: bool,
        scale: float,
        window: int,
        soft_cap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H, Dv] and the natural log-sum-exp [H, T] float32; ``window`` 0 for none, as in ``Prefill``."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """One call of the dense kernel: tokens ``begin`` to ``end`` of each of a run of sequences.

    Attributes:
        sequences: of the batch; rows: of the query tensor.
        query_start, key_start: [n + 1] int32 on the GPU, from 0.
        keys: keys of all sequences together.
        raw: keys are those of the chunk itself, not read from pages.
        causal: False where all keys come before all queries.
        first: whether it starts the result of its rows; others are merged into it.
    """

    sequences: slice
    rows: slice
    query_start: torch.Tensor
    key_start: torch.Tensor
    max_query: int
    max_key: int
    keys: int
    begin: int
    end: int
    raw: bool
    causal: bool
    first: bool


def plan_prefill(
    lengths: Sequence[int],
    queries: Sequence[int],
    *,
    first_sequence: int,
    first_row: int,
    workspace: int,
    window: int,
    raw: bool,
    device: torch.device,
) -> list[Piece]:
    """Cut a step's chunks into calls.

    Args:
        lengths: tokens of each sequence, its chunk included; queries: tokens of its chunk, at least 1.
        first_sequence, first_row: where the chunks start in the batch and in the query tensor.
        workspace: tokens that fit, see ``workspace_tokens``.
        window: sliding window in tokens, the query's own included; 0 for none.
        raw: see the module.
    """
    contexts = [n - q for n, q in zip(lengths, queries, strict=True)]
    rows = [first_row, *(first_row + n for n in accumulate(queries))]
    step, count = workspace // 16 * 16, len(lengths)
    numbers: list[int] = []
    cuts = []

    def is_raw(i: int) -> bool:
        # a window's left edge depends on where the keys end, so a windowed chunk with context is one call over pages
        return raw and not (window and contexts[i])

    def add(a: int, b: int, begin: int, end: int, keys: list[int], *, raw: bool, causal: bool, first: bool) -> None:
        cuts.append((a, b, begin, end, keys, raw, causal, first, len(numbers)))
        numbers.extend((0, *accumulate(queries[a:b]), 0, *accumulate(keys)))

    i = 0
    while i < count:
        j = i + 1
        if is_raw(i):
            while j < count and is_raw(j):
                j += 1
            add(i, j, 0, 0, list(queries[i:j]), raw=True, causal=True, first=True)
            for s in range(i, j):
                for begin in range(0, contexts[s], step):
                    end = min(begin + step, contexts[s])
                    add(s, s + 1, begin, end, [end - begin], raw=False, causal=False, first=False)
        elif lengths[i] <= workspace:
            total = lengths[i]
            while j < count and not is_raw(j) and total + lengths[j] <= workspace:
                total += lengths[j]
                j += 1
            add(i, j, 0, max(lengths[i:j]), list(lengths[i:j]), raw=False, causal=True, first=True)
        else:
            begin = max(0, contexts[i] - window + 1) // 16 * 16 if window else 0
            last = begin if lengths[i] - begin <= workspace else -(-(lengths[i] - workspace) // 16) * 16
            if last > contexts[i] or (window and last != begin):
                raise ValueError(f"a chunk of {queries[i]} tokens needs a workspace larger than {workspace} tokens")
            add(i, j, last, lengths[i], [lengths[i] - last], raw=False, causal=True, first=True)
            for start in range(begin, last, step):
                end = min(start + step, last)
                add(i, j, start, end, [end - start], raw=False, causal=False, first=False)
        i = j
    held = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    return [
        Piece(
            sequences=slice(first_sequence + a, first_sequence + b),
            rows=slice(rows[a], rows[b]),
            query_start=held[at : at + b - a + 1],
            key_start=held[at + b - a + 1 : at + 2 * (b - a + 1)],
            max_query=max(queries[a:b]),
            max_key=max(keys),
            keys=sum(keys),
            begin=begin,
            end=end,
            raw=of_chunk,
            causal=causal,
            first=first,
        )
        for a, b, begin, end, keys, of_chunk, causal, first, at in cuts
    ]


def workspace_tokens(max_chunk: int, max_length: int, window: int, least: int = 16384) -> int:
    """Rows of the workspace: a chunk with its window must fit, and few pieces are better than many."""
    needed = max_chunk + (min(window, max_length) if window else 0) + 32
    return max(needed, min(least, max_length + 32))


class Prefill:
    """Chunk attention of one layer.

    Args:
        params: quantiser; query_heads: H.
        attention: the dense kernel, for the activations' dtype and for ``COMPUTE``.
        scale, soft_cap, window: as in ``decode.Decode``.
    """

    def __init__(
        self,
        params: LayerParams,
        query_heads: int,
        attention: Attention,
        device: torch.device,
        *,
        scale: float,
        soft_cap: float = 0.0,
        window: int = 0,
    ) -> None:
        self.attention = attention
        self.group = query_heads // params.kv_heads
        self.scale, self.soft_cap, self.window = scale, soft_cap, window
        # the softmax scale is folded in, which also keeps transformed queries far from float16's largest number
        self.query_matrix = (params.query_matrix * scale).to(device=device, dtype=COMPUTE).contiguous()
        self.value_matrix = params.value_matrix.T.to(device=device, dtype=COMPUTE).contiguous()
        self.centre = params.value_centre.repeat_interleave(self.group, 0).to(device)
        self.sink_key, self.sink_value = params.sink_key.to(device), params.sink_value.to(device)
        self.key_centre = params.key_centre.to(device) * scale

    def transform(self, query: torch.Tensor) -> torch.Tensor:
        """[T, H, D] to [T, H, D] of ``COMPUTE``: times the scale and the query matrix of its KV head."""
        tokens, heads, d = query.shape
        grouped = query.to(COMPUTE).view(tokens, heads // self.group, self.group, d)
        return torch.einsum("thgd,hde->thge", grouped, self.query_matrix).reshape(tokens, heads, d)

    def back(self, rotated: torch.Tensor) -> torch.Tensor:
        """[T, H, Dv] from the values' rotated basis, float32."""
        return (rotated @ self.value_matrix).float() + self.centre

    def _centre_scores(self, query: torch.Tensor) -> torch.Tensor:
        """[T, H] float32: what the keys' centre adds to every score of a query."""
        grouped = query.float().unflatten(1, (-1, self.group))
        return torch.einsum("thgd,hd->thg", grouped, self.key_centre).flatten(1)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        pieces: Sequence[Piece],
        layout: PageLayout,
        out: torch.Tensor,
        workspace: Sequence[torch.Tensor],
    ) -> None:
        """Attend; ``out`` rows of the pieces are written, all others left.

        Args:
            query: [T, H, D]; key: [T, HK, D]; value: [T, HK, Dv]; out: [T, H, Dv], of the activations' dtype.
            cache: [pages, HK, head_page_bytes] uint8, the chunks' own tokens stored already.
            block_table: [B, pages] int32; lengths: [B] int32.
            workspace: [rows, HK, D] and [rows, HK, Dv] of ``COMPUTE``; rows as planned.
        """
        rows, over_raw = slice(0, 0), False
        total = lse = query[:0]
        turned = (slice(0, 0), query)
        for piece in pieces:
            if piece.raw:
                part, part_lse = self._dense(query[piece.rows], key[piece.rows], value[piece.rows], piece, self.scale)
            else:
                if turned[0] != piece.rows:
                    turned = (piece.rows, self.transform(query[piece.rows]))
                keys, values = (w[: piece.keys] for w in workspace)
                dequantise(
                    cache, block_table[piece.sequences], lengths[piece.sequences], piece.key_start, keys, values,
                    layout, self.sink_key, self.sink_value, begin=piece.begin, end=piece.end,
                )  # fmt: skip
                part, part_lse = self._dense(turned[1], keys, values, piece, 1.0)
                part = self.back(part)
            part_lse = part_lse.T
            if piece.first:
                out[piece.rows] = part
                rows, over_raw, total, lse = piece.rows, piece.raw, part, part_lse
                continue
            if over_raw:  # pages lack the keys' centre, raw keys do not
                part_lse = part_lse + self._centre_scores(query[piece.rows])
            within = slice(piece.rows.start - rows.start, piece.rows.stop - rows.start)
            joined = torch.logaddexp(lse[within], part_lse)
            merged = total[within].float() * (lse[within] - joined).exp()[..., None]
            merged += part * (part_lse - joined).exp()[..., None]
            if total.dtype != torch.float32:
                total = total.float()
            total[within], lse[within] = merged, joined
            out[piece.rows] = merged

    def _dense(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: Piece, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.attention(
            query,
            key,
            value,
            query_start=piece.query_start,
            key_start=piece.key_start,
            max_query=piece.max_query,
            max_key=piece.max_key,
            causal=piece.causal,
            scale=scale,
            window=self.window if piece.causal else 0,
            soft_cap=self.soft_cap,
        )

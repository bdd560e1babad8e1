"""What a step of the CUDA engine needs besides its tensors: which rows are decodes, their plan, the chunks' pieces.

``build`` runs outside CUDA graphs, before every step, and copies nothing to the host.  What a graph reads lies in
buffers that the builder owns and that never move.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from fourfold.errors import FourfoldError
from fourfold.kernels.cuda.decode import Plan
from fourfold.kernels.cuda.prefill import Piece, plan_prefill
from fourfold.kernels.cuda.store import write_positions
from fourfold.vllm_plugin.attention import check_page

SHORT_CHUNK, SHORT_CHUNKS, SHORT_WORK = 512, 4, 1 << 20
"""Chunks of a step that the decode kernels take: of so many tokens, so many of them, and queries times keys in all.

Expanding pages for FlashAttention costs a dozen launches a layer.  A short chunk has so little arithmetic that three
launches of kernels made for decodes are over sooner, and between graphs it is launches that the GPU waits for.
"""
FEWEST = 32
"""Query tokens that a short chunk is cut for at least, so that all short chunks run in the same compiled kernel."""


@dataclass
class Part:
    """Sequences that one call of the decode kernels takes.

    Attributes:
        rows: of the query tensor; table: [n, N] int32, their block tables; plans: by sliding window (0 for none).
    """

    rows: slice
    table: torch.Tensor
    plans: dict[int, Plan]

    @property
    def sequences(self) -> int:
        return self.table.shape[0]


@dataclass
class CudaMetadata:
    """One step of one KV-cache group.

    Attributes:
        num_tokens: rows of the query tensor, padding included; max_query: most new tokens of a sequence.
        lengths: [B] int32; query_start: [B + 1] int32; block_table: [B, N] int32; slots, positions: [T] int64.
        parts: what the decode kernels take: decodes first, then short chunks.
        pieces: what dense attention takes, by sliding window: all other chunks.
        space: working memory of the step, taken once by the first layer that needs it.
    """

    num_tokens: int
    max_query: int
    lengths: torch.Tensor
    query_start: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    parts: list[Part] = field(default_factory=list)
    pieces: dict[int, list[Piece]] = field(default_factory=dict)
    space: dict[Any, list[torch.Tensor]] = field(default_factory=dict)


def short_chunks(lengths: list[int], queries: list[int]) -> int:
    """How many chunks, from the first, are short (see ``SHORT_CHUNK``)."""
    work = 0
    for i, (length, query) in enumerate(zip(lengths, queries, strict=True)):
        work += length * query
        if query > SHORT_CHUNK or i == SHORT_CHUNKS or work > SHORT_WORK:
            return i
    return len(queries)


class CudaBuilder(AttentionMetadataBuilder[CudaMetadata]):
    """Plans a step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layout = check_page(kv_cache_spec)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = vllm_config.compilation_config.static_forward_context
        impls = [layers[name].impl for name in layer_names]
        self.by_window = {impl.window: impl for impl in impls}
        self.float32 = impls[0].dtype == torch.float32
        scheduler = vllm_config.scheduler_config
        captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        sequences = max(scheduler.max_num_seqs, captured)
        rows = max(scheduler.max_num_batched_tokens, captured * (self.reorder_batch_threshold or 1))
        self.positions = torch.empty(rows, dtype=torch.int64, device=device)
        self.decode, self.numbers = {}, {}
        if not self.float32:
            for window, impl in self.by_window.items():
                impl.reserve()
                decode = self.decode[window] = impl.decode(layout)
                most = max(
                    decode.plan_numbers(batch, n)
                    for n in range(1, (self.reorder_batch_threshold or 1) + 1)
                    for batch in (1, sequences)
                )
                self.numbers[window] = torch.empty(most + sequences, dtype=torch.int32, device=device)
                # nothing is compiled while requests wait
                for batch in (1, sequences):
                    for n in (*range(1, (self.reorder_batch_threshold or 1) + 1), FEWEST):
                        decode.kernels(decode.tiling(batch, n), impl.sink)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CudaMetadata:
        m = common_attn_metadata
        if m.causal is not True:
            raise FourfoldError(
                "4-bit pages do not support attention that is not causal",
                why="this drafter or model lets tokens see what comes after them",
                fix="use another drafter, or set FOURFOLD=0",
            )
        batch, tokens = m.num_reqs, m.num_actual_tokens
        lengths, start = m.seq_lens[:batch], m.query_start_loc[: batch + 1]
        positions = self.positions[:tokens]
        if positions.numel() < tokens:  # drafters that run all drafts at once; never inside a graph
            positions = torch.empty(tokens, dtype=torch.int64, device=self.device)
        write_positions(lengths, start, positions)
        result = CudaMetadata(
            num_tokens=tokens,
            max_query=m.max_query_len,
            lengths=lengths,
            query_start=start,
            block_table=m.block_table_tensor[:batch],
            slots=m.slot_mapping[:tokens],
            positions=positions,
        )
        if self.float32:
            return result
        threshold = self.reorder_batch_threshold or 1
        if m.max_query_len <= threshold:
            self._add_decodes(result, batch, tokens, m.max_query_len)
            return result
        starts = m.query_start_loc_cpu[: batch + 1].tolist()
        queries = [b - a for a, b in pairwise(starts)]
        decodes = next(i for i, n in enumerate(queries) if n > threshold)
        if decodes:
            self._add_decodes(result, decodes, starts[decodes], max(queries[:decodes]))
        chunks = [n for n in queries[decodes:] if n]  # padding of a graph comes last
        known = m.seq_lens_cpu_upper_bound
        totals = (m.seq_lens.cpu() if known is None else known)[decodes : decodes + len(chunks)].tolist()
        self._add_chunks(result, decodes, starts, totals, chunks)
        return result

    def _add_decodes(self, result: CudaMetadata, count: int, rows: int, longest: int) -> None:
        plans = {
            window: decode.plan(result.lengths[:count], result.query_start[: count + 1], longest, self.numbers[window])
            for window, decode in self.decode.items()
        }
        result.parts.append(Part(slice(0, rows), result.block_table[:count], plans))

    def _add_chunks(
        self, result: CudaMetadata, first: int, starts: list[int], lengths: list[int], queries: list[int]
    ) -> None:
        raw = any(impl.raw for impl in self.by_window.values())
        short = 0 if raw else short_chunks(lengths, queries)
        then = first + short
        if short:
            within = result.query_start[first : then + 1] - starts[first]
            plans = {
                window: decode.plan(result.lengths[first:then], within, max(FEWEST, *queries[:short]))
                for window, decode in self.decode.items()
            }
            rows = slice(starts[first], starts[then])
            result.parts.append(Part(rows, result.block_table[first:then], plans))
        if short == len(queries):
            return
        for window, impl in self.by_window.items():
            result.pieces[window] = plan_prefill(
                lengths[short:],
                queries[short:],
                first_sequence=then,
                first_row=starts[then],
                workspace=impl.workspace_rows,
                window=window,
                raw=impl.raw,
                device=self.device,
            )

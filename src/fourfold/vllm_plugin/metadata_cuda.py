"""What a step of the CUDA engine needs besides its tensors: which rows are decodes, their plan, the chunks' pieces.

``build`` runs outside CUDA graphs, before every step, and copies nothing to the host.  What a graph reads lies in
buffers that the builder owns and that never move.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.kernels.cuda.decode import ANY, Plan
from fourfold.kernels.cuda.prefill import Piece, plan_prefill
from fourfold.kernels.cuda.store import write_positions
from fourfold.vllm_plugin.attention import check_page

SHORT_TOKENS, SHORT_WORK = 2048, 1 << 19
"""Chunks of a step that the decode kernels take beside the decodes: so many tokens, and queries times keys in all.

Expanding pages for FlashAttention costs a dozen launches a layer.  A short chunk has so little arithmetic that kernels
made for decodes are over sooner, and between graphs it is launches that the GPU waits for.  A graph of a mixed batch
(cudagraph_mode FULL) cannot choose: there the decode kernels take every chunk.
"""


@dataclass
class CudaMetadata:
    """One step of one KV-cache group.

    Attributes:
        num_tokens: rows of the query tensor, padding included; max_query: most new tokens of a sequence, or more.
        lengths: [B] int32; query_start: [B + 1] int32; block_table: [B, N] int32; slots, positions: [T] int64.
        rows: how many of the query tensor, from the first, the decode kernels take: decodes, then short chunks.
        plans: of the decode kernels, by sliding window (0 for none).
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
    rows: int = 0
    plans: dict[int, Plan] = field(default_factory=dict)
    pieces: dict[int, list[Piece]] = field(default_factory=dict)
    space: dict[Any, list[torch.Tensor]] = field(default_factory=dict)


def short_chunks(lengths: list[int], queries: list[int]) -> int:
    """How many chunks, from the first, are short (see ``SHORT_TOKENS``)."""
    tokens = work = 0
    for i, (length, query) in enumerate(zip(lengths, queries, strict=True)):
        tokens += query
        work += length * query
        if tokens > SHORT_TOKENS or work > SHORT_WORK:
            return i
    return len(queries)


class CudaBuilder(AttentionMetadataBuilder[CudaMetadata]):
    """Plans a step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Graphs of mixed batches, but not if chunks read their own tokens unquantised: those need FlashAttention."""
        raw = Settings.from_env().prefill == "raw"
        return AttentionCGSupport.UNIFORM_BATCH if raw else cls._cudagraph_support

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layout = check_page(kv_cache_spec)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = vllm_config.compilation_config.static_forward_context
        impls = [layers[name].impl for name in layer_names]
        self.by_window = {impl.window: impl for impl in impls}
        self.float32 = impls[0].dtype == torch.float32
        self.raw = any(impl.raw for impl in impls)
        self.compilation = vllm_config.compilation_config
        rows = max(vllm_config.scheduler_config.max_num_batched_tokens, self.captured)
        self.positions = torch.empty(rows, dtype=torch.int64, device=device)
        self.decode, self.numbers = {}, {}
        if not self.float32:
            for window, impl in self.by_window.items():
                impl.reserve()
                decode = self.decode[window] = impl.decode(layout)
                cuts = impl.cuts(decode)
                self.numbers[window] = torch.empty(max(cut.numbers for cut in cuts), dtype=torch.int32, device=device)
                for tiling in {cut.tiling for cut in cuts}:  # before requests wait and graphs are captured
                    for after_store in (False, True):
                        decode.kernels(tiling, impl.sink, after_store)

    @property
    def captured(self) -> int:
        """Tokens of the largest graph."""
        return self.compilation.max_cudagraph_capture_size or 0

    def _in_graph(self, tokens: int) -> bool:
        """Whether a graph of a mixed batch may hold this step: read late, since vLLM settles its mode late."""
        mode = self.compilation.cudagraph_mode
        return mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL and tokens <= self.captured

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
        in_graph = self._in_graph(tokens)
        if self.float32:
            if in_graph:
                result.max_query = tokens  # a graph serves any batch of this size
            return result
        threshold = self.reorder_batch_threshold or 1
        if in_graph:
            # one cut for all batches of this size, captured and replayed
            self._add_tiles(result, batch, tokens, ANY, threshold)
            return result
        if m.max_query_len <= threshold:
            self._add_tiles(result, batch, tokens, m.max_query_len, m.max_query_len)
            return result
        starts = m.query_start_loc_cpu[: batch + 1].tolist()
        queries = [b - a for a, b in pairwise(starts)]
        # none, where max_query_len was only a bound
        decodes = next((i for i, n in enumerate(queries) if n > threshold), batch)
        chunks = [n for n in queries[decodes:] if n]  # padding of a graph comes last
        known = m.seq_lens_cpu_upper_bound
        totals = (m.seq_lens.cpu() if known is None else known)[decodes : decodes + len(chunks)].tolist()
        then = decodes + (0 if self.raw else short_chunks(totals, chunks))
        if then:
            self._add_tiles(result, then, starts[then], max(queries[:then]), threshold)
        rest = slice(then - decodes, len(chunks))
        for window, impl in self.by_window.items() if totals[rest] else ():
            result.pieces[window] = plan_prefill(
                totals[rest],
                chunks[rest],
                first_sequence=then,
                first_row=starts[then],
                workspace=impl.workspace_rows,
                window=window,
                raw=impl.raw,
                device=self.device,
            )
        return result

    def _add_tiles(self, result: CudaMetadata, count: int, rows: int, longest: int, usual: int) -> None:
        """Give the decode kernels the first ``count`` sequences, which have ``rows`` query tokens."""
        result.rows = rows
        for window, decode in self.decode.items():
            cut = decode.cut(count, rows, longest, usual)
            numbers = self.numbers[window]
            if cut.numbers > numbers.numel():  # more chunks than any graph holds
                numbers = torch.empty(cut.numbers, dtype=torch.int32, device=self.device)
            result.plans[window] = decode.plan(result.lengths[:count], result.query_start[: count + 1], cut, numbers)

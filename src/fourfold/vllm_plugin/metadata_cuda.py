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

from fourfold.kernels.cuda.decode import Plan
from fourfold.kernels.cuda.prefill import Piece, plan_prefill
from fourfold.kernels.cuda.store import write_positions
from fourfold.vllm_plugin.attention import check_page


@dataclass
class CudaMetadata:
    """One step of one KV-cache group.

    Attributes:
        num_tokens: rows of the query tensor, padding included; max_query: most new tokens of a sequence.
        lengths: [B] int32; query_start: [B + 1] int32; block_table: [B, N] int32; slots, positions: [T] int64.
        decodes, decode_tokens: sequences and rows, first in the batch, that the decode kernels take.
        plans, pieces: by sliding window (0 for none): of the decodes, and of the chunks behind them.
    """

    num_tokens: int
    max_query: int
    lengths: torch.Tensor
    query_start: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    decodes: int
    decode_tokens: int
    plans: dict[int, Plan] = field(default_factory=dict)
    pieces: dict[int, list[Piece]] = field(default_factory=dict)


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

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CudaMetadata:
        m = common_attn_metadata
        batch, tokens = m.num_reqs, m.num_actual_tokens
        lengths, start = m.seq_lens[:batch], m.query_start_loc[: batch + 1]
        positions = self.positions[:tokens]
        if positions.numel() < tokens:  # drafters that run all drafts at once; never inside a graph
            positions = torch.empty(tokens, dtype=torch.int64, device=self.device)
        write_positions(lengths, start, positions)
        threshold = self.reorder_batch_threshold or 1
        if m.max_query_len <= threshold:
            decodes, decode_tokens, longest, chunks = batch, tokens, m.max_query_len, []
        else:
            starts = m.query_start_loc_cpu[: batch + 1].tolist()
            queries = [b - a for a, b in pairwise(starts)]
            decodes = next(i for i, n in enumerate(queries) if n > threshold)
            decode_tokens, longest = starts[decodes], max(queries[:decodes], default=0)
            chunks = [n for n in queries[decodes:] if n]  # padding of a graph comes last
        result = CudaMetadata(
            num_tokens=tokens,
            max_query=m.max_query_len,
            lengths=lengths,
            query_start=start,
            block_table=m.block_table_tensor[:batch],
            slots=m.slot_mapping[:tokens],
            positions=positions,
            decodes=decodes,
            decode_tokens=decode_tokens,
        )
        if self.float32:
            return result
        if decodes:
            for window, decode in self.decode.items():
                result.plans[window] = decode.plan(
                    lengths[:decodes], start[: decodes + 1], longest, self.numbers[window]
                )
        if chunks:
            known = m.seq_lens_cpu_upper_bound
            total = (m.seq_lens.cpu() if known is None else known)[decodes : decodes + len(chunks)].tolist()
            for window, impl in self.by_window.items():
                result.pieces[window] = plan_prefill(
                    total, chunks, first_sequence=decodes, first_row=decode_tokens, workspace=impl.workspace_rows,
                    window=window, raw=impl.raw, device=self.device,
                )  # fmt: skip
        return result

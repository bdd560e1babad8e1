"""Decode over 4-bit pages: the plan of a step, and query operand, split attention and merge of a layer.

    decode = Decode(layout, query_heads, ...)             once for all layers of one shape
    plan = decode.plan(lengths, query_start, max_query)   once a step; on the device, fixed grid
    decode(query, cache, block_table, plan, params, out)  once a layer; three launches, no host sync

Everything is safe in CUDA graphs: grids and scratch depend on ``max_batch`` sizes only, never on lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from fourfold.errors import FourfoldError
from fourfold.kernels.cuda.compile import Kernel, load, pointer, stream_of
from fourfold.kernels.cuda.launch import Launch
from fourfold.kernels.cuda.pack import QUERY_GAIN, PackedParams, chunks, query_scale
from fourfold.kernels.cuda.tiling import WARPS, Tiling, choose_tiling
from fourfold.layout import PageLayout

_LOG2E = math.log2(math.e)
_PLAN = "PPPPPiiiii"
"""lengths, query_start, cum, runs, meta, batch, runs, unit, window, least units."""
_QUERY = "PqPPPPiiff"
"""q and its stride, wq, sink, out, aux, tokens, KV heads, scale, sink's scale."""
_DECODE = "PqqPiPPPPPPPPiiiiiiff"
"""cache and its strides, table and its stride, the plan's four, q, aux, po, pm, six sizes, k_factor, cap."""
_MERGE = "PPPPPPPPPqiiiiiii"
"""po, pm, cum, meta, query_start, wo, centre, sink, out and its stride, seven sizes."""


@dataclass(slots=True)
class _Step:
    """The three launches of a layer, and those of their arguments that all layers of a step share."""

    query: Launch
    decode: Launch
    merge: Launch
    query_tail: tuple[float, ...]
    decode_plan: tuple[int, ...]
    decode_tail: tuple[float, ...]
    merge_plan: tuple[int, ...]
    merge_tail: tuple[int, ...]
    scratch: tuple[int, ...]


@dataclass(slots=True)
class Plan:
    """What ``Decode.plan`` made for one step; tensors live on the GPU.

    Attributes:
        lengths: [B] int32 tokens of each sequence, the new ones included; query_start: [B + 1] int32.
        cum, runs, meta: see plan.cu.
        max_query: most new tokens of a sequence.
    """

    lengths: torch.Tensor
    query_start: torch.Tensor
    cum: torch.Tensor
    runs: torch.Tensor
    meta: torch.Tensor
    max_query: int
    n_runs: int
    row_blocks: int
    tiling: Tiling
    steps: dict[tuple[Decode, int, bool], _Step] = field(default_factory=dict)


class Decode:
    """Attention of 1 + k query tokens a sequence over 4-bit pages, for all layers of one shape.

    Args:
        layout: the page; query_heads: H, a multiple of the KV heads (at most 16 a KV head).
        scale: softmax scale; soft_cap: logits are cap * tanh(score / cap), 0 for none; window: tokens that a query
            sees, itself included, 0 for all.
        dtype: of queries and outputs, float16 or bfloat16.

    Raises:
        FourfoldError: for a dtype or group that the kernels do not handle.
    """

    def __init__(
        self,
        layout: PageLayout,
        query_heads: int,
        *,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
        soft_cap: float = 0.0,
        window: int = 0,
        tiling: Tiling | None = None,
    ) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise FourfoldError(f"the CUDA kernels do not handle {dtype}", fix="serve with --dtype bfloat16 or float16")
        if query_heads % layout.num_kv_heads:
            raise FourfoldError(f"{query_heads} query heads do not divide into {layout.num_kv_heads} KV heads")
        self.layout, self.query_heads, self.dtype, self.device = layout, query_heads, dtype, device
        self.group = query_heads // layout.num_kv_heads
        self.scale, self.soft_cap, self.window = scale, soft_cap, window
        self.forced_tiling = tiling
        properties = torch.cuda.get_device_properties(device)
        self.multiprocessors = properties.multi_processor_count
        self.shared_limit = properties.shared_memory_per_multiprocessor
        self.bf16 = int(dtype == torch.bfloat16)
        self._tilings: dict[tuple[bool, int], Tiling] = {}

    def tiling(self, batch: int, max_query: int) -> Tiling:
        """The cut for ``batch`` sequences of at most ``max_query`` query tokens."""
        few = 2 * batch * self.layout.num_kv_heads <= self.multiprocessors
        if self.forced_tiling:
            return self.forced_tiling
        found = self._tilings.get((few, max_query))
        if found is None:
            found = choose_tiling(self.layout, max_query * self.group, self.shared_limit, few)
            self._tilings[few, max_query] = found
        return found

    def runs(self, batch: int, max_query: int) -> tuple[int, int]:
        """Runs a KV head and row block (the fixed split count), and row blocks."""
        tiling = self.tiling(batch, max_query)
        row_blocks = -(-max_query * self.group // (8 * tiling.row_tiles))
        return max(self.multiprocessors * tiling.blocks // (self.layout.num_kv_heads * row_blocks), 1), row_blocks

    def plan_numbers(self, batch: int, max_query: int) -> int:
        """int32 numbers that ``plan`` writes."""
        return batch + 2 + 8 * self.runs(batch, max_query)[0]

    def plan(
        self,
        lengths: torch.Tensor,
        query_start: torch.Tensor,
        max_query: int,
        numbers: torch.Tensor | None = None,
    ) -> Plan:
        """Queue the plan of one step; the tensors it reads and writes must keep their addresses in a graph.

        Args:
            lengths: [B] int32; query_start: [B + 1] int32; max_query: most query tokens of a sequence.
            numbers: int32, 16-byte aligned, at least ``plan_numbers``; allocated here if None.
        """
        batch = lengths.numel()
        (n_runs, row_blocks), tiling = self.runs(batch, max_query), self.tiling(batch, max_query)
        kernel = load("plan", {"ACT_BF16": self.bf16}, self.device, dependent=False)
        count = self.plan_numbers(batch, max_query)
        if numbers is None:
            numbers = torch.empty(count, dtype=torch.int32, device=self.device)
        runs, cum, meta = numbers[: 8 * n_runs], numbers[8 * n_runs : count - 1], numbers[count - 1 : count]
        unit = WARPS * 16 * tiling.tokens
        Launch(kernel, _PLAN, (1, 1, 1), 1024)(
            stream_of(self.device), *map(pointer, (lengths, query_start, cum, runs, meta)), batch, n_runs, unit,
            self.window, 1,
        )  # fmt: skip
        return Plan(lengths, query_start, cum, runs, meta, max_query, n_runs, row_blocks, tiling)

    def scratch_bytes(self, tokens: int, batch: int, max_query: int) -> int:
        """Bytes of scratch that ``__call__`` needs, for any lengths."""
        return sum(self._scratch_parts(tokens, batch, max_query))

    def _scratch_parts(self, tokens: int, batch: int, max_query: int) -> tuple[int, int, int, int]:
        n_runs, row_blocks = self.runs(batch, max_query)
        rows = min(max_query * self.group, 8 * self.tiling(batch, max_query).row_tiles)
        partials = self.layout.num_kv_heads * row_blocks * (n_runs + batch) * rows
        q, aux = tokens * self.query_heads * 64 * chunks(self.layout.head_size), tokens * self.query_heads * 8
        parts = (q, aux, partials * self.layout.head_size_v * 4, partials * 16)
        return tuple(-(-p // 256) * 256 for p in parts)  # type: ignore[return-value]

    def __call__(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        plan: Plan,
        params: PackedParams,
        out: torch.Tensor,
        scratch: torch.Tensor | None = None,
    ) -> None:
        """Queue the attention of one layer.

        Args:
            query: [tokens, H, D], heads and elements contiguous, token stride a multiple of 8.
            cache: [pages, HK, head_page_bytes] uint8, any page and head stride.
            block_table: [B, pages a sequence] int32.
            out: [tokens, H, Dv], heads and elements contiguous; rows of no sequence are left as they are.
            scratch: uint8, at least ``scratch_bytes``; allocated here if None.
        """
        key = (self, query.shape[0], params.sink)
        step = plan.steps.get(key)
        if step is None:
            step = plan.steps[key] = self._prepare(plan, *key[1:])
        if scratch is None:
            scratch = torch.empty(sum(step.scratch), dtype=torch.uint8, device=self.device)
        stream = stream_of(self.device)
        q = scratch.data_ptr()
        aux = q + step.scratch[0]
        po = aux + step.scratch[1]
        pm = po + step.scratch[2]
        sink_key, sink_value = params.sink_addresses
        step.query(stream, query.data_ptr(), query.stride(0), params.wq.data_ptr(), sink_key, q, aux, *step.query_tail)
        step.decode(
            stream, cache.data_ptr(), cache.stride(0), cache.stride(1), block_table.data_ptr(), block_table.stride(0),
            *step.decode_plan, q, aux, po, pm, *step.decode_tail,
        )  # fmt: skip
        step.merge(
            stream, po, pm, *step.merge_plan, params.wo.data_ptr(), params.value_centre.data_ptr(), sink_value,
            out.data_ptr(), out.stride(0), *step.merge_tail,
        )  # fmt: skip

    def kernels(self, tiling: Tiling, sink: bool) -> tuple[Kernel, Kernel, Kernel]:
        """query, decode and merge for one cut, compiled if need be; ``sink``: position 0 has its own centre."""
        layout = self.layout
        common = {"GROUP": self.group, "SINK": int(sink), "ACT_BF16": self.bf16}
        defines = {
            "D": layout.head_size, "DV": layout.head_size_v, "NB": tiling.row_tiles, "NT": tiling.tokens,
            "ST": tiling.stages, "PS": layout.block_size, "SOFTCAP": int(self.soft_cap > 0),
            "WINDOW": int(self.window > 0), "MINB": tiling.blocks, **common,
        }  # fmt: skip
        # The first kernel starts after everything queued before it has ended; so the second may read pages and plan
        # before it waits for the first.
        return (
            load("query", {"D": layout.head_size, **common}, self.device, dependent=False),
            load("decode", defines, self.device, tiling.shared(layout)),
            load("merge", {"DV": layout.head_size_v, **common}, self.device),
        )

    def _prepare(self, plan: Plan, tokens: int, sink: bool) -> _Step:
        layout, tiling, heads = self.layout, plan.tiling, self.layout.num_kv_heads
        d, batch = layout.head_size, plan.lengths.numel()
        rows, rows_block = plan.max_query * self.group, 8 * tiling.row_tiles
        slots = plan.n_runs + batch
        query, decode, merge = self.kernels(tiling, sink)
        cap = self.soft_cap * _LOG2E if self.soft_cap > 0 else 1.0
        total = batch * rows
        take = next((t for t in (16, 8, 4, 2) if -(-total // t) * heads >= self.multiprocessors), 1)
        blocks = min(-(-tokens * self.group // 16), max(self.multiprocessors * 4 // heads, 1))
        grid, shared = (plan.n_runs, heads * plan.row_blocks, 1), tiling.shared(layout)
        return _Step(
            query=Launch(query, _QUERY, (blocks, heads, 1), 256 if d > 128 else 128),
            decode=Launch(decode, _DECODE, grid, WARPS * 32, shared),
            merge=Launch(merge, _MERGE, (-(-total // take), heads, 1), 256),
            query_tail=(tokens, heads, query_scale(self.scale), self.scale * _LOG2E),
            decode_plan=tuple(map(pointer, (plan.lengths, plan.query_start, plan.cum, plan.runs))),
            decode_tail=(batch, heads, plan.row_blocks, rows, slots, self.window, 2.0**24 / QUERY_GAIN / cap, cap),
            merge_plan=tuple(map(pointer, (plan.cum, plan.meta, plan.query_start))),
            merge_tail=(batch, heads, plan.row_blocks, rows, rows_block, slots, take),
            scratch=self._scratch_parts(tokens, batch, plan.max_query),
        )

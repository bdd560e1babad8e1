"""Decode over 4-bit pages: the plan of a step, and query operand, split attention and merge of a layer.

    decode = Decode(layout, query_heads, ...)             once for all layers of one shape
    plan = decode.plan(lengths, query_start, max_query)   once a step; on the device, fixed grid
    decode(query, cache, block_table, plan, params, out)  once a layer; three launches, no host sync

Everything is safe in CUDA graphs: grids and scratch depend on ``max_batch`` sizes only, never on lengths.
"""

from __future__ import annotations

import math
from ctypes import c_float, c_int, c_longlong, c_void_p
from dataclasses import dataclass, replace

import torch

from fourfold.errors import FourfoldError
from fourfold.kernels.cuda.compile import load, pointer, stream_of, structure
from fourfold.kernels.cuda.pack import QUERY_GAIN, PackedParams, chunks, query_scale
from fourfold.layout import PageLayout

WARPS = 4
_LOG2E = math.log2(math.e)
_PlanArgs = structure(
    "PlanArgs",
    [(n, c_void_p) for n in ("lengths", "q_start", "cum", "runs", "meta")]
    + [(n, c_int) for n in ("batch", "n_runs", "unit", "window", "min_units")],
)
_QueryArgs = structure(
    "QueryArgs",
    [("q", c_void_p), ("q_stride", c_longlong)]
    + [(n, c_void_p) for n in ("wq", "sink", "out", "aux")]
    + [("tokens", c_int), ("kv_heads", c_int), ("scale", c_float), ("sink_scale", c_float)],
)
_DecodeArgs = structure(
    "DecodeArgs",
    [("cache", c_void_p), ("page_stride", c_longlong), ("head_stride", c_longlong)]
    + [("table", c_void_p), ("table_stride", c_int)]
    + [(n, c_void_p) for n in ("lengths", "q_start", "cum", "runs", "q", "aux", "po", "pm")]
    + [(n, c_int) for n in ("batch", "kv_heads", "row_blocks", "rows", "slots", "window")]
    + [("k_factor", c_float), ("cap", c_float)],
)
_MergeArgs = structure(
    "MergeArgs",
    [(n, c_void_p) for n in ("po", "pm", "cum", "meta", "q_start", "wo", "centre", "sink", "out")]
    + [("out_stride", c_longlong)]
    + [(n, c_int) for n in ("batch", "kv_heads", "row_blocks", "rows", "rows_block", "slots", "take")],
)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How decode.cu is cut.

    Attributes:
        row_tiles: blocks of 8 query rows; tokens: 16-token tiles a warp takes at once; stages: of its copy ring.
        blocks: resident on a multiprocessor.
    """

    row_tiles: int
    tokens: int
    stages: int
    blocks: int

    def shared(self, layout: PageLayout) -> int:
        """Bytes of shared memory a thread block."""
        ck, cv = chunks(layout.head_size), chunks(layout.head_size_v)
        ring = WARPS * self.stages * self.tokens * (256 * (ck + cv) + 64)
        exchange = 4 * WARPS * 8 * (layout.head_size_v + 4 + 3)
        operand = self.row_tiles * ck * 512 if self.row_tiles > 1 else 0
        return operand + max(ring, exchange)


def choose_tiling(layout: PageLayout, rows: int, shared_limit: int, few: bool = False) -> Tiling:
    """Tiling for ``rows`` query rows a KV head on a multiprocessor with ``shared_limit`` bytes of shared memory.

    ``few``: so few sequences that the merge counts, and fewer, larger runs win.
    """
    wide = max(layout.head_size, layout.head_size_v)
    row_tiles = -(-rows // 8)
    if row_tiles > (3 if wide <= 128 else 2):
        row_tiles = 2  # several blocks of 16 rows: four accumulators' worth of registers spills
    blocks = {1: 4, 2: 2, 3: 2}[row_tiles] if wide <= 128 else {1: 3, 2: 2}[row_tiles]
    if few:
        blocks = min(blocks, 3)
    tokens = 2 if row_tiles <= 2 and wide <= 128 else 1
    tiling = Tiling(row_tiles, tokens, 2, blocks)
    while tiling.blocks > 1 and tiling.blocks * (tiling.shared(layout) + 1024) > shared_limit:
        tiling = replace(tiling, blocks=tiling.blocks - 1)
    for stages in range(3, 5):
        deeper = replace(tiling, stages=stages)
        if deeper.blocks * (deeper.shared(layout) + 1024) <= shared_limit:
            tiling = deeper
    return tiling


@dataclass(frozen=True, slots=True)
class Plan:
    """What ``Decode.plan`` made for one step; tensors live on the GPU.

    Attributes:
        lengths: [B] int32 tokens of each sequence, the new ones included; query_start: [B + 1] int32.
        cum, runs, meta: see plan.cu.
        max_query: most new tokens of a sequence; tokens: rows of the query tensor.
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

    def tiling(self, batch: int, max_query: int) -> Tiling:
        """The cut for ``batch`` sequences of at most ``max_query`` query tokens."""
        few = 2 * batch * self.layout.num_kv_heads <= self.multiprocessors
        return self.forced_tiling or choose_tiling(self.layout, max_query * self.group, self.shared_limit, few)

    def runs(self, batch: int, max_query: int) -> tuple[int, int]:
        """Runs a KV head and row block (the fixed split count), and row blocks."""
        tiling = self.tiling(batch, max_query)
        row_blocks = -(-max_query * self.group // (8 * tiling.row_tiles))
        return max(self.multiprocessors * tiling.blocks // (self.layout.num_kv_heads * row_blocks), 1), row_blocks

    def plan(self, lengths: torch.Tensor, query_start: torch.Tensor, max_query: int) -> Plan:
        """Queue the plan of one step; the tensors it reads must keep their addresses in a graph.

        Args:
            lengths: [B] int32; query_start: [B + 1] int32; max_query: most query tokens of a sequence.
        """
        batch = lengths.numel()
        (n_runs, row_blocks), tiling = self.runs(batch, max_query), self.tiling(batch, max_query)
        kernel = load("plan", {"ACT_BF16": self.bf16}, self.device, dependent=False)
        numbers = torch.empty(batch + 2 + 8 * n_runs, dtype=torch.int32, device=self.device)
        runs, cum, meta = numbers[: 8 * n_runs], numbers[8 * n_runs : -1], numbers[-1:]
        unit = WARPS * 16 * tiling.tokens
        arguments = _PlanArgs(
            *map(pointer, (lengths, query_start, cum, runs, meta)), batch, n_runs, unit, self.window, 1
        )
        kernel.launch((1, 1), 1024, 0, arguments, stream_of(self.device))
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
        layout, tiling, heads = self.layout, plan.tiling, self.layout.num_kv_heads
        tokens, batch, stream = query.shape[0], plan.lengths.numel(), stream_of(self.device)
        parts = self._scratch_parts(tokens, batch, plan.max_query)
        if scratch is None:
            scratch = torch.empty(sum(parts), dtype=torch.uint8, device=self.device)
        starts = [scratch.data_ptr()]
        for size in parts[:-1]:
            starts.append(starts[-1] + size)
        q, aux, po, pm = starts
        common = {"GROUP": self.group, "SINK": int(params.sink), "ACT_BF16": self.bf16}
        rows, rows_block = plan.max_query * self.group, 8 * tiling.row_tiles
        slots = plan.n_runs + batch

        d = layout.head_size
        sink = pointer(params.sink_key) if params.sink else 0
        factor, sink_factor = query_scale(self.scale), self.scale * _LOG2E
        # This first kernel starts after everything queued before it has ended; so the second may read pages and plan
        # before it waits for the first.
        kernel = load("query", {"D": d, **common}, self.device, dependent=False)
        grid = min(-(-tokens * self.group // 16), max(self.multiprocessors * 4 // heads, 1))
        arguments = _QueryArgs(
            pointer(query), query.stride(0), pointer(params.wq), sink, q, aux, tokens, heads, factor, sink_factor
        )
        kernel.launch((grid, heads), 256 if d > 128 else 128, 0, arguments, stream)

        defines = {
            "D": d, "DV": layout.head_size_v, "NB": tiling.row_tiles, "NT": tiling.tokens, "ST": tiling.stages,
            "PS": layout.block_size, "SOFTCAP": int(self.soft_cap > 0), "WINDOW": int(self.window > 0),
            "MINB": tiling.blocks, **common,
        }  # fmt: skip
        shared = tiling.shared(layout)
        kernel = load("decode", defines, self.device, shared)
        cap = self.soft_cap * _LOG2E if self.soft_cap > 0 else 1.0
        planned = [pointer(t) for t in (plan.lengths, plan.query_start, plan.cum, plan.runs)]
        kernel.launch(
            (plan.n_runs, heads * plan.row_blocks),
            WARPS * 32,
            shared,
            _DecodeArgs(
                pointer(cache), cache.stride(0), cache.stride(1), pointer(block_table), block_table.stride(0),
                *planned, q, aux, po, pm, batch, heads, plan.row_blocks, rows, slots, self.window,
                2.0**24 / QUERY_GAIN / cap, cap,
            ),
            stream,
        )  # fmt: skip

        kernel = load("merge", {"DV": layout.head_size_v, **common}, self.device)
        total = batch * rows
        take = next((t for t in (16, 8, 4, 2) if -(-total // t) * heads >= self.multiprocessors), 1)
        kernel.launch(
            (-(-total // take), heads),
            256,
            0,
            _MergeArgs(
                po, pm, pointer(plan.cum), pointer(plan.meta), pointer(plan.query_start), pointer(params.wo),
                pointer(params.value_centre), pointer(params.sink_value) if params.sink else 0, pointer(out),
                out.stride(0), batch, heads, plan.row_blocks, rows, rows_block, slots, take,
            ),
            stream,
        )  # fmt: skip

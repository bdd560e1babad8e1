"""Decode over 4-bit pages: the plan of a step, and query operand, split attention and merge of a layer.

    decode = Decode(layout, query_heads, ...)             once for all layers of one shape
    plan = decode.plan(lengths, query_start, cut)         once a step; on the device, fixed grid
    decode(query, cache, block_table, plan, params, out)  once a layer; three launches, no host sync

The unit of work is a tile: up to a few query tokens of one sequence.  A decode or a draft's verification is one tile,
a prompt chunk is many, and all of them share the launches.  Everything is safe in CUDA graphs: grids and scratch depend
on the ``Cut`` alone, and that on numbers of sequences and tokens, never on lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from fourfold.errors import FourfoldError
from fourfold.kernels.cuda.compile import Kernel, load, pointer, stream_of
from fourfold.kernels.cuda.launch import Launch
from fourfold.kernels.cuda.pack import QUERY_GAIN, PackedParams, chunks, query_scale
from fourfold.kernels.cuda.tiling import Tiling, choose_tiling
from fourfold.layout import PageLayout

_LOG2E = math.log2(math.e)
_PLAN = "PPPPPPPiiiiiiii"
"""lengths, query_start, tiles, runs, cum, tile_of, meta, batch, tokens, tiles, queries a tile, runs, unit, window,
extra."""
_QUERY = "PqPPPPiiiff"
"""q and its stride, wq, sink, out, aux, tokens, KV heads, whether after store, scale, sink's scale."""
_DECODE = "PqqPiPPPPPPPiiiiiff"
"""cache and its strides, table and its stride, the plan's three, q, aux, po, pm, five sizes, k_factor, cap."""
_MERGE = "PPPPPPPPPPqiiiii"
"""po, pm, the plan's four, wo, centre, sink, out and its stride, five sizes."""
ANY = 1 << 30
"""Query tokens of a sequence, where nothing is known of them."""


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


@dataclass(frozen=True, slots=True)
class Cut:
    """How a step of so many sequences and tokens is cut, whatever their lengths.

    Attributes:
        tokens: query tokens of the step, padding included.
        queries: query tokens of a tile, at most; tiles: most tiles that the step can have.
        runs: of the keys, a KV head: thread blocks, and so the fixed split count.
        extra: what a tile costs beside its units of keys, in units; for runs of equal cost.
    """

    tokens: int
    queries: int
    tiles: int
    runs: int
    tiling: Tiling
    extra: int = 0

    @property
    def numbers(self) -> int:
        """int32 numbers of a ``Plan``."""
        return 8 * self.runs + 4 * self.tiles + self.tiles + 1 + self.tokens + 2


@dataclass(slots=True)
class Plan:
    """What ``Decode.plan`` made for one step; tensors live on the GPU, see plan.cu."""

    cut: Cut
    tiles: torch.Tensor
    runs: torch.Tensor
    cum: torch.Tensor
    tile_of: torch.Tensor
    meta: torch.Tensor
    steps: dict[tuple[Decode, bool, bool], _Step] = field(default_factory=dict)


class Decode:
    """Attention over 4-bit pages for all layers of one shape: decodes, drafts and short prompt chunks.

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
        self._tilings: dict[tuple[int, int], Tiling] = {}

    def cut(self, batch: int, tokens: int, max_query: int = ANY, usual: int | None = None) -> Cut:
        """The cut for ``batch`` sequences with ``tokens`` query tokens in all.

        Args:
            max_query: most query tokens of a sequence; left out, any number.
            usual: query tokens of those sequences that the tile should fit, ``max_query`` if None.
        """
        heads = self.layout.num_kv_heads
        rows = min(max_query if usual is None else usual, max_query) * self.group
        tiling = self._tiling(rows)
        queries = min(max_query, 8 * tiling.row_tiles // self.group)
        # every sequence may end in a tile that is not full
        tiles = batch if max_query <= queries else min(tokens, (tokens + batch * (queries - 1)) // queries)
        warps = 4
        if 2 * tiles * heads <= self.multiprocessors:
            warps = 8
        elif tiles * heads > self.multiprocessors * tiling.blocks:
            warps = 1
        tiling = self._tiling(rows, warps)
        # A chunk's tiles are many and short.  Measured with 320 decodes and a prompt of 181 tokens: 90 µs with 0, 77
        # with 1, 76 with 2; a batch of decodes alone is indifferent.
        extra = 2 if tiling.warps == 1 and max_query > queries else 0
        runs = max(self.multiprocessors * tiling.blocks // heads, 1)
        return Cut(tokens, queries, tiles, runs, tiling, extra)

    def _tiling(self, rows: int, warps: int = 4) -> Tiling:
        found = self.forced_tiling or self._tilings.get((rows, warps))
        if found is None:
            found = choose_tiling(self.layout, rows, self.shared_limit, warps)
            self._tilings[rows, warps] = found
        return found

    def plan(
        self, lengths: torch.Tensor, query_start: torch.Tensor, cut: Cut, numbers: torch.Tensor | None = None
    ) -> Plan:
        """Queue the plan of one step; the tensors it reads and writes must keep their addresses in a graph.

        Args:
            lengths: [B] int32 tokens of each sequence, the new ones included; query_start: [B + 1] int32, where its
                query tokens start.
            cut: for at least so many sequences and tokens.
            numbers: int32, 16-byte aligned, at least ``cut.numbers``; allocated here if None.
        """
        kernel = load("plan", {"ACT_BF16": self.bf16}, self.device, dependent=False)
        if numbers is None:
            numbers = torch.empty(cut.numbers, dtype=torch.int32, device=self.device)
        sizes = [4 * cut.tiles, 8 * cut.runs, cut.tiles + 1, cut.tokens, 2]
        parts = list(numbers[: cut.numbers].split(sizes))
        unit = cut.tiling.warps * 16 * cut.tiling.tokens
        Launch(kernel, _PLAN, (1, 1, 1), 1024)(
            stream_of(self.device), *map(pointer, (lengths, query_start, *parts)), lengths.numel(), cut.tokens,
            cut.tiles, cut.queries, cut.runs, unit, self.window, cut.extra,
        )  # fmt: skip
        return Plan(cut, *parts)

    def scratch_bytes(self, cut: Cut) -> int:
        """Bytes of scratch that ``__call__`` needs, for any lengths."""
        return sum(self._scratch_parts(cut))

    def _scratch_parts(self, cut: Cut) -> tuple[int, int, int, int]:
        partials = self.layout.num_kv_heads * (cut.runs + cut.tiles) * cut.queries * self.group
        rows = cut.tokens * self.query_heads
        parts = (
            rows * 64 * chunks(self.layout.head_size), rows * 8, partials * self.layout.head_size_v * 4, partials * 16
        )  # fmt: skip
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
        after_store: bool = False,
    ) -> None:
        """Queue the attention of one layer.

        Args:
            query: [tokens of the cut, H, D], heads and elements contiguous, token stride a multiple of 8.
            cache: [pages, HK, head_page_bytes] uint8, any page and head stride.
            block_table: [B, pages a sequence] int32.
            out: [tokens, H, Dv], heads and elements contiguous; rows of no sequence are left as they are.
            scratch: uint8, at least ``scratch_bytes``; allocated here if None.
            after_store: what was queued last is ``store``, and nothing before it still writes ``query``; the first
                kernel then runs beside it.
        """
        key = (self, params.sink, after_store)
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

    def kernels(self, tiling: Tiling, sink: bool, after_store: bool = False) -> tuple[Kernel, Kernel, Kernel]:
        """query, decode and merge for one cut, compiled if need be; ``sink``: position 0 has its own centre."""
        layout = self.layout
        common = {"GROUP": self.group, "SINK": int(sink), "ACT_BF16": self.bf16}
        defines = {
            "D": layout.head_size, "DV": layout.head_size_v, "NB": tiling.row_tiles, "NT": tiling.tokens,
            "NW": tiling.warps, "ST": tiling.stages, "PS": layout.block_size, "SOFTCAP": int(self.soft_cap > 0),
            "WINDOW": int(self.window > 0), "MINB": tiling.blocks, **common,
        }  # fmt: skip
        # The first kernel lets the second start when everything queued before it has ended; so the second may read
        # pages and plan before it waits for the first.
        return (
            load("query", {"D": layout.head_size, **common}, self.device, dependent=after_store),
            load("decode", defines, self.device, tiling.shared(layout)),
            load("merge", {"DV": layout.head_size_v, **common}, self.device),
        )

    def _prepare(self, plan: Plan, sink: bool, after_store: bool) -> _Step:
        layout, cut, heads = self.layout, plan.cut, self.layout.num_kv_heads
        d, tiling, total = layout.head_size, cut.tiling, cut.tokens * self.group
        rows, slots = cut.queries * self.group, cut.runs + cut.tiles
        query, decode, merge = self.kernels(tiling, sink, after_store)
        cap = self.soft_cap * _LOG2E if self.soft_cap > 0 else 1.0
        take = next((t for t in (16, 8, 4, 2) if -(-total // t) * heads >= self.multiprocessors), 1)
        partials = -(-cut.runs // cut.tiles) + (cut.tiles > 1)  # of a tile, if all are equally long
        sharers = next(s for s in (1, 2, 4, 8, 16) if s * take == 16 or 4 * s >= partials)
        blocks = min(-(-total // 16), max(self.multiprocessors * 4 // heads, 1))
        merges = min(-(-total // take), max(self.multiprocessors * 2 // heads, 1))
        return _Step(
            query=Launch(query, _QUERY, (blocks, heads, 1), 256 if d > 128 else 128),
            decode=Launch(decode, _DECODE, (cut.runs, heads, 1), tiling.warps * 32, tiling.shared(layout)),
            merge=Launch(merge, _MERGE, (merges, heads, 1), 256),
            query_tail=(cut.tokens, heads, int(after_store), query_scale(self.scale), self.scale * _LOG2E),
            decode_plan=tuple(map(pointer, (plan.tiles, plan.cum, plan.runs))),
            decode_tail=(heads, rows, slots, cut.tiles, self.window, 2.0**24 / QUERY_GAIN / cap, cap),
            merge_plan=tuple(map(pointer, (plan.tiles, plan.cum, plan.tile_of, plan.meta))),
            merge_tail=(cut.tokens, rows, slots, take, sharers),
            scratch=self._scratch_parts(cut),
        )

"""How decode.cu is cut into thread blocks, for a page, a number of query rows and a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fourfold.kernels.cuda.pack import chunks
from fourfold.layout import PageLayout


@dataclass(frozen=True, slots=True)
class Tiling:
    """How decode.cu is cut.

    Attributes:
        row_tiles: blocks of 8 query rows; tokens: 16-token tiles a warp takes at once; stages: of its copy ring.
        blocks: resident on a multiprocessor.
        warps: of a thread block.  They share a tile's keys and merge their results, so many warps make few partial
            results, and one warp none of the work of merging.
    """

    row_tiles: int
    tokens: int
    stages: int
    blocks: int
    warps: int = 4

    def shared(self, layout: PageLayout) -> int:
        """Bytes of shared memory a thread block."""
        ck, cv = chunks(layout.head_size), chunks(layout.head_size_v)
        # as in decode.cu: COPIES, and scales; several warps merge in the ring's last stages
        copies = max(self.stages * self.tokens * 256 * (ck + cv), 1024 * cv if self.warps > 1 else 0)
        scales = (self.stages - 1) * 64 * self.tokens + max(64 * self.tokens, 128 if self.warps > 1 else 0)
        operand = self.row_tiles * ck * 512 if self.row_tiles > 1 else 0
        return operand + self.warps * (copies + scales)


IN_FLIGHT = {8: 96 << 10, 4: 64 << 10, 1: 64 << 10}
"""Bytes of pages on their way to a multiprocessor, by warps of a block.  More is slower: one stage more costs 2% at
32 x 4,096 and 4% at 320 x 430; blocks of 8 warps ask for all of a short cache at once."""


def choose_tiling(layout: PageLayout, rows: int, shared_limit: int, warps: int = 4) -> Tiling:
    """Tiling for ``rows`` query rows a KV head on a multiprocessor with ``shared_limit`` bytes of shared memory.

    ``warps`` of a block: 8, and one block a multiprocessor, for so few sequences that the merge counts; 1 where there
    are more tiles than runs of 4 warps; else 4.
    """
    wide = max(layout.head_size, layout.head_size_v)
    row_tiles = -(-rows // 8)
    if row_tiles > (3 if wide <= 128 else 2):
        row_tiles = 2  # several blocks of 16 rows: four accumulators' worth of registers spills
    resident = {1: 16, 2: 8, 3: 8}[row_tiles] if wide <= 128 else {1: 12, 2: 8}[row_tiles]
    tokens = 2 if row_tiles <= 2 and wide <= 128 else 1
    tiling = Tiling(row_tiles, tokens, 2, 1 if warps == 8 else resident // warps, warps)
    while tiling.blocks > 1 and tiling.blocks * (tiling.shared(layout) + 1024) > shared_limit:
        tiling = replace(tiling, blocks=tiling.blocks - 1)
    stage = tokens * 256 * (chunks(layout.head_size) + chunks(layout.head_size_v))
    wanted = 1 - (-IN_FLIGHT[warps] // (tiling.blocks * warps * stage))
    for stages in range(3, min(wanted, 4) + 1):
        deeper = replace(tiling, stages=stages)
        if deeper.blocks * (deeper.shared(layout) + 1024) <= shared_limit:
            tiling = deeper
    return tiling

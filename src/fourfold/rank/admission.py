"""How many KV blocks a batch will need at its worst moment, if every answer is as long as predicted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV pool: ``total_blocks`` of ``block_size`` tokens; ``spare_tokens`` more may be held a request
    (speculative tokens and the like).  ``shared_blocks``: how many fewer than the sum of their contexts the
    running requests hold, because they share prefixes."""

    total_blocks: int
    block_size: int
    spare_tokens: int = 0
    shared_blocks: int = 0

    def blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens of one request."""
        return -(-(tokens + self.spare_tokens) // self.block_size)


def peak_blocks(context: NDArray[np.int64], remaining: NDArray[np.float64], pool: Pool) -> float:
    """Predicted peak of the blocks in use while the given requests decode side by side.

    All advance one token a step and leave when they are done, so the use of KV peaks just before one of them
    leaves.  With requests sorted by what is left, the peak is ``max_k sum_{j >= k} (context_j + remaining_k)``:
    far less than the sum of all final lengths.  ("Past-future" admission, arXiv 2507.10150, does the same with
    lengths drawn from history.)  Each request wastes half a block on average.

    Args:
        context: int64 [n], tokens each request holds, or will when its prompt is in.
        remaining: float64 [n], tokens each will still produce.
    """
    if not context.size:
        return 0.0
    order = np.argsort(-remaining, kind="stable")
    held = np.cumsum(context[order] + pool.spare_tokens)
    count = np.arange(1, context.size + 1)
    tokens = held + count * np.maximum(remaining[order], 0.0)
    return float((tokens / pool.block_size + 0.5 * count).max())

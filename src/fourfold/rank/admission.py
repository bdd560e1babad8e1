"""When a batch will run out of KV blocks, if every answer is as long as predicted."""

from __future__ import annotations

import math
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


def steps_that_fit(context: NDArray[np.int64], remaining: NDArray[np.float64], pool: Pool, limit: float) -> float:
    """Steps for which the given requests can decode side by side before they need more than ``limit`` blocks.

    All advance one token a step and leave when they are done.  With requests sorted by what is left, those up to k hold
    ``sum_{j <= k} context_j + (k + 1) t`` tokens at step t, until the k-th of them leaves: far less than the sum of all
    final lengths.  ("Past-future" admission, arXiv 2507.10150, does the same with lengths drawn from history.)  Each
    request wastes half a block on average.

    Args:
        context: int64 [n], tokens each request holds, or will when its prompt is in.
        remaining: float64 [n], tokens each will still produce.

    Returns:
        infinity if they all end before that.
    """
    if not context.size:
        return math.inf
    order = np.argsort(-remaining, kind="stable")
    left = np.maximum(remaining[order], 0.0)
    count = np.arange(1, context.size + 1)
    held = np.cumsum(context[order] + pool.spare_tokens)
    full = (limit - 0.5 * count) * pool.block_size  # tokens of so many requests
    at = (full - held) / count
    begins = np.append(left[1:], 0.0)  # request k + 1 has left, and the first k hold what there is
    late = at < left
    return float(np.maximum(at, begins)[late].min()) if late.any() else math.inf

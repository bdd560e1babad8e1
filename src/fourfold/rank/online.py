"""What the scheduler learns while it serves: lengths by bucket, and whether the ranker is worth following."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from fourfold.rank.lengthmap import LEVELS, LengthMap, isotonic
from fourfold.rank.metrics import kendall_tau, null_deviation

F64 = NDArray[np.float64]
STEP = 16
"""Tokens between two columns of the table of predicted totals."""
GROWTH = 1.25
"""An answer longer than all that were seen is taken to be this much longer in the end."""


MOST_ENDED = 2048
"""Requests that may have ended before one that arrived earlier; then that one no longer counts for tau."""


class LengthModel:
    """Answer lengths by bucket of the score: the ranker's calibration, corrected by finished requests.

    Each bucket keeps its last ``window`` lengths.  The calibration counts as ``prior`` observations a bucket,
    scaled by the ratio of observed to predicted tokens over all buckets, so that a model whose answers are
    three times longer is learnt from a few dozen requests and the order within buckets from a few hundred.
    """

    def __init__(
        self, lengths: LengthMap, *, level: float = 0.5, window: int = 256, prior: int = 48, every: int = 32
    ) -> None:
        """``level``: quantile that admission reserves; ``every``: finished requests between two updates at first, then
        up to eight times as many: an update takes a millisecond or more of the engine's loop."""
        self._map = lengths
        self._level, self._prior, self._every = level, prior, every
        self._seen: list[deque[float]] = [deque(maxlen=window) for _ in range(lengths.buckets)]
        self._arrived: dict[int, tuple[float, float] | None] = {}
        self._ended = 0  # of those
        self._pairs: deque[tuple[float, float]] = deque(maxlen=512)
        self._since = self._taught = 0
        self.means = lengths.means.copy()
        self.quantiles = lengths.quantiles.copy()
        self.tau: float | None = None
        self.useful = True
        self.switches = 0
        self._build()

    def bucket(self, score: float) -> int:
        return int(self._map.bucket(np.array([score]))[0])

    def expected(self, bucket: int) -> float:
        """Mean answer length of a bucket, tokens."""
        return float(self.means[bucket])

    @property
    def longest(self) -> float:
        """Mean answer length of the longest bucket, tokens."""
        return float(self.means[-1])

    @property
    def ceiling(self) -> float:
        """99% quantile of the longest bucket, tokens: what counts as long when lengths are known."""
        return float(self.quantiles[-1, -2])

    def totals(self, buckets: NDArray[np.int64], generated: NDArray[np.int64]) -> F64:
        """Tokens that answers will have, given those they have: the ``level`` quantile of what is left.

        For an answer of g tokens: with F the bucket's distribution, the quantile F(g) + level * (1 - F(g)).

        Args:
            buckets, generated: int64 [n].

        Returns:
            float64 [n], more than ``generated``.
        """
        column = np.minimum(generated // STEP, self._totals.shape[1] - 1)
        beyond = generated * GROWTH + STEP
        known = self._totals[buckets, column]
        return np.maximum(np.where(known > generated, known, beyond), generated + 1.0)

    def _build(self) -> None:
        limit = int(self.quantiles[:, -1].max()) + STEP
        grid = np.arange(0, limit + STEP, STEP, dtype=np.float64)
        rows = []
        for row in self.quantiles:
            # a strictly increasing copy, so that both directions of the interpolation are functions
            strict = row + np.arange(row.size) * 1e-6
            done = np.interp(grid, strict, LEVELS, left=0.0, right=1.0)
            total = np.interp(done + self._level * (1.0 - done), LEVELS, strict)
            rows.append(np.where(grid >= row[-1], 0.0, total))
        self._totals = np.stack(rows)

    def arrive(self, key: int) -> None:
        """A request that will end by ``observe`` or ``forget`` under the same key; keys arrive in their order."""
        self._arrived[key] = None

    def forget(self, key: int) -> None:
        """The request has gone and teaches nothing; no matter if it has ended already."""
        if self._arrived.get(key, ()) is None:
            del self._arrived[key]

    def observe(self, key: int, score: float, bucket: int, tokens: int, *, complete: bool = True) -> None:
        """Learn from a finished request.

        ``complete`` is False for an answer that was cut at its limit: its length is then only a lower bound,
        and it teaches something only if it is longer than predicted already.
        """
        if not complete and tokens <= self.means[bucket]:
            self.forget(key)
            return
        self._seen[bucket].append(float(tokens))
        if key in self._arrived:
            self._arrived[key] = (score, float(tokens))
            self._ended += 1
        self._since += 1
        self._taught += 1
        if self._since >= min(max(self._every, self._taught // 8), 8 * self._every):  # the more is known, the rarer
            self._since = 0
            self._update()

    def _update(self) -> None:
        counts = np.array([len(seen) for seen in self._seen], dtype=np.float64)
        sums = np.array([sum(seen) for seen in self._seen])
        predicted = counts @ self._map.means
        # the prior has weight here too, or the first few short answers (they finish first) would shrink everything
        anchor = self._prior * float(self._map.means.mean())
        ratio = (anchor + sums.sum()) / (anchor + predicted)
        weight = self._prior + counts
        self.means = isotonic((self._prior * ratio * self._map.means + sums) / weight, weight)
        quantiles = self._map.quantiles * ratio
        for b, seen in enumerate(self._seen):
            if seen:
                observed = np.quantile(np.fromiter(seen, dtype=np.float64), LEVELS)
                quantiles[b] = (self._prior * quantiles[b] + counts[b] * observed) / weight[b]
        self.quantiles = np.stack([isotonic(quantiles[:, j], weight) for j in range(LEVELS.size)], axis=1)
        self._build()
        self._judge()

    def _judge(self) -> None:
        """Tau over the last requests; useless below one null deviation over 0.02, useful again above three.

        Requests count in the order in which they arrived, each once all before it have ended.  Those that end at about
        the same time were predicted alike where the order is by prediction, and tau among them says little: 0.09 was
        measured for a ranker of 0.37 on a queue of five seconds.
        """
        while self._arrived:
            key, pair = next(iter(self._arrived.items()))
            if pair is not None:
                self._pairs.append(pair)
                self._ended -= 1
            elif self._ended <= MOST_ENDED:
                break
            del self._arrived[key]
        pairs = np.array(self._pairs)
        if len(pairs) < 96:
            return
        self.tau = kendall_tau(pairs[:, 0], pairs[:, 1])
        noise = null_deviation(len(pairs))
        threshold = 0.02 + (1.0 if self.useful else 3.0) * noise
        if self.useful != (self.tau > threshold):
            self.useful = not self.useful
            self.switches += 1

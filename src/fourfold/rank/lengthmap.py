"""From a score to tokens: a monotone, calibrated distribution of answer lengths for every score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.errors import FourfoldError

F64 = NDArray[np.float64]
LEVELS = np.array([0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0])
"""Quantile levels that are kept for each bucket."""


@dataclass(frozen=True, slots=True)
class LengthMap:
    """Length distribution by bucket of the score.

    Buckets are equally filled by the calibration data; ``bucket`` finds one by its edges.  Tables do not
    decrease from bucket to bucket: a higher score never means a shorter prediction.

    Attributes:
        edges: float64 [buckets - 1], ascending: bucket b holds scores in [edges[b-1], edges[b]).
        quantiles: float64 [buckets, len(LEVELS)], tokens.
        means: float64 [buckets], tokens.
    """

    edges: F64
    quantiles: F64
    means: F64

    def __post_init__(self) -> None:
        buckets = self.means.size
        shapes = self.edges.shape == (buckets - 1,) and self.quantiles.shape == (buckets, LEVELS.size)
        finite = all(np.isfinite(a).all() for a in (self.edges, self.quantiles, self.means))
        if not (shapes and buckets and finite and (np.diff(self.edges) >= 0).all()):
            raise FourfoldError(
                "the ranker's length map is damaged", why="its tables have the wrong shape, order or values"
            )

    @classmethod
    def fit(cls, scores: F64, lengths: F64, buckets: int = 16) -> LengthMap:
        """Calibrate on scores and lengths (tokens) that the ranker was not trained on."""
        if scores.size < buckets:
            buckets = max(1, scores.size)
        edges = np.asarray(np.quantile(scores, np.arange(1, buckets) / buckets), dtype=np.float64)
        which = np.searchsorted(edges, scores, side="right")
        everything = np.quantile(lengths, LEVELS)
        quantiles = np.tile(everything, (buckets, 1))
        means = np.full(buckets, lengths.mean())
        sizes = np.bincount(which, minlength=buckets).astype(np.float64)
        for b in range(buckets):
            if sizes[b]:
                quantiles[b] = np.quantile(lengths[which == b], LEVELS)
                means[b] = lengths[which == b].mean()
        sizes = np.maximum(sizes, 1e-6)
        columns = [isotonic(quantiles[:, j], sizes) for j in range(LEVELS.size)]
        return cls(edges, np.stack(columns, axis=1), isotonic(means, sizes))

    @property
    def buckets(self) -> int:
        return self.means.size

    def bucket(self, scores: F64) -> NDArray[np.int64]:
        """Bucket of each score; NaN falls into the middle one."""
        found = np.searchsorted(self.edges, scores, side="right")
        return np.where(np.isnan(scores), self.buckets // 2, found)

    def tokens(self, scores: F64) -> F64:
        """Expected answer length in tokens, float64, same shape as ``scores``."""
        return self.means[self.bucket(scores)]


def isotonic(values: F64, weights: F64) -> F64:
    """Closest non-decreasing sequence in weighted least squares (pool adjacent violators, Ayer et al., 1955)."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (v1, w1, n1), (v2, w2, n2) = blocks[-2], blocks.pop()
            blocks[-1] = ((v1 * w1 + v2 * w2) / (w1 + w2), w1 + w2, n1 + n2)
    return np.concatenate([np.full(count, value) for value, _, count in blocks])

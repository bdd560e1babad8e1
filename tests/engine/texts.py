"""Texts of different batches: the same, or parted where it hung by a hair.

The last bits of a product depend on the size of the batch.  An element in the middle between two codes then falls
either way, later layers see another row, and log-probabilities move by as much as four bits cost (up to 0.3 on
SmolLM2; 0.00002 without quantising).  So two texts may part where the two best tokens are as close as that.
"""

from __future__ import annotations

HAIR = 0.35
"""Lead of the best token, in nats, below which texts of different batches may part."""


def assert_same(texts: list[list[int]], wanted: list[list[int]], gaps: list[list[float]], share: float = 0.125) -> None:
    """The same texts, but for at most ``share`` that part from ``wanted`` by a hair; ``gaps``: of ``wanted``."""
    parted = []
    for text, other, leads in zip(texts, wanted, gaps, strict=True):
        place = next((i for i, (a, b) in enumerate(zip(text, other, strict=True)) if a != b), None)
        if place is not None:
            parted.append(leads[place])
    assert all(lead < HAIR for lead in parted), f"texts part where the best token led by {max(parted):.2f}"
    assert len(parted) <= share * len(texts), f"{len(parted)} of {len(texts)} texts part"

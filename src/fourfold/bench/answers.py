"""Answers that must not count as fast: empty, cut off, failed, or degenerate.

Degenerate means that the text goes round in circles.  The text is split into words, and the share of its
bigrams (pairs of neighbouring words) that occurred before in the same text is taken.  Ordinary prose of a few hundred
words repeats 5–30% of its bigrams, lists and code up to about half; a loop tends to 1.  A text counts as degenerate
from ``REPEATED_BIGRAMS`` on, if it is at least ``MIN_BIGRAMS`` long.  A text without spaces is looked at by character.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

REPEATED_BIGRAMS = 0.7
MIN_BIGRAMS = 24
CUT = "cut stream"
"""The start of the error that a stream without a finish_reason gets (see ``fourfold.bench.driver``)."""


def repeated_bigrams(text: str) -> float:
    """Share of bigrams that occurred before, 0.0 to 1.0; 0.0 for texts too short to judge."""
    words: Sequence[str] = text.split()
    if len(words) <= MIN_BIGRAMS and len(text) > 8 * MIN_BIGRAMS:
        words = text  # one long run without spaces: a loop of characters
    bigrams = list(itertools.pairwise(words))
    if len(bigrams) < MIN_BIGRAMS:
        return 0.0
    return 1.0 - len(set(bigrams)) / len(bigrams)


def is_degenerate(text: str) -> bool:
    """Whether the text goes round in circles (see the module's text)."""
    return repeated_bigrams(text) >= REPEATED_BIGRAMS


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Counts over all requests of a run.

    Attributes:
        total: requests sent.
        failed: requests with an error other than a cut stream.
        cut: streams that ended without a finish_reason.
        empty: finished answers without text.
        degenerate: finished answers that go round in circles.
    """

    total: int
    failed: int
    cut: int
    empty: int
    degenerate: int

    def valid(self, max_degenerate: float = 0.0) -> bool:
        """Nothing failed, was cut or is empty, and at most this share of the answers is degenerate."""
        return not (self.failed or self.cut or self.empty) and self.degenerate <= max_degenerate * self.total

    def as_json(self) -> dict[str, int]:
        """Plain counts."""
        return {name: getattr(self, name) for name in ("total", "failed", "cut", "empty", "degenerate")}


def more_loops(base: int, ours: int, total: int) -> float:
    """How likely chance gives one of two runs ``ours`` or more of their ``base + ours`` loops (Fisher's exact test).

    Args:
        base, ours: degenerate answers of either run.
        total: answers of each.
    """
    loops = base + ours
    ways = sum(math.comb(total, k) * math.comb(total, loops - k) for k in range(ours, min(loops, total) + 1))
    return ways / math.comb(2 * total, loops)


def check(texts: Sequence[str], errors: Sequence[str]) -> AnswerCheck:
    """Count what went wrong; ``errors[i]`` is empty where request i came back whole."""
    cut = sum(error.startswith(CUT) for error in errors)
    whole = [text for text, error in zip(texts, errors, strict=True) if not error]
    return AnswerCheck(
        total=len(texts),
        failed=sum(bool(error) for error in errors) - cut,
        cut=cut,
        empty=sum(not text.strip() for text in whole),
        degenerate=sum(is_degenerate(text) for text in whole),
    )

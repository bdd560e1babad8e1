"""What every ranker is: a thing that says which answer will be longer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fourfold.rank.lengthmap import LengthMap

F64 = NDArray[np.float64]


class Ranker(ABC):
    """Scores prompts; higher means a longer expected answer.

    Scores of one ranker compare with each other and with nothing else.  ``lengths`` turns them into tokens,
    because admission needs tokens and not only an order.
    """

    name: str
    lengths: LengthMap

    @abstractmethod
    def score(self, prompts: Sequence[str]) -> F64:
        """float64 [len(prompts)], finite; one prompt always gets the same score (a transformer: up to rounding)."""

    def predict_tokens(self, prompts: Sequence[str]) -> F64:
        """Expected answer length in tokens, float64 [len(prompts)]."""
        return self.lengths.tokens(self.score(prompts))

"""Find a ranker by what an operator writes: nothing, a file, or a directory."""

from __future__ import annotations

import logging
from pathlib import Path

from fourfold.errors import FourfoldError
from fourfold.rank.base import Ranker
from fourfold.rank.ngram import NgramRanker

logger = logging.getLogger(__name__)


def load_ranker(path: str | Path | None = None, *, device: str = "cpu", required: bool = True) -> Ranker | None:
    """The ranker at ``path``: None or "default" is the embedded one, a file is an n-gram ranker, a directory a
    transformer.

    Args:
        required: False turns an unusable ranker into a warning and None, which the policy serves first-come.

    Raises:
        FourfoldError: if it cannot be used and is required.
    """
    try:
        if path is None or str(path) == "default":
            return NgramRanker.load()
        if Path(path).is_dir():
            from fourfold.rank.transformer import TransformerRanker

            return TransformerRanker.load(Path(path), device=device)
        return NgramRanker.load(Path(path))
    except FourfoldError as error:
        if required:
            raise
        logger.warning("%s Requests are served first-come.", error)
        return None

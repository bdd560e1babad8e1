"""The embedded ranker: one weight for each hashed feature, in a safetensors file of half a megabyte."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fourfold.errors import FourfoldError
from fourfold.files import write_atomically
from fourfold.rank.base import Ranker
from fourfold.rank.features import BUCKETS, FEATURES_VERSION, prompt_codes, unpack
from fourfold.rank.lengthmap import LEVELS, LengthMap

F64 = NDArray[np.float64]
KIND = "fourfold-ngram-ranker"
DEFAULT_FILE = Path(__file__).parent / "data" / "sharegpt.safetensors"
_FIX = "pass another file with --ranker, train one with `fourfold ranker train`, or leave the flag out"


class NgramRanker(Ranker):
    """Linear ranker over ``fourfold.rank.features``.

    Attributes:
        weights: float32 [BUCKETS] (float16 values; the file stores float16).
        metadata: what the file records: data, split, held-out tau, features version.
    """

    name = "ngram"

    def __init__(self, weights: NDArray[np.floating], lengths: LengthMap, metadata: Mapping[str, str]) -> None:
        self.weights = weights.astype(np.float16).astype(np.float32)
        self.lengths = lengths
        self.metadata = dict(metadata)

    def score(self, prompts: Sequence[str]) -> F64:
        return self.score_codes([prompt_codes(prompt) for prompt in prompts])

    def score_codes(self, rows: Sequence[NDArray[np.uint32]]) -> F64:
        """Scores of prompts that are already hashed (``features.prompt_codes``)."""
        scores = np.empty(len(rows))
        for i, codes in enumerate(rows):
            buckets, values = unpack(codes)
            scores[i] = self.weights.take(buckets) @ values
        return scores

    def save(self, path: Path) -> Path:
        """Write the ranker as safetensors (atomically)."""
        tensors = {
            "weights": self.weights.astype(np.float16),
            "length_edges": self.lengths.edges,
            "length_quantiles": self.lengths.quantiles,
            "length_means": self.lengths.means,
            "length_levels": LEVELS,
        }
        metadata = {**self.metadata, "kind": KIND, "features_version": str(FEATURES_VERSION)}
        # safetensors writes metadata in hash order, which differs from run to run: one JSON string does not
        flat = {"fourfold": json.dumps(metadata, sort_keys=True)}
        return write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=flat))

    @classmethod
    def load(cls, path: Path | None = None) -> NgramRanker:
        """Read a ranker; None reads the one in the package.

        Raises:
            FourfoldError: for a file that is missing, damaged, of another kind, or of other features.
        """
        file = path or DEFAULT_FILE
        if not file.is_file():
            raise FourfoldError(f"there is no ranker file {file}", fix=_FIX)
        try:
            with safe_open(file, framework="numpy") as opened:
                metadata = json.loads((opened.metadata() or {}).get("fourfold", "{}"))
                names = set(opened.keys())
                tensors = {name: opened.get_tensor(name) for name in names}
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise FourfoldError(f"the ranker file {file} cannot be read", why=str(error), fix=_FIX) from None
        return cls._checked(file, tensors, metadata)

    @classmethod
    def _checked(cls, file: Path, tensors: dict[str, NDArray[Any]], metadata: object) -> NgramRanker:
        def refuse(why: str) -> FourfoldError:
            return FourfoldError(f"the ranker file {file} cannot be used", why=why, fix=_FIX)

        if not isinstance(metadata, dict) or metadata.get("kind") != KIND:
            raise refuse("it is not a ranker of this kind")
        if metadata.get("features_version") != str(FEATURES_VERSION):
            found = metadata.get("features_version")
            raise refuse(f"it was trained on features {found}; this version computes features {FEATURES_VERSION}")
        missing = {"weights", "length_edges", "length_quantiles", "length_means", "length_levels"} - tensors.keys()
        if missing:
            raise refuse(f"it lacks {', '.join(sorted(missing))}")
        weights = tensors["weights"]
        if weights.shape != (BUCKETS,) or not np.isfinite(weights).all():
            raise refuse(f"its weights are not {BUCKETS} finite numbers")
        if not np.array_equal(tensors["length_levels"], LEVELS):
            raise refuse("its length map has other quantile levels")
        try:
            lengths = LengthMap(tensors["length_edges"], tensors["length_quantiles"], tensors["length_means"])
        except FourfoldError as error:
            raise refuse(error.why or error.what) from None
        return cls(weights, lengths, {str(k): str(v) for k, v in metadata.items()})

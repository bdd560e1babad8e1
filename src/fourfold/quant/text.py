"""The calibration text as token sequences."""

from __future__ import annotations

import hashlib
import random
from importlib import resources
from pathlib import Path
from typing import Any

from fourfold.errors import FourfoldError

WINDOW, SHORT, SHORT_COUNT, MAX_TOKENS = 512, 8, 32, 6144


def read_text(path: str) -> str:
    """The text at ``path``, or the one that ships with Fourfold for an empty path."""
    if not path:
        return resources.files("fourfold.quant").joinpath("calibration.txt").read_text(encoding="utf-8")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FourfoldError(
            f"calibration text {path} cannot be read", why=str(error), fix="pass a UTF-8 text file"
        ) from error
    if len(text) < 1000:
        raise FourfoldError(
            f"calibration text {path} is too short", why=f"it has {len(text)} characters", fix="pass at least 1,000"
        )
    return text


def text_digest(path: str) -> str:
    """Identifies a calibration text in cache names."""
    return hashlib.sha256(read_text(path).encode()).hexdigest()[:12]


def calibration_windows(path: str, tokenizer: Any, vocabulary: int, max_length: int) -> list[list[list[int]]]:
    """Forward passes, each a list of sequences that start at position 0.

    Long windows give the statistics of ordinary positions; many short sequences with different first tokens give the
    mean of position 0 (the attention sink).  A tokenizer's own beginning-of-sequence token comes first where it adds
    one, since that is what serving will see.  Without a tokenizer (random models) seeded random tokens stand in.
    """
    if tokenizer is None:
        generator = random.Random(0)
        ids = [generator.randrange(vocabulary) for _ in range(2048)]
        prefix: list[int] = []
    else:
        ids = [t for t in tokenizer(read_text(path), add_special_tokens=False)["input_ids"] if t < vocabulary]
        whole = tokenizer("a")["input_ids"]
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        prefix = whole[: len(whole) - len(bare)] if whole[len(whole) - len(bare) :] == bare else []
        prefix = [t for t in prefix if t < vocabulary][:1]
    ids = ids[:MAX_TOKENS]
    size = max(2, min(WINDOW, max_length) - len(prefix))
    windows = [[prefix + ids[i : i + size]] for i in range(0, max(1, len(ids) - size // 2), size)]
    step = max(1, len(ids) // SHORT_COUNT)
    short = [prefix + ids[i : i + min(SHORT, size)] for i in range(0, len(ids) - SHORT, step)][:SHORT_COUNT]
    # short sequences share passes of about a window's tokens
    per_pass = max(1, size // (SHORT + len(prefix)))
    return windows + [short[i : i + per_pass] for i in range(0, len(short), per_pass)]

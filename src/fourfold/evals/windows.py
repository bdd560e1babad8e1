"""Non-overlapping windows of tokens, in order, over a text."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from fourfold.errors import FourfoldError


def default_text() -> str:
    """The text that ships with the package: English prose, written for it."""
    return resources.files("fourfold.evals").joinpath("text.txt").read_text(encoding="utf-8")


def read_text(path: Path | None) -> str:
    """A UTF-8 text file, or the built-in text.

    Raises:
        FourfoldError: there is no such file, or it is not text.
    """
    if path is None:
        return default_text()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FourfoldError(f"{path} cannot be read as text", why=str(error), fix="pass a UTF-8 text file") from error


def cut_windows(tokenizer: Any, text: str, windows: int, window_tokens: int) -> list[list[int]]:
    """The first ``windows`` windows of ``window_tokens`` tokens each.

    The text is tokenised once.  A beginning-of-sequence token starts every window if, and only if, the tokenizer adds
    one by itself; it takes one of the window's places.

    Raises:
        FourfoldError: the text is too short, or a window is too small to predict anything.
    """
    if window_tokens < 8 or windows < 1:
        raise FourfoldError("a window needs at least 8 tokens, and there must be one", fix="raise --window-tokens")
    plain = list(tokenizer(text, add_special_tokens=False).input_ids)
    marked = list(tokenizer("a").input_ids)
    bos = getattr(tokenizer, "bos_token_id", None)
    start = [bos] if bos is not None and marked and marked[0] == bos else []
    step = window_tokens - len(start)
    have = len(plain) // step
    if have < windows:
        raise FourfoldError(
            f"the text has {len(plain):,} tokens: {have} windows of {window_tokens}, not {windows}",
            fix="pass a longer --text, or lower --windows or --window-tokens",
        )
    return [start + plain[i * step : (i + 1) * step] for i in range(windows)]

"""Windows: in order, without overlap, with a BOS token only where the tokenizer adds one."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fourfold.errors import FourfoldError
from fourfold.evals.perplexity import engine_arguments
from fourfold.evals.windows import cut_windows, default_text, read_text


def test_windows_are_the_text_in_order(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    ids = tokenizer(default_text(), add_special_tokens=False).input_ids
    windows = cut_windows(tokenizer, default_text(), 5, 128)
    assert [token for window in windows for token in window] == ids[: 5 * 128]


def test_bos_takes_a_place_where_the_tokenizer_adds_it(tiny_llama: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    ids = tokenizer(default_text(), add_special_tokens=False).input_ids
    windows = cut_windows(tokenizer, default_text(), 3, 64)
    assert all(window[0] == 0 and len(window) == 64 for window in windows)
    assert [token for window in windows for token in window[1:]] == ids[: 3 * 63]


def test_a_short_text_is_refused(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    with pytest.raises(FourfoldError, match="0 windows of 4096, not 2"):
        cut_windows(tokenizer, "a short text", 2, 4096)
    with pytest.raises(FourfoldError, match="at least 8"):
        cut_windows(tokenizer, default_text(), 2, 4)


def test_the_built_in_text_is_long_enough_for_the_defaults() -> None:
    assert len(default_text().split()) > 1500


def test_unreadable_texts(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    for path in (tmp_path / "bytes", tmp_path / "absent"):
        with pytest.raises(FourfoldError, match="cannot be read"):
            read_text(path)


def test_chunks_that_leave_one_prediction_are_refused() -> None:
    with pytest.raises(FourfoldError, match="one prediction"):
        engine_arguments(130, chunk_tokens=64)
    assert engine_arguments(128, chunk_tokens=64)["max_num_batched_tokens"] == 64
    assert engine_arguments(512)["max_num_batched_tokens"] >= 512

"""Which of the logits that vLLM computes are kept as those of a window."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fourfold.evals.capture import Capture


@pytest.fixture
def compute() -> tuple[Capture, SimpleNamespace]:
    """A model whose logits are its hidden states, wrapped."""
    capture, model = Capture(), SimpleNamespace(compute_logits=lambda hidden: hidden)
    capture.install(model)
    return capture, model


@pytest.mark.parametrize("extra", [0, 1], ids=["first model runner", "second: the last token too"])
def test_chunks_are_joined_and_rows_to_sample_from_left_out(
    compute: tuple[Capture, SimpleNamespace], extra: int
) -> None:
    capture, model = compute
    rows = torch.randn(5 + extra, 3)
    for part in (rows[:2], rows[:1], rows[2:], rows[-1:]):
        model.compute_logits(part)
    assert torch.equal(capture.take(5), rows[:5])


@pytest.mark.parametrize("rows", [4, 7])
def test_any_other_number_of_rows_is_an_error(compute: tuple[Capture, SimpleNamespace], rows: int) -> None:
    capture, model = compute
    model.compute_logits(torch.randn(rows, 3))
    with pytest.raises(RuntimeError, match=f"{rows} prompt positions, not 5"):
        capture.take(5)

"""Perplexity and KL against closed forms and against torch's own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fourfold.evals.divergence import Store, Totals, log_probabilities


def test_kl_of_two_coins() -> None:
    base, other = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    totals = Totals()
    totals.add_divergence(base, other)
    assert totals.kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-6)
    assert totals.agree == 0 or base.argmax() == other.argmax()


def test_matches_torch_on_random_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(40, 1000, generator=generator) * 3 for _ in range(2))
    p, q = log_probabilities(a.bfloat16()), log_probabilities(b.half())
    targets = torch.randint(1000, (40,), generator=generator)
    totals = Totals()
    for i in range(0, 40, 16):
        totals.add_divergence(p[i : i + 16], q[i : i + 16])
        totals.add_nll(q[i : i + 16], targets[i : i + 16])
    expected = torch.nn.functional.kl_div(q.double(), p.double(), reduction="sum", log_target=True)
    assert totals.kl == pytest.approx(float(expected), rel=1e-5)
    assert totals.agree == int((p.argmax(1) == q.argmax(1)).sum())
    assert totals.positions == 40
    expected_nll = torch.nn.functional.nll_loss(q.double(), targets)
    assert totals.perplexity == pytest.approx(math.exp(float(expected_nll)), rel=1e-6)


def test_equal_distributions_and_impossible_tokens() -> None:
    logits = torch.tensor([[1.0, -math.inf, 2.0]])
    p = log_probabilities(logits)
    totals = Totals()
    totals.add_divergence(p, p)
    assert totals.kl == 0.0
    assert totals.agree == 1


def test_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    totals = Totals()
    totals.add_nll(log_probabilities(torch.zeros(7, 64)), torch.arange(7))
    assert totals.perplexity == pytest.approx(64.0, rel=1e-6)


def test_store_returns_the_rows_it_was_given(tmp_path: Path) -> None:
    rows = torch.randn(10, 33)
    store = Store(tmp_path, 33)
    store.write(2, rows[:6], append=False)
    store.write(2, rows[6:], append=True)
    assert torch.equal(store.read(2, 4, 5), rows[4:9])
    with pytest.raises(ValueError, match="fewer"):
        store.read(2, 8, 3)
    store.write(2, rows[:1], append=False)
    assert store.path(2).stat().st_size == 4 * 33

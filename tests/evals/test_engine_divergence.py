"""Perplexity and KL through a real vLLM engine, against transformers on the same weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.evals.perplexity import engine_arguments, evaluate
from fourfold.evals.windows import cut_windows, default_text
from fourfold.modes import MODES, environment

pytestmark = pytest.mark.engine


def test_engine_gives_the_perplexity_of_transformers_and_no_divergence_from_itself(tiny_llama: Path) -> None:
    windows = cut_windows(AutoTokenizer.from_pretrained(tiny_llama), default_text(), 2, 96)
    environ = environment(MODES["bf16"], Settings())
    plan = {
        "bf16": (engine_arguments(96, dtype="float32", kv_bytes=8 << 20), environ),
        "chunked": (engine_arguments(96, dtype="float32", kv_bytes=8 << 20, chunk_tokens=64), environ),
    }
    seen: list[tuple[str, int, int]] = []
    result = evaluate(
        str(tiny_llama), windows, plan, vocabulary=512, divergence=True, progress=lambda *a: seen.append(a)
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        ids = torch.tensor(windows)
        nll = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].reshape(-1, 512), ids[:, 1:].reshape(-1))
    assert result["modes"]["bf16"] == {"perplexity": pytest.approx(math.exp(float(nll)), rel=1e-4)}
    chunked = result["modes"]["chunked"]
    assert chunked["perplexity"] == pytest.approx(math.exp(float(nll)), rel=1e-4)
    assert 0.0 <= chunked["kl"] < 1e-6 or abs(chunked["kl"]) < 1e-6
    assert chunked["top1_agreement"] > 0.99
    assert (result["tokens"], result["windows"], result["dtype"]) == (2 * 95, 2, "float32")
    assert seen == [("bf16", 1, 2), ("bf16", 2, 2), ("chunked", 1, 2), ("chunked", 2, 2)]


def test_a_failing_engine_is_told_in_one_message(tiny_llama: Path) -> None:
    windows = [[5] * 64]
    plan = {"bf16": (engine_arguments(64, dtype="float32", kv_bytes=1), environment(MODES["bf16"], Settings()))}
    with pytest.raises(FourfoldError, match=r"KV mode bf16"):
        evaluate(str(tiny_llama), windows, plan, vocabulary=512, divergence=False)

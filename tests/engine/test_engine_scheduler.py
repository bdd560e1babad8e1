"""The ranked scheduler in a real engine, with 4-bit pages and without: the same tokens in another order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.serve import SCHEDULER

from .conftest import EngineFailed, Engines
from .texts import assert_same

pytestmark = pytest.mark.engine

LONG = [
    f"Write a detailed story of 2000 words about {what}, with many characters and long dialogues."
    for what in ("a lighthouse keeper", "the last train", "a war between two cities", "an old library")
]
SHORT = ["What is 2+2?", "Is water wet? Answer yes or no.", "hi", "What is the capital of Portugal?"]
TOKENS = 48
BLOCK_BYTES = 32 * 6120
"""32 tokens of SmolLM2 in 4-bit pages."""

Ids = Callable[[str], list[int]]


def engine(model: str, ranked: bool, **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": model, "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20, "block_size": 32, "max_num_seqs": 2,
        "max_num_batched_tokens": 512, "enable_prefix_caching": False, "skip_tokenizer_init": False,
    }  # fmt: skip
    return {**base, **({"scheduler_cls": SCHEDULER} if ranked else {}), **more}


def jobs(smollm2: str, ids: list[list[int]], **more: Any) -> list[dict[str, Any]]:
    """The same requests through vLLM's own scheduler and the ranked one."""
    call = {"prompts": ids, "max_tokens": TOKENS, "gaps": True}
    return [{"engine": engine(smollm2, ranked, **more), "calls": [call]} for ranked in (False, True)]


def test_short_answers_start_first_and_no_token_changes(engines: Engines, smollm2: str, token_ids: Ids) -> None:
    ids = [token_ids(text) for text in LONG + SHORT]
    own, ranked = engines(jobs(smollm2, ids), env={"FOURFOLD_TRUST_MAX_TOKENS": "0"})
    assert ranked["calls"] == own["calls"]
    assert len({tuple(tokens) for tokens in own["calls"][0]}) == len(ids)
    first_come, by_work = own["started"][0], ranked["started"][0]
    assert first_come == sorted(first_come)
    assert max(by_work[len(LONG) :]) < min(by_work[: len(LONG)])
    assert "Ranked scheduler (by predicted work)" in engines.log


@pytest.mark.slow
def test_preemption_and_prefix_hits_and_speculation_keep_the_tokens(
    engines: Engines, smollm2: str, token_ids: Ids
) -> None:
    """Twelve requests that all want more than is predicted, in a pool that holds five."""
    common = "You are a patient teacher, and you always explain every single step of what you do to the children. " * 4
    ids = [token_ids(common + text) for text in (LONG + SHORT) * 2][:12]
    small = {"kv_cache_memory_bytes": 26 * BLOCK_BYTES, "max_num_seqs": 12}
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    own, _ = jobs(smollm2, ids, **small)
    _, hits = jobs(smollm2, ids, **small, enable_prefix_caching=True)
    _, drafts = jobs(smollm2, ids, **small, speculative_config=speculation)
    env = {"FOURFOLD_MAX_PREEMPTIONS": "1", "FOURFOLD_TRUST_MAX_TOKENS": "0"}
    results = engines([own, hits, drafts], env=env)
    before, with_hits, with_drafts = (result["counters"] for result in results)
    (texts,), (gaps,) = results[0]["calls"], results[0]["gaps"]
    for other in results[1:]:
        assert_same(other["calls"][0], texts, gaps, share=0.25)
    assert before["num_preemptions"] > 0
    # so few run that starting one more is worth a preemption later; none is preempted twice
    assert 0 < with_hits["num_preemptions"] <= len(ids)
    assert 0 < with_drafts["num_preemptions"] <= len(ids)
    assert with_hits["prefix_cache_hits"] > 0
    assert with_drafts["spec_decode_num_drafts"] > 0


@pytest.mark.slow
def test_sixteen_bit_pages_and_recording(engines: Engines, smollm2: str, token_ids: Ids, tmp_path: Path) -> None:
    """Ranking needs none of the plugin: FOURFOLD=0.  Lengths are recorded with the ranker off as well."""
    from fourfold.rank.trace import read_trace

    ids = [token_ids(text) for text in LONG[:2] + SHORT[:2]]
    job = jobs(smollm2, ids)[1]
    trace = tmp_path / "trace.jsonl"
    env = {"FOURFOLD_RECORD_LENGTHS": str(trace), "FOURFOLD_RECORD_PROMPTS": "1", "FOURFOLD_TRUST_MAX_TOKENS": "0"}
    (ranked,) = engines([job], fourfold=False, env=env)
    (off,) = engines([job], fourfold=False, env={**env, "FOURFOLD_RANKER": "off"})
    assert ranked["calls"] == off["calls"]
    assert max(ranked["started"][0][2:]) < min(ranked["started"][0][:2])
    assert off["started"][0] == sorted(off["started"][0])
    rows = list(read_trace(trace))
    assert sorted(row.prompt or "" for row in rows) == sorted(2 * (LONG[:2] + SHORT[:2]))
    assert {(row.output_tokens, row.finish) for row in rows} == {(TOKENS, "length")}


def test_a_bad_ranker_stops_the_start_unless_it_is_optional(
    engines: Engines, smollm2: str, token_ids: Ids, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"not a ranker")
    job = jobs(smollm2, [token_ids(text) for text in LONG[:2] + SHORT[:2]])[1]
    env = {"FOURFOLD_RANKER": str(bad)}
    strict, lenient = engines.together(
        ([job], {"fourfold": False, "env": env}),
        ([job], {"fourfold": False, "env": {**env, "FOURFOLD_RANKER_OPTIONAL": "1"}}),
    )
    with pytest.raises(EngineFailed) as failed:
        strict.result()
    assert "cannot be read" in failed.value.error
    (result,) = lenient.result()
    assert result["started"][0] == sorted(result["started"][0])
    assert "Requests are served first-come." in engines.log


def test_without_a_tokenizer_it_is_first_come_with_a_warning(engines: Engines, smollm2: str, token_ids: Ids) -> None:
    ids = [token_ids(text) for text in LONG[:2] + SHORT[:2]]
    _, job = jobs(smollm2, ids, skip_tokenizer_init=True)
    (result,) = engines([job], fourfold=False)
    assert result["started"][0] == sorted(result["started"][0])
    assert engines.log.count("they have no rank: first-come") == 1

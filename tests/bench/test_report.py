"""The demo's metrics.json and report, from results of two runs."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest

from fourfold.bench import showcase
from fourfold.bench.report import COST, GOOD, NEUTRAL, build, headlines, table_rows, verdict
from fourfold.modes import MODES


def run(capacity: int, ttft: float, tpot: float, preemptions: int, degenerate: int = 0, total: int = 10) -> dict:
    requests = {"ttft_s": [ttft * f for f in (0.5, 1.0, 1.5)], "tpot_ms": [tpot * f for f in (0.9, 1.0, 1.1)]}
    series = {"t": [0.0, 1.0, 2.0], "running": [0, 2, 1], "waiting": [0, 1, 0], "kv_usage": [0.0, 0.5, 0.2]}
    return {
        "ttft_mean_s": ttft,
        "ttft_p50_s": ttft,
        "ttft_p99_s": 1.5 * ttft,
        "tpot_mean_ms": tpot,
        "tpot_p50_ms": tpot,
        "tpot_p99_ms": 1.1 * tpot,
        "e2el_mean_s": ttft + 5.0,
        "e2el_p99_s": 2 * ttft + 5.0,
        "output_tokens_per_s": 100.0,
        "output_tokens": 300,
        "preemptions": preemptions,
        "completed": 10,
        "failed": 0,
        "errors": [],
        "valid": True,
        "answers": {"total": total, "failed": 0, "cut": 0, "empty": 0, "degenerate": degenerate},
        "engine": {
            "version": "0.32.0",
            "model": "model",
            "max_model_len": 1024,
            "cache": {"block_size": 32},
            "capacity_tokens": capacity,
        },
        "series": {**series, "preemptions": [0, preemptions, preemptions]},
        "requests": requests,
        "kv_bytes_allotted": 48 << 20,
        "start_s": 20.0,
    }


QUALITY = {
    "modes": {"bf16": {"perplexity": 20.0}, "fourfold": {"perplexity": 20.4, "kl": 0.02, "top1_agreement": 0.94}},
    "tokens": 2044,
    "windows": 4,
    "dtype": "float32",
}
ENVIRONMENT = {"cpu": "A <fast> CPU", "cores": 2, "gpus": [], "commit": "abc", "date": "2026-01-01"}


@pytest.fixture
def metrics() -> dict:
    results = {"bf16": run(2176, 6.0, 60.0, 9), "fourfold": run(8192, 1.5, 57.0, 0)}
    value = showcase.assemble(results, QUALITY, 48 << 20, "auto", "/data/models/SmolLM2", 1.5, None)
    return {**value, "environment": ENVIRONMENT, "seconds": 1.0}


def test_metrics_hold_everything_that_was_promised(metrics: dict) -> None:
    for name in ("bf16", "fourfold"):
        row = metrics["modes"][name]
        wanted = (
            "capacity_tokens kv_bytes ttft_mean_s ttft_p99_s tpot_mean_ms tpot_p99_ms output_tokens_per_s preemptions"
        )
        for key in [*wanted.split(), "perplexity", "kl", "completed", "failed", "errors", "valid"]:
            assert row[key] is not None
    assert metrics["modes"]["bf16"]["kl"] == 0.0
    assert metrics["engine"]["model"] == "SmolLM2"
    assert metrics["engine"]["dtype"] == "float32"
    assert metrics["notes"] == []
    json.dumps(metrics, allow_nan=False)


def test_loops_count_against_the_baseline(metrics: dict) -> None:
    # of 24 answers: two loops more, then so many more that chance may still explain it, then too many
    for base, loops, valid in ((2, 4, True), (0, 8, True), (0, 9, False), (3, 15, False)):
        results = {"bf16": run(2176, 6.0, 60.0, 9, base, 24), "fourfold": run(8192, 1.5, 57.0, 0, loops, 24)}
        value = showcase.assemble(results, QUALITY, 48 << 20, "auto", "m", 1.5, None)
        assert value["modes"]["fourfold"]["valid"] is valid


def test_headlines_say_gain_and_cost(metrics: dict) -> None:
    cards = {card.label: card for card in headlines(metrics)}
    assert cards["tokens in the same KV memory"].value == "3.76×"
    assert (cards["mean time to first token"].value, cards["mean time to first token"].tone) == ("4.0× lower", GOOD)
    assert cards["mean time per output token"].value == "5% lower"
    assert cards["output tokens per second"].tone == NEUTRAL
    assert (cards["perplexity"].value, cards["perplexity"].tone) == ("+2.0%", COST)
    assert "94.0%" in cards["KL divergence from 16 bits"].detail


def test_a_loss_is_shown_as_a_loss(metrics: dict) -> None:
    worse = copy.deepcopy(metrics)
    worse["modes"]["fourfold"].update(ttft_mean_s=12.0, tpot_mean_ms=66.0, preemptions=20, output_tokens_per_s=50.0)
    cards = {card.label: card for card in headlines(worse)}
    assert (cards["mean time to first token"].value, cards["mean time to first token"].tone) == ("2.0× higher", COST)
    assert cards["mean time per output token"].value == "10% higher"
    assert cards["preemptions"].tone == COST
    assert cards["output tokens per second"].value == "2.0× lower"
    assert "but answers begin" in verdict(worse)


def test_the_page_is_whole_and_needs_no_network(metrics: dict) -> None:
    page = build(metrics, plotlyjs="/* library */")
    assert "@@" not in page
    assert page.count('class="plotly-graph-div"') == 7
    assert not re.search(r'(src|href)="?(https?:)?//', page)
    assert "A &lt;fast&gt; CPU" in page
    assert "/data/models" not in page
    assert "3.76 times the tokens" in page


def test_missing_numbers_leave_dashes_and_no_cards(metrics: dict) -> None:
    for key in ("ttft_mean_s", "ttft_p99_s", "tpot_mean_ms", "capacity_tokens"):
        metrics["modes"]["bf16"][key] = None
    assert "mean time to first token" not in [card.label for card in headlines(metrics)]
    assert ["–", "1.500"] in [values for _, values in table_rows(metrics)]
    assert "@@" not in build(metrics, plotlyjs="")


def test_float32_baseline_gets_the_bytes_of_16_bits() -> None:
    flags = {name: showcase.server_flags(MODES[name], 48 << 20, "float32", 1, 32, 512) for name in ("bf16", "fourfold")}
    memory = {name: int(row[row.index("--kv-cache-memory-bytes") + 1]) for name, row in flags.items()}
    assert memory == {"bf16": 96 << 20, "fourfold": 48 << 20}
    same = {name: [flag for flag in row if flag != str(memory[name])] for name, row in flags.items()}
    assert same["bf16"] == same["fourfold"]
    assert showcase.allotted_bytes(MODES["bf16"], 48 << 20, "bfloat16") == 48 << 20


def test_dtype_follows_the_machine() -> None:
    assert showcase.pick_dtype(["avx2"], False) == "float32"
    assert showcase.pick_dtype(["avx2", "avx512f", "avx512_bf16"], False) == "auto"
    assert showcase.pick_dtype(["avx2"], True) == "auto"
    assert showcase.pick_dtype([], False) == "auto"


def test_a_note_says_what_float32_changed() -> None:
    results = {"bf16": {**run(2176, 6.0, 60.0, 9), "kv_bytes_allotted": 96 << 20}, "fourfold": run(8192, 1.5, 57.0, 0)}
    value = showcase.assemble(results, QUALITY, 48 << 20, "float32", "m", 1.5, Path("a/b.txt"))
    assert "96 MiB" in value["notes"][0]
    assert "b.txt" in value["quality"]["text"]


@pytest.mark.parametrize(("waiting", "light"), [([0, 0, 0], True), ([0, 1, 0], False)])
def test_a_load_that_never_queued_is_said_to_be_too_light(waiting: list[int], light: bool) -> None:
    results = {"bf16": run(2176, 0.1, 60.0, 0), "fourfold": run(8192, 0.1, 57.0, 0)}
    results["bf16"]["series"]["waiting"] = waiting
    value = showcase.assemble(results, QUALITY, 48 << 20, "auto", "/data/models/SmolLM2", 1.5, None)
    assert any("too light" in note for note in value["notes"]) is light


def test_slow_machines_still_fill_the_cache_and_fast_ones_end() -> None:
    plan = showcase.Plan()
    assert plan.requests(0.01) == plan.min_requests
    assert plan.requests(1.0) == round(plan.seconds)
    assert plan.requests(1e6) == plan.max_requests


def test_modes_served_again_by_the_ranked_scheduler_get_columns_of_their_own() -> None:
    results = {
        "bf16": run(1000, 4.0, 10.0, 9), "fourfold": run(3800, 2.0, 11.0, 0),
        "bf16+ranked": run(1000, 1.0, 9.0, 1), "fourfold+ranked": run(3800, 1.5, 11.0, 0),
    }  # fmt: skip
    value = showcase.assemble(results, QUALITY, 48 << 20, "auto", "m", 1.5, None)
    assert [row["scheduler"] for row in value["modes"].values()] == ["fcfs", "fcfs", "ranked", "ranked"]
    assert value["modes"]["fourfold+ranked"]["kl"] == value["modes"]["fourfold"]["kl"]
    assert value["notes"][0].startswith("Ranked:")
    assert dict(table_rows(value))["TTFT mean, s"] == ["4.000", "2.000", "1.000", "1.500"]
    page = build({**value, "environment": {"cpu": "c", "cores": 2}}, plotlyjs="")
    assert "<th>bf16+ranked</th>" in page
    plain = showcase.assemble(dict(list(results.items())[:2]), QUALITY, 48 << 20, "auto", "m", 1.5, None)
    assert plain["notes"] == []

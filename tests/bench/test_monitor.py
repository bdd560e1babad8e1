"""The Prometheus text format, time series, servers that do not start, and the summary of a run."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fourfold.bench.load import LoadSettings, flags, statistics, summarise
from fourfold.bench.monitor import Series, describe, parse_metrics, total
from fourfold.bench.server import free_port, running_server, stop
from fourfold.errors import FourfoldError
from fourfold.logs import explain, run_module

TEXT = """# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"b\\", c"} 3.0
vllm:num_requests_running{engine="1",model_name="x"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:num_preemptions_total{engine="0"} 7
vllm:cache_config_info{block_size="32",num_gpu_blocks="68",cache_dtype="auto"} 1.0
process_start 1.7e9 1700000000
bad line
nan_metric NaN
"""


def test_metrics_are_parsed_and_summed_over_engines() -> None:
    samples = parse_metrics(TEXT)
    assert total(samples, "vllm:num_requests_running") == 5.0
    assert total(samples, "absent") == 0.0
    assert samples[0].labels["model_name"] == 'a \\"b\\", c'
    info = next(s for s in samples if s.name == "vllm:cache_config_info")
    assert info.labels == {"block_size": "32", "num_gpu_blocks": "68", "cache_dtype": "auto"}
    assert next(s for s in samples if s.name == "process_start").value == 1.7e9


def test_series_count_preemptions_from_the_start_and_begin_with_the_first_request() -> None:
    series = Series()
    idle = parse_metrics("vllm:num_preemptions_total 4\n")
    for at in (0.5, 1.0, 1.5):
        series.add(at, idle, 4.0)
    series.add(2.0, parse_metrics(TEXT), 4.0)
    assert series.preemptions == [0.0, 0.0, 0.0, 3.0]
    cut = series.from_first_request()
    assert cut.t == [0.0, 0.5]
    assert cut.running == [0.0, 5.0]
    assert len({len(values) for values in cut.as_json().values()}) == 1


def test_no_server_is_said_so() -> None:
    with pytest.raises(FourfoldError, match="does not answer"):
        describe(f"http://127.0.0.1:{free_port()}")


def test_a_server_that_ends_shows_its_error(tmp_path: Path) -> None:
    code = "print('INFO loading'); raise ValueError('no room for the cache')"
    with (
        pytest.raises(FourfoldError, match=r"no room for the cache"),
        running_server([sys.executable, "-c", code], os.environ, tmp_path / "log", port=free_port()),
    ):
        pass


@pytest.mark.parametrize("interrupts", [signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "background"])
def test_a_server_that_never_answers_is_stopped(tmp_path: Path, interrupts: signal._HANDLER) -> None:
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        stopped_in_time(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


def stopped_in_time(tmp_path: Path) -> None:
    code = "import time; print('waiting', flush=True); time.sleep(600)"
    start = time.monotonic()
    with (
        pytest.raises(FourfoldError, match="not healthy after 1 s"),
        running_server([sys.executable, "-c", code], os.environ, tmp_path / "log", port=free_port(), timeout=1.0),
    ):
        pass
    assert time.monotonic() - start < 12


def test_stop_ends_children_that_ignore_interrupts(tmp_path: Path) -> None:
    child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    parent = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); print('up', flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent], start_new_session=True, stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert process.stdout
    assert process.stdout.readline() == b"up\n"
    time.sleep(0.5)
    stop(process, grace=0.5)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


DETAIL = {
    "duration": 10.0,
    "input_lens": [5, 6, 7, 8],
    "output_lens": [11, 1, 21, 0],
    "ttfts": [0.5, 1.5, 0.1, 0.0],
    "latencies": [1.5, 1.5, 9.0, 0.0],
    "itls": [[0.1] * 10, [], [0.4] * 3, []],
    "generated_texts": ["one", "two", "half", ""],
    "errors": ["", "", "cut stream: finish_reason missing", "Traceback\nServerDisconnectedError\n"],
}


def test_only_whole_answers_become_latencies() -> None:
    result = summarise(DETAIL, LoadSettings())
    assert (result["completed"], result["failed"], result["valid"]) == (2, 2, False)
    assert result["answers"] == {"total": 4, "failed": 1, "cut": 1, "empty": 0, "degenerate": 0}
    assert result["ttft_mean_s"] == pytest.approx(1.0)
    assert result["e2el_mean_s"] == pytest.approx(1.5)
    assert result["requests"]["tpot_ms"] == [pytest.approx(100.0)]  # (1.5 - 0.5) / 10; one token has no TPOT
    assert result["output_tokens"] == 12
    assert result["output_tokens_per_s"] == pytest.approx(1.2)
    assert result["errors"] == ["ServerDisconnectedError", "cut stream: finish_reason missing"]


def test_a_run_without_answers_is_invalid_and_still_json() -> None:
    import json

    detail = {key: value[3:] if isinstance(value, list) else value for key, value in DETAIL.items()}
    result = summarise(detail, LoadSettings())
    assert result["ttft_mean_s"] is None
    assert not result["valid"]
    json.dumps(result, allow_nan=False)
    assert statistics([]) == {"mean": None, "p50": None, "p99": None}


def test_flags_pass_rates_lengths_and_seed() -> None:
    load = LoadSettings(request_rate=2.5, seed=9, ignore_eos=True, max_concurrency=4)
    values = flags("http://127.0.0.1:1", "m", "/t", Path("/r.jsonl"), 12, load, Path("/o/out.json"))
    pairs = dict(itertools.pairwise(values))
    assert (pairs["--request-rate"], pairs["--seed"], pairs["--num-prompts"]) == ("2.5", "9", "12")
    assert (pairs["--custom-output-len"], pairs["--max-concurrency"]) == ("-1", "4")
    assert {"--ignore-eos", "--disable-shuffle", "--skip-chat-template", "--save-detailed"} <= set(values)


def test_explain_finds_the_first_exception_that_says_something() -> None:
    log = [
        "(EngineCore pid=12) INFO 01-02 03:04:05 [core.py:1] loading",
        "(EngineCore pid=12) ERROR 01-02 03:04:06 [core.py:99] Traceback (most recent call last):",
        "(EngineCore pid=12) ERROR 01-02 03:04:06 [core.py:99] ValueError: head size 40 is not supported",
        "(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert explain(log) == "ValueError: head size 40 is not supported"
    ours = "[rank0]: fourfold.errors.FourfoldError: pages differ. Why: a. What to do: b."
    assert explain(["x", ours]) == "pages differ. Why: a. What to do: b."
    assert explain(["a", "b"]).endswith("a\nb")


def test_a_module_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text("{}")
    run_module("json.tool", tmp_path / "good.json", "the JSON is broken")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(FourfoldError, match=r"(?s)the JSON is broken\. Why: .*line 1 column 2"):
        run_module("json.tool", tmp_path / "bad.json", "the JSON is broken")

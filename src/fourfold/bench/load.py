"""One run of load against a server: vLLM's generator, a sampler of /metrics, and a check of every answer."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.bench.answers import check
from fourfold.bench.monitor import Monitor, describe
from fourfold.bench.prompts import Request, write_requests
from fourfold.bench.server import tail
from fourfold.errors import FourfoldError


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How requests arrive and what they ask for.

    Attributes:
        request_rate: requests a second, Poisson arrivals; infinity sends all at once.
        burstiness: 1.0 is Poisson, below it bursts (vLLM's gamma arrivals).
        seed: of arrivals.
        ignore_eos: answers run to their full length, so that two servers do the same work.
        temperature: 0.0 is greedy.
        max_concurrency: a cap on requests in flight, or None.
        max_degenerate: share of degenerate answers up to which a run stays valid.
        interval: seconds between readings of /metrics.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    temperature: float = 0.0
    max_concurrency: int | None = None
    max_degenerate: float = 0.0
    interval: float = 0.5


def flags(url: str, model: str, tokenizer: str, requests: Path, count: int, load: LoadSettings, out: Path) -> list[str]:
    """Flags of ``vllm bench serve``.  The first request is not sent ahead (``--ready-check-timeout-sec 0``)."""
    values = [
        *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
        *("--model", model, "--tokenizer", tokenizer),
        *("--dataset-name", "custom", "--dataset-path", str(requests), "--custom-output-len", "-1"),
        *("--skip-chat-template", "--disable-shuffle", "--num-prompts", str(count)),
        *("--request-rate", str(load.request_rate), "--burstiness", str(load.burstiness), "--seed", str(load.seed)),
        *("--temperature", str(load.temperature), "--ready-check-timeout-sec", "0", "--disable-tqdm"),
        # prompts are rendered already, with the tokenizer's own beginning of sequence
        *("--extra-body", json.dumps({"add_special_tokens": False})),
        *("--save-result", "--save-detailed", "--result-dir", str(out.parent), "--result-filename", out.name),
    ]
    if load.ignore_eos:
        values.append("--ignore-eos")
    if load.max_concurrency:
        values += ["--max-concurrency", str(load.max_concurrency)]
    return values


class Driver:
    """vLLM's load generator in a process of its own, which imports what it needs and then waits for its flags.

    Use as a context manager, started ahead of a server where that saves time; it is ended on exit.
    """

    def __enter__(self) -> Driver:
        self._folder = tempfile.TemporaryDirectory(prefix="fourfold-bench-")
        self.folder = Path(self._folder.name)
        self.log = self.folder / "driver.log"
        environment = {**os.environ, "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), "FOURFOLD": "0"}
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fourfold.bench.driver"],
                stdin=subprocess.PIPE, stdout=sink, stderr=subprocess.STDOUT, env=environment, text=True,
            )  # fmt: skip
        return self

    def start(self, values: list[str]) -> None:
        """Run ``vllm bench serve`` with these flags."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(values) + "\n")
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already; its exit code and log say why

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._folder.cleanup()


def run_load(
    url: str,
    requests: list[Request],
    load: LoadSettings,
    *,
    model: str,
    tokenizer: str,
    timeout: float = 3600.0,
    progress: Callable[[float, float, float], None] | None = None,
    driver: Driver | None = None,
) -> dict[str, Any]:
    """Send ``requests`` and measure.

    Args:
        url: of a running server.
        requests: rendered prompts with lengths; sent in this order.
        load: see ``LoadSettings``.
        model: name that the server serves.
        tokenizer: directory or name of the tokenizer.
        timeout: seconds after which the run is given up.
        progress: called with (seconds, running, waiting) at every reading.
        driver: one that was started ahead, for one load; else one is started here.

    Returns:
        See ``summarise``; plus ``engine`` (from the server), ``load`` and ``series``.

    Raises:
        FourfoldError: the server does not answer, or vLLM's load generator fails.
    """
    engine = describe(url)
    with nullcontext(driver) if driver else Driver() as worker:
        out = worker.folder / "result.json"
        path = write_requests(requests, worker.folder / "requests.jsonl")
        with Monitor(url, load.interval) as monitor:
            worker.start(flags(url, model, tokenizer, path, len(requests), load, out))
            _wait(worker.process, monitor, timeout, progress)
        if worker.process.returncode or not out.is_file():
            raise FourfoldError(
                f"vLLM's load generator ended with code {worker.process.returncode}",
                why=tail(worker.log),
            )
        detail = json.loads(out.read_text(encoding="utf-8"))
    result = summarise(detail, load)
    result["preemptions"] = monitor.preemptions
    result["kv_usage_peak"] = max(monitor.series.kv_usage, default=0.0)
    settings = asdict(load)
    settings["request_rate"] = load.request_rate if math.isfinite(load.request_rate) else "inf"
    return {**result, "engine": engine, "load": settings, "series": monitor.series.from_first_request().as_json()}


def _wait(
    process: subprocess.Popen[str],
    monitor: Monitor,
    timeout: float,
    progress: Callable[[float, float, float], None] | None,
) -> None:
    deadline = time.monotonic() + timeout
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise FourfoldError(f"the load was not served within {timeout:.0f} s", fix="send fewer requests")
        series = monitor.series
        if progress and series.t and len(series.preemptions) == len(series.t):
            progress(series.t[-1], series.running[-1], series.waiting[-1])
        time.sleep(0.2)


def summarise(detail: dict[str, Any], load: LoadSettings) -> dict[str, Any]:
    """Latencies of the answers that came back whole, from the detailed result of ``vllm bench serve``.

    TTFT and E2EL (from sending a request to its last token) in seconds, ITL and TPOT in milliseconds: TPOT is
    (E2EL - TTFT) / (output tokens - 1), as vLLM defines it.
    """
    answers = check(detail["generated_texts"], detail["errors"])
    good = [i for i, error in enumerate(detail["errors"]) if not error]
    ttft = [float(detail["ttfts"][i]) for i in good]
    lengths = detail["output_lens"]
    tpot = [
        1e3 * (float(detail["latencies"][i]) - float(detail["ttfts"][i])) / (lengths[i] - 1)
        for i in good
        if lengths[i] > 1
    ]
    e2el = [float(detail["latencies"][i]) for i in good]
    itl = [1e3 * float(value) for i in good for value in detail["itls"][i]]
    tokens = int(sum(lengths[i] for i in good))
    return {
        "completed": len(good),
        "failed": answers.failed + answers.cut,
        "valid": answers.valid(load.max_degenerate),
        "answers": answers.as_json(),
        "duration_s": float(detail["duration"]),
        "input_tokens": int(sum(detail["input_lens"][i] for i in good)),
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / float(detail["duration"]),
        **{f"ttft_{key}_s": value for key, value in statistics(ttft).items()},
        **{f"tpot_{key}_ms": value for key, value in statistics(tpot).items()},
        **{f"itl_{key}_ms": value for key, value in statistics(itl).items()},
        **{f"e2el_{key}_s": value for key, value in statistics(e2el).items()},
        "requests": {"ttft_s": _rounded(ttft, 4), "tpot_ms": _rounded(tpot, 3)},
        "errors": sorted({error.strip().splitlines()[-1] for error in detail["errors"] if error.strip()})[:5],
    }


def statistics(values: list[float]) -> dict[str, float | None]:
    """Mean, median and 99th percentile; None where there is nothing to count (JSON knows no NaN)."""
    if not values:
        return {"mean": None, "p50": None, "p99": None}
    p50, p99 = np.percentile(values, [50, 99])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p99": float(p99)}


def _rounded(values: list[float], digits: int) -> list[float]:
    return [round(value, digits) for value in values]

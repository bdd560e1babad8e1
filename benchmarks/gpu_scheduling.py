"""The learned scheduler on a GPU: first-come, ranked, and an oracle that knows the lengths, on one Poisson load.

    python benchmarks/scheduling_requests.py build/scheduling        # once, where ShareGPT is installed
    python benchmarks/gpu_scheduling.py build/scheduling --kv-modes bf16 --gpu 0 --out out/bf16
    python benchmarks/scheduling_table.py out/*/metrics.json         # the tables, against what they were to show

The model has the shape of Llama-3.1-8B and random weights, so every answer is as long as the conversation's own
(min_tokens = max_tokens, EOS ignored).  The ranked policy must not read the lengths there: FOURFOLD_TRUST_MAX_TOKENS=0.
Each KV mode and policy is an engine of its own, in a process of its own; the rates share it, one after another, each
drained before the next.  What the scheduler learnt on line at one rate it keeps at the next, as a server would.

Writes DIR/metrics.json after every row: {"rows": [{"kv", "policy", "rate", "capacity_tokens", "async_scheduling",
"ttft_mean_s", …, "ttft_worst_s", "preemptions", "scheduler": {"tau", …}}], "config", "command", "environment"}.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fourfold.bench.record import environment, record
from serving_load import MODEL, JobFailed, engine_arguments, run_job

SCHEDULER = "fourfold.vllm_plugin.scheduler.RankedScheduler"
RANKERS = {"fcfs": "", "ranked": "default", "oracle": "oracle"}
"""Policy to FOURFOLD_RANKER; first-come is vLLM's own scheduler class and not ours switched off."""


def variables(kv: str, policy: str, metrics: Path) -> dict[str, str]:
    """The engine's environment; ``metrics`` is the folder through which the scheduler's numbers reach us."""
    values = {"FOURFOLD": str(int(kv == "fourfold")), "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
    if RANKERS[policy]:
        values |= {"FOURFOLD_RANKER": RANKERS[policy], "FOURFOLD_TRUST_MAX_TOKENS": "0"}
    return values


def line(row: dict[str, Any]) -> str:
    tau = row.get("scheduler", {}).get("tau")
    return (
        f"{row['kv']:>8} {row['policy']:>6} {row['rate']:4.0f}/s  TTFT {row['ttft_mean_s']:6.2f} s "
        f"(p50 {row['ttft_p50_s']:6.2f}, p99 {row['ttft_p99_s']:6.2f}, worst {row['ttft_worst_s']:6.2f})  "
        f"latency {row['latency_mean_s']:6.2f} s (p99 {row['latency_p99_s']:6.2f})  TPOT {row['tpot_mean_ms']:5.1f} ms "
        f"(p99 {row['tpot_p99_ms']:5.1f})  {row['preemptions']:5.0f} preemptions  "
        f"{row['output_tokens_per_s']:6.0f} tok/s{'' if tau is None else f'  tau {tau:.3f}'}"
    )


def measure(
    kv: str, policy: str, options: argparse.Namespace, folder: Path, requests: Path
) -> Iterator[dict[str, Any]]:
    """Rows of one engine, as they come."""
    engine = engine_arguments(kv, folder, options.kv_gib, options.max_num_seqs)
    if RANKERS[policy]:
        engine["scheduler_cls"] = SCHEDULER
    job = {
        "labels": {"kv": kv, "policy": policy}, "engine": {**engine, **options.engine},
        "requests": str(requests), "rates": [(rate, options.requests) for rate in options.rates],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as metrics:
        name = f"{kv}-{policy}"
        yield from run_job(job, name, options.out / f"{name}.log", variables(kv, policy, Path(metrics)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what scheduling_requests.py wrote")
    parser.add_argument("--out", type=Path, default=Path("results/gpu-scheduling"))
    parser.add_argument("--kv-modes", nargs="+", default=["bf16", "fourfold"])
    parser.add_argument("--policies", nargs="+", choices=list(RANKERS), default=list(RANKERS))
    parser.add_argument("--rates", type=float, nargs="+", default=[64.0, 80.0, 100.0])
    parser.add_argument("--requests", type=int, default=1500, help="the first so many of the folder's")
    parser.add_argument("--gpu", type=int, help="run on this one of several GPUs")
    parser.add_argument("--kv-gib", type=float, default=5.0)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as JSON")
    parser.add_argument("--model", type=json.loads, default={}, help="changes to the model's config.json, as JSON")
    options = parser.parse_args()
    if options.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(options.gpu)
    options.out.mkdir(parents=True, exist_ok=True)
    requests = json.loads((options.folder / "requests.json").read_text())[: options.requests]
    config = {
        "kv_gib": options.kv_gib, "max_num_seqs": options.max_num_seqs, "engine": options.engine,
        "model": {**MODEL, **options.model}, "requests": len(requests), "trust_max_tokens": False,
        "prompt_tokens_mean": statistics.mean(len(r["prompt_token_ids"]) for r in requests),
        "output_tokens_mean": statistics.mean(r["output_tokens"] for r in requests),
    }  # fmt: skip
    where = environment()
    rows: list[dict[str, Any]] = []
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        shutil.copytree(options.folder, folder, ignore=shutil.ignore_patterns("requests.json"))
        (folder / "config.json").write_text(json.dumps({**MODEL, **options.model}))
        load = Path(name) / "requests.json"
        load.write_text(json.dumps(requests))
        for kv in options.kv_modes:
            for policy in options.policies:
                try:
                    for row in measure(kv, policy, options, folder, load):
                        rows.append(row)
                        print(line(row), flush=True)
                        result = {"rows": rows, "environment": where}
                        record(
                            options.out.parent, options.out.name, result, command=["python", *sys.argv], config=config
                        )
                except JobFailed as error:  # the other engines' rows are worth having
                    print(error, file=sys.stderr, flush=True)
                    failed = True
    raise SystemExit(failed)


if __name__ == "__main__":
    main()

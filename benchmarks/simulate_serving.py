"""Calibrate the simulator on measured serving runs, state its error, and compare scheduling policies.

    python benchmarks/simulate_serving.py RUNS.json LENGTHS.json
    python benchmarks/simulate_serving.py RUNS.json LENGTHS.json --requests FOLDER --name simulator-scheduling

RUNS.json: ``{"rate": …, "requests": …, "block_size": …, "modes": {name: {"tokens": …, "context_token": …,
"fit": bool, "measured": {ttft_mean_s: …, …}}}}``.  Modes with ``fit`` share one fit of the times that do not
depend on the KV mode; the others are predicted with their own ``context_token``, so their error is a test.
The policies then serve LENGTHS with synthetic rankers of given tau, or what ``scheduling_requests.py`` wrote to FOLDER
with the embedded ranker.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from fourfold.bench.record import record
from fourfold.lab.calibrate import fit_summary, relative_errors
from fourfold.lab.engine import EngineConfig
from fourfold.lab.report import POLICIES, simulate
from fourfold.lab.steptime import StepTime
from fourfold.lab.workload import SyntheticRanker, load_lengths, poisson
from fourfold.rank.base import Ranker
from fourfold.rank.ngram import NgramRanker
from fourfold.rank.policy import PolicyConfig
from scheduling_requests import read_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("lengths", type=Path)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--name", default="simulator", help="folder under the results folder")
    parser.add_argument("--requests", type=Path, help="serve these requests, ranked by their text")
    parser.add_argument("--tau", type=float, nargs="+", default=[0.37, 0.45])
    parser.add_argument("--rates", type=float, nargs="+", default=[32.0, 64.0, 128.0])
    parser.add_argument("--seeds", type=int, default=2, help="arrival orders that a cell is averaged over")
    arguments = parser.parse_args()
    runs = json.loads(arguments.runs.read_text())
    lengths = load_lengths(arguments.lengths)
    served, texts = read_requests(arguments.requests) if arguments.requests else (lengths, None)
    outputs = [output for _, output in lengths]

    def workload(lengths: list[tuple[int, int]], rate: float, seed: int, prompts: list[str] | None = None):
        return poisson(lengths, rate=rate, requests=runs["requests"], seed=seed, prompts=prompts, max_tokens=2048)

    def ranker(tau: float | None, seed: int) -> Ranker:
        return NgramRanker.load() if texts else SyntheticRanker(outputs, tau=tau or 0.37, seed=seed)

    def engine(mode: dict) -> EngineConfig:
        return EngineConfig(
            mode["tokens"] // runs["block_size"],
            runs["block_size"],
            runs["max_num_seqs"],
            runs["max_num_batched_tokens"],
        )

    specs = workload(lengths, runs["rate"], 1)
    shared = StepTime(**runs["start"])
    models, errors = {}, {}
    for name, mode in runs["modes"].items():
        start = replace(shared, context_token=mode["context_token"])
        if mode["fit"]:
            shared, errors[name] = fit_summary(
                specs,
                engine(mode),
                mode["measured"],
                start,
                fixed=frozenset({3}),
                progress=lambda n, loss: print(f"  fit round {n}: loss {loss:.4f}", file=sys.stderr),
            )
            models[name] = shared
        else:
            models[name] = start
            errors[name] = relative_errors(simulate(specs, "fcfs", engine(mode), start)[0], mode["measured"])
        print(name, asdict(models[name]), {k: f"{v:+.0%}" for k, v in errors[name].items()}, flush=True)

    rows = []
    for name, mode in runs["modes"].items():
        for rate in arguments.rates:
            taus = [None] if texts else arguments.tau
            for policy, tau in [("fcfs", None), *(("ranked", t) for t in taus), ("oracle", None)]:
                cells, began = [], time.perf_counter()
                for seed in range(1, arguments.seeds + 1):
                    specs = workload(served, rate, seed, texts)
                    config = PolicyConfig(trust_max_tokens=False)
                    summary, _ = simulate(
                        specs, policy, engine(mode), models[name], ranker=ranker(tau, seed), config=config
                    )
                    cells.append(asdict(summary))
                mean = {key: float(np.mean([cell[key] for cell in cells])) for key in cells[0]}
                row = {"mode": name, "rate": rate, "policy": policy, "tau": tau, **mean}
                rows.append({**row, "wall_s": time.perf_counter() - began})
                print(
                    f"{name:10s} {rate:5.0f}/s {policy:7s} {tau or '':5} TTFT {row['ttft_mean_s']:6.2f} p99 "
                    f"{row['ttft_p99_s']:6.2f}  latency {row['latency_mean_s']:6.2f} p99 {row['latency_p99_s']:6.2f}  "
                    f"preemptions {row['preemptions']:6.0f}  worst wait {row['worst_wait_s']:6.2f}",
                    flush=True,
                )
    assert {row["policy"] for row in rows} == set(POLICIES)
    result = {
        "models": {name: asdict(model) for name, model in models.items()},
        "errors": errors,
        "policies": rows,
    }
    record(arguments.results, arguments.name, result, command=["python", *sys.argv], config=runs)


if __name__ == "__main__":
    main()

"""Rows of several runs of ``gpu_scheduling.py`` as one result, as Markdown, and against what was to be shown.

    python benchmarks/scheduling_table.py bf16/metrics.json fourfold/metrics.json --results results

For each KV mode and rate: ranked against first-come (mean TTFT, p99 latency, preemptions), and the share of the
oracle's gain in mean TTFT.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fourfold.bench.record import record

COLUMNS = {
    "mean TTFT, s": ("ttft_mean_s", ".2f"), "p99 TTFT, s": ("ttft_p99_s", ".2f"),
    "mean latency, s": ("latency_mean_s", ".2f"), "p99 latency, s": ("latency_p99_s", ".2f"),
    "mean TPOT, ms": ("tpot_mean_ms", ".1f"), "p99 TPOT, ms": ("tpot_p99_ms", ".1f"),
    "preemptions": ("preemptions", ",.0f"), "worst wait, s": ("ttft_worst_s", ".2f"),
    "tokens/s": ("output_tokens_per_s", ",.0f"),
}  # fmt: skip
GOALS = {"times_lower_ttft": 2.0, "share_of_oracle": 0.5, "latency_p99_ratio": 1.1, "preemptions_ratio": 0.1}
"""At least for the first two, at most for the others."""


def table(rows: list[dict[str, Any]]) -> str:
    lines = [["KV mode", "requests/s", "policy", *COLUMNS, "tau"]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        tau = row.get("scheduler", {}).get("tau") if row["policy"] == "ranked" else None
        cells = [format(row[field], form) for field, form in COLUMNS.values()]
        lines.append([row["kv"], f"{row['rate']:.0f}", row["policy"], *cells, "" if tau is None else f"{tau:.2f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def comparisons(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ranked against first-come and the oracle; None where a row is missing or there was nothing to gain."""
    cells = {(row["kv"], row["rate"], row["policy"]): row for row in rows}
    found = []
    for (kv, rate, policy), ranked in cells.items():
        first, oracle = cells.get((kv, rate, "fcfs")), cells.get((kv, rate, "oracle"))
        if policy != "ranked" or first is None:
            continue
        gain = first["ttft_mean_s"] - oracle["ttft_mean_s"] if oracle else 0.0
        found.append({
            "kv": kv, "rate": rate, "times_lower_ttft": first["ttft_mean_s"] / ranked["ttft_mean_s"],
            "share_of_oracle": (first["ttft_mean_s"] - ranked["ttft_mean_s"]) / gain if gain > 0 else None,
            "latency_p99_ratio": ranked["latency_p99_s"] / first["latency_p99_s"],
            "preemptions_ratio": ranked["preemptions"] / first["preemptions"] if first["preemptions"] else None,
        })  # fmt: skip
    return found


def met(name: str, value: float | None) -> bool | None:
    if value is None:
        return None
    return value >= GOALS[name] if name in ("times_lower_ttft", "share_of_oracle") else value <= GOALS[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="metrics.json of gpu_scheduling.py")
    parser.add_argument("--results", type=Path, help="also file all rows under this folder's gpu-scheduling")
    options = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in options.runs]
    rows = sorted((row for run in runs for row in run["rows"]), key=lambda row: (row["kv"], row["rate"]))
    print(table(rows))
    compared = comparisons(rows)
    for entry in compared:
        said = [
            f"{name} {'-' if entry[name] is None else format(entry[name], '.2f')}"
            f"{'' if met(name, entry[name]) is not False else ' (NOT MET)'}"
            for name in GOALS
        ]
        print(f"{entry['kv']} {entry['rate']:.0f}/s: {', '.join(said)}")
    if options.results:
        result = {"rows": rows, "comparisons": compared, "runs": [run["command"] for run in runs],
                  "environment": runs[0]["environment"]}  # fmt: skip
        record(options.results, "gpu-scheduling", result, command=["python", *sys.argv], config=runs[0]["config"])


if __name__ == "__main__":
    main()

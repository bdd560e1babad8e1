"""``fourfold bench``: load on a running server, through ``vllm bench serve``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from fourfold.cli.common import EXIT_FAILURE, emit_json, err, print_errors, reports_errors, working
from fourfold.errors import FourfoldError


@reports_errors
def bench(
    url: Annotated[str, typer.Option("--url", help="of a running vLLM server")] = "http://127.0.0.1:8000",
    dataset: Annotated[str, typer.Option("--dataset", help="sharegpt, lmsys or custom")] = "sharegpt",
    dataset_path: Annotated[Path | None, typer.Option("--dataset-path", help="a local file of that data set")] = None,
    request_rate: Annotated[
        float, typer.Option("--request-rate", help="requests a second, Poisson; inf sends all at once")
    ] = math.inf,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1)] = 100,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="directory or name [the served model]")] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option("--max-prompt-tokens", help="leave longer prompts out")
    ] = None,
    max_output_tokens: Annotated[int | None, typer.Option("--max-output-tokens", help="cut longer answers")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="answer with exactly the data set's length")] = False,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.0,
    burstiness: Annotated[float, typer.Option("--burstiness", help="1 is Poisson, less is burstier")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option("--max-concurrency", min=1)] = None,
    seed: Annotated[int, typer.Option("--seed", help="of arrivals and of the choice of prompts")] = 0,
    max_degenerate: Annotated[
        float, typer.Option("--max-degenerate", min=0.0, max=1.0, help="share of looping answers that is still valid")
    ] = 0.0,
    out: Annotated[Path | None, typer.Option("--out", help="also write the JSON here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Send a Poisson load to a running server and measure TTFT, TPOT, throughput, preemptions and KV use.

    Answers are checked: empty, cut-off, failed or looping ones make the run invalid (exit code 1).
    """
    from fourfold.bench.load import LoadSettings, run_load
    from fourfold.bench.monitor import describe
    from fourfold.bench.prompts import load, select
    from fourfold.bench.tokenizer import encoder, load_tokenizer, renderer

    if dataset not in ("sharegpt", "lmsys", "custom"):
        raise FourfoldError(f"unknown data set {dataset}", fix="use sharegpt, lmsys or custom")
    if not request_rate > 0:
        raise FourfoldError("the request rate must be above zero", fix="pass for example --request-rate 2")
    engine = describe(url)  # first of all: without a server nothing else is worth the wait
    model = engine["model"]
    words = load_tokenizer(tokenizer or model)
    with working("reading the data set …"):
        requests = select(
            load(dataset, dataset_path),  # type: ignore[arg-type]
            num_prompts,
            encoder(words),
            renderer(words),
            max_model_len=engine["max_model_len"] or 2048,
            seed=seed,
            max_prompt_tokens=max_prompt_tokens,
            max_output_tokens=max_output_tokens,
        )
    settings = LoadSettings(
        request_rate=request_rate,
        burstiness=burstiness,
        seed=seed,
        ignore_eos=ignore_eos,
        temperature=temperature,
        max_concurrency=max_concurrency,
        max_degenerate=max_degenerate,
    )
    with working(f"sending {num_prompts} requests …") as status:

        def show(seconds: float, running: float, waiting: float) -> None:
            status.update(f"{seconds:.0f} s · {running:.0f} running · {waiting:.0f} waiting")

        result = run_load(url, requests, settings, model=model, tokenizer=tokenizer or model, progress=show)
    result = {"dataset": dataset, "num_prompts": num_prompts, **result}
    if out:
        from fourfold.files import write_json

        write_json(out, result)
    if as_json:
        emit_json(result)
    else:
        _print(result)
    if not result["valid"]:
        err.print(f"[bold red]invalid run:[/] {result['answers']}", markup=True)
        print_errors(result["errors"])
        raise typer.Exit(EXIT_FAILURE)


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    def show(value: float | None, unit: str, digits: int) -> str:
        return "–" if value is None else f"{value:,.{digits}f} {unit}"

    engine = result["engine"]
    table = Table(
        title=f"vLLM {engine['version']} · {engine['capacity_tokens'] or 0:,} KV tokens · {result['completed']} answers"
    )
    for heading in ("", "mean", "p50", "p99"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, unit, digits in (("ttft", "s", 3), ("tpot", "ms", 1), ("itl", "ms", 1), ("e2el", "s", 3)):
        table.add_row(
            name.upper(), *(show(result[f"{name}_{key}_{unit}"], unit, digits) for key in ("mean", "p50", "p99"))
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{result['output_tokens_per_s']:.1f} output tokens/s · {result['preemptions']} preemptions · "
        f"KV use up to {100 * result['kv_usage_peak']:.0f}% · {result['failed']} failed"
    )

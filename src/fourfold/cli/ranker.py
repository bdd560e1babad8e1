"""``fourfold ranker train`` and ``fourfold ranker evaluate``: make and judge predictors of answer lengths."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fourfold.cli.common import emit_json, err, reports_errors, working
from fourfold.errors import FourfoldError

if TYPE_CHECKING:
    from fourfold.rank.training import Report

app = typer.Typer(no_args_is_help=True, help="Train and evaluate the predictors that order requests by answer length.")

DATA_HELP = "ShareGPT JSON, JSONL (prompt and length, or LMSYS-Chat-1M rows), or a trace [the ShareGPT package]"


class _Bar:
    """Progress of a training run: a bar on a terminal, a line a check elsewhere."""

    def __init__(self) -> None:
        columns = (TextColumn("training"), BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=err, transient=True)
        self._task = self._progress.add_task("", total=1, said="")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, step: int, steps: int, message: str) -> None:
        self._progress.update(self._task, completed=step, total=steps, said=message)
        if not err.is_terminal:
            err.print(f"step {step} of {steps}: {message}", markup=False)


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _quality(report: Report) -> dict[str, Any]:
    return {
        "tau": round(report.tau, 4),
        "tau_low": round(report.interval[0], 4),
        "tau_high": round(report.interval[1], 4),
        "prompts": report.prompts,
        "mean_absolute_error_tokens": round(report.mean_absolute_error, 1),
    }


def _said(quality: dict[str, Any]) -> str:
    low, high = quality["tau_low"], quality["tau_high"]
    return f"tau {quality['tau']:.3f} ({low:.3f} to {high:.3f}, {quality['prompts']:,} prompts)"


@app.command()
@reports_errors
def train(
    output: Annotated[Path, typer.Option("--output", help="file (n-gram ranker) or directory (transformer) to write")],
    data: Annotated[Path | None, typer.Option("--data", help=DATA_HELP)] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="fine-tune this Hugging Face directory instead of n-grams")
    ] = None,
    epochs: Annotated[int, typer.Option("--epochs", min=0, help="transformer only; 0 only calibrates lengths")] = 3,
    seconds: Annotated[float, typer.Option("--seconds", help="transformer only: stop training after this")] = 3600.0,
    device: Annotated[str, typer.Option("--device", help="transformer only: auto, cpu, cuda")] = "auto",
    seed: Annotated[int, typer.Option("--seed")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Train a ranker; prints Kendall's tau on prompts that training never saw.

    Without --data and --model this writes the ranker that the package ships, byte for byte.
    """
    from fourfold.rank.training import Options, evaluate, load_data, load_split, train_ngram

    began = time.monotonic()
    if model is None:
        with working("reading and hashing the prompts …"):
            hashed = load_data(data)
        with _Bar() as bar:
            ranker = train_ngram(hashed, replace(Options(), seed=seed), bar)
        quality, source = _quality(evaluate(ranker, hashed.held)), hashed.source
        ranker.save(output)
    else:
        from fourfold.rank.transformer_training import TransformerOptions, train_transformer

        if not model.is_dir():
            raise FourfoldError(f"there is no model directory {model}", fix="download the model and name its directory")
        with working("reading the prompts …"):
            parts = load_split(data)
        options = TransformerOptions(epochs=epochs, seconds=seconds, seed=seed)
        with _Bar() as bar:
            trained, report = train_transformer(
                model,
                parts.train,
                parts.valid,
                parts.held,
                options,
                device=_device(device),
                source=parts.source,
                progress=bar,
            )
        quality, source = _quality(report), parts.source
        trained.save(output)
    result = {
        "ranker": "ngram" if model is None else "transformer",
        "output": str(output),
        "data": source,
        "seconds": round(time.monotonic() - began, 1),
        **quality,
    }
    if as_json:
        emit_json(result)
    else:
        typer.echo(f"{output}: {_said(quality)}, {result['seconds']} s")


@app.command()
@reports_errors
def evaluate(
    rankers: Annotated[
        list[str] | None, typer.Argument(help="files or directories; `default` is the embedded ranker")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help=DATA_HELP)] = None,
    limit: Annotated[int, typer.Option("--limit", min=8, help="most held-out prompts to rank")] = 5000,
    device: Annotated[str, typer.Option("--device", help="transformer rankers: auto, cpu, cuda")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Kendall's tau on held-out prompts, and processor time a request, for each ranker and for prompt length alone."""
    import numpy as np

    from fourfold.rank.metrics import kendall_tau
    from fourfold.rank.registry import load_ranker
    from fourfold.rank.training import load_split, microseconds_per_prompt, report

    names = rankers or ["default"]
    loaded = []
    for name in names:
        ranker = load_ranker(name, device=_device(device) if Path(name).is_dir() else "cpu")
        assert ranker is not None
        loaded.append((name, ranker))
    with working("reading the prompts …") as shown:
        parts = load_split(data)
        held = parts.held[:limit]
        prompts = [e.prompt for e in held]
        lengths = np.array([e.length for e in held], dtype=np.float64)
        rows: dict[str, Any] = {}
        for name, ranker in loaded:
            shown.phase(f"ranking {len(held):,} prompts with {name} …")
            quality = _quality(report(ranker.score(prompts), ranker.lengths, lengths))
            sample = prompts[: 500 if ranker.name == "ngram" else 20]
            rows[name] = {**quality, "kind": ranker.name, "us_per_request": microseconds_per_prompt(ranker, sample)}
        baseline = kendall_tau([len(p) for p in prompts], lengths)
    result = {"rankers": rows, "prompt_length_tau": round(baseline, 4), "data": parts.source}
    if as_json:
        emit_json(result)
        return
    for name, row in rows.items():
        typer.echo(f"{name}: {_said(row)}, {row['us_per_request']:,.0f} µs a request")
    typer.echo(f"prompt length alone: tau {baseline:.3f}")

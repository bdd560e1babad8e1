"""The ``fourfold`` command.  Each command lives in its own file and imports its work when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from fourfold import __version__
from fourfold.cli import bench, calibrate, capacity, demo, doctor, eval, ranker, serve

app = typer.Typer(
    name="fourfold",
    help="4-bit KV-cache pages for vLLM: almost four times the tokens in the same memory.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"fourfold {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """4-bit KV-cache pages for vLLM: almost four times the tokens in the same memory."""


app.command(context_settings=serve.CONTEXT)(serve.serve)
app.command()(capacity.capacity)
app.command()(calibrate.calibrate)
app.add_typer(eval.app, name="eval")
app.command()(bench.bench)
app.command()(doctor.doctor)
app.command()(demo.demo)
app.add_typer(ranker.app, name="ranker")


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()

"""``fourfold serve``: vLLM's OpenAI server with 4-bit pages switched on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.common import emit_json, err, make_settings, reports_errors
from fourfold.errors import FourfoldError

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Whatever is not an option of ours belongs to vLLM and is handed on untouched."""


def server_command(model: str, flags: list[str], python: str = sys.executable) -> list[str]:
    """The command that starts the server.

    The module and not the ``vllm`` script: the script of the CPU wheel asks for the metadata of a package named
    ``vllm`` and stops.  Without ``--host`` the server listens on the loopback interface only.
    """
    host = [] if any(flag == "--host" or flag.startswith("--host=") for flag in flags) else ["--host", "127.0.0.1"]
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *host, *flags]


@reports_errors
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="a model's directory or name; flags of vllm serve follow it")],
    kv: Annotated[
        str, typer.Option("--kv", help="fourfold, bf16 or fp8: the same command serves the baseline")
    ] = "fourfold",
    calibration: Annotated[str | None, typer.Option("--calibration", help="auto, none, or a .safetensors file")] = None,
    prefill: Annotated[str | None, typer.Option("--prefill", help="pages or raw")] = None,
    cache_dir: Annotated[Path | None, typer.Option("--cache-dir", help="calibrations and compiled kernels")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the command and the settings, start nothing")] = False,
) -> None:
    """Serve MODEL with 4-bit KV pages; every flag of [bold]vllm serve[/] may follow the model.

    The server listens on 127.0.0.1 unless --host is given.
    """
    from fourfold.modes import environment, parse_modes

    modes = parse_modes(kv)
    if len(modes) != 1:
        raise FourfoldError(f"a server has one KV mode, not {len(modes)}", fix="pass one of fourfold, bf16, fp8")
    mode, settings = modes[0], make_settings(calibration, prefill, cache_dir)
    if mode.plugin and any(flag.split("=")[0] == "--kv-cache-dtype" for flag in context.args):
        raise FourfoldError(
            "--kv-cache-dtype does not go together with 4-bit pages",
            why="the pages are the cache's type",
            fix="leave it out, or pass --kv bf16",
        )
    command = server_command(model, [*mode.flags, *context.args])
    values = environment(mode, settings)
    if as_json:
        ours = {name: value for name, value in values.items() if name.startswith("FOURFOLD")}
        emit_json({"command": ["python", *command[1:]], "environment": dict(sorted(ours.items()))})
        return
    err.print(f"KV mode {mode.name}: {mode.title}")
    sys.stdout.flush()
    os.execvpe(command[0], command, values)  # the server takes this process's place, and with it its signals

"""``fourfold serve``: vLLM's OpenAI server with 4-bit pages switched on."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.common import emit_json, err, make_settings, reports_errors
from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.modes import KvMode

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Whatever is not an option of ours belongs to vLLM and is handed on untouched."""

SCHEDULER = "fourfold.vllm_plugin.scheduler.RankedScheduler"
"""For --scheduler-cls; gives the asynchronous class where the engine schedules ahead."""


GRAPHS = {"mode": 0, "cudagraph_mode": "FULL", "max_cudagraph_capture_size": 1024}
"""Compilation that 4-bit pages are served with on CUDA, unless a flag asks for another.

The kernels take decodes and prompt chunks in the same launches, so graphs can hold mixed batches, up to the largest
that a loaded server runs.  Measured against vLLM's defaults in docs/performance.md.
"""
GRAPH_FLAGS = (
    "--compilation-config", "-cc", "-O", "--optimization-level", "--enforce-eager", "--cudagraph-capture-sizes",
    "--max-cudagraph-capture-size",
)  # fmt: skip


def graph_flags(mode: KvMode, settings: Settings, flags: list[str]) -> list[str]:
    """Flags that give the engine ``GRAPHS``: none off CUDA, with ``--prefill raw``, or where the user chose already."""
    chosen = any(flag.split("=")[0].split(".")[0] in GRAPH_FLAGS or flag.startswith("-O") for flag in flags)
    if chosen or "attention_backend" not in mode.engine or settings.prefill == "raw":
        return []
    return ["--compilation-config", json.dumps(GRAPHS, separators=(",", ":"))]


def server_command(model: str, flags: list[str], python: str = sys.executable) -> list[str]:
    """The command that starts the server.

    The module and not the ``vllm`` script: the script of the CPU wheel asks for the metadata of a package named
    ``vllm`` and stops.  Without ``--host`` the server listens on the loopback interface only.
    """
    host = [] if any(flag == "--host" or flag.startswith("--host=") for flag in flags) else ["--host", "127.0.0.1"]
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *host, *flags]


def scheduler_settings(
    settings: Settings, scheduler: str, ranker: str | None, optional: bool, record: Path | None, with_prompts: bool
) -> tuple[Settings, list[str]]:
    """Settings and vLLM's flags for a scheduler; what it needs is tried here, before minutes of loading a model.

    Raises:
        FourfoldError: for an unknown scheduler, flags that do not go together, or a ranker that cannot be used.
    """
    if scheduler not in ("fcfs", "ranked"):
        raise FourfoldError(f"unknown scheduler {scheduler}", fix="pass ranked or fcfs")
    if scheduler == "fcfs" and ranker is not None:
        raise FourfoldError(
            "--ranker does nothing with first-come order", fix="add --scheduler ranked, or leave it out"
        )
    if record is None and with_prompts:
        raise FourfoldError("--record-prompts needs a file", fix="add --record-lengths FILE")
    if scheduler == "ranked":
        settings = replace(settings, ranker=ranker or settings.ranker)
        settings = replace(settings, ranker_optional=optional or settings.ranker_optional)
        if settings.ranker not in ("off", "oracle") and not settings.ranker_optional:
            _check_ranker(settings.ranker)
    else:
        settings = replace(settings, ranker="off")
    if record is not None:
        settings = replace(settings, record_lengths=str(record.expanduser().absolute()), record_prompts=with_prompts)
    return settings, ["--scheduler-cls", SCHEDULER] if scheduler == "ranked" or record is not None else []


def _check_ranker(ranker: str) -> None:
    """A file is read whole.  A folder holds a transformer, which the engine loads; here it only has to be there."""
    if not Path(ranker).is_dir():
        from fourfold.rank.ngram import NgramRanker

        NgramRanker.load(None if ranker == "default" else Path(ranker))


def metrics_folder(cache_dir: Path) -> Path:
    """An empty folder for the metrics that vLLM's processes share, named after this process, which becomes the server.

    Those of servers that are gone are removed.
    """
    base = cache_dir / "metrics"
    base.mkdir(parents=True, exist_ok=True)
    for old in base.iterdir():
        if old.name.isdigit() and (int(old.name) == os.getpid() or not _alive(int(old.name))):
            shutil.rmtree(old, ignore_errors=True)
    folder = base / str(os.getpid())
    folder.mkdir()
    return folder


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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
    scheduler: Annotated[
        str, typer.Option("--scheduler", help="ranked: shortest predicted work first; fcfs: vLLM's own")
    ] = "fcfs",
    ranker: Annotated[str | None, typer.Option("--ranker", help="default, or a ranker's file or folder")] = None,
    optional: Annotated[
        bool, typer.Option("--ranker-optional", help="first-come, not an error, if the ranker cannot be used")
    ] = False,
    record: Annotated[
        Path | None, typer.Option("--record-lengths", help="append lengths and hashed features of requests to a file")
    ] = None,
    with_prompts: Annotated[bool, typer.Option("--record-prompts", help="record the prompts' text as well")] = False,
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
    settings, ours = scheduler_settings(settings, scheduler, ranker, optional, record, with_prompts)
    if ours and any(flag.split("=")[0] == "--scheduler-cls" for flag in context.args):
        raise FourfoldError(
            "--scheduler-cls does not go together with --scheduler ranked and --record-lengths",
            why="both are a scheduler class",
            fix="leave one of them out",
        )
    graphs = graph_flags(mode, settings, context.args)
    command = server_command(model, [*mode.flags, *graphs, *ours, *context.args])
    values = environment(mode, settings)
    if as_json:
        named = {name: value for name, value in values.items() if name.startswith("FOURFOLD")}
        emit_json({"command": ["python", *command[1:]], "environment": dict(sorted(named.items()))})
        return
    if scheduler == "ranked" and "PROMETHEUS_MULTIPROC_DIR" not in values:
        values["PROMETHEUS_MULTIPROC_DIR"] = str(metrics_folder(settings.cache_dir))
    err.print(f"KV mode {mode.name}: {mode.title}")
    if graphs:
        err.print(f"CUDA graphs of mixed batches, nothing compiled: {' '.join(graphs)} (pass your own to change it)")
    sys.stdout.flush()
    os.execvpe(command[0], command, values)  # the server takes this process's place, and with it its signals

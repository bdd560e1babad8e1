"""``fourfold calibrate``: collect the statistics of keys and queries once, ahead of the first start."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.common import emit_json, make_settings, reports_errors, stdout_to_stderr, working
from fourfold.errors import FourfoldError


@reports_errors
def calibrate(
    model: Annotated[str, typer.Argument(help="a model's directory, or its name on the hub")],
    text: Annotated[
        Path | None, typer.Option("--text", help="calibrate on this UTF-8 text [a short one is built in]")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="of weights and activations, as vLLM's --dtype")] = "auto",
    cache_dir: Annotated[Path | None, typer.Option("--cache-dir", help="where calibrations are kept")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Calibrate MODEL and cache the result; the first start of a server does the same by itself."""
    if text is not None and not text.is_file():
        raise FourfoldError(f"there is no file {text}", fix="pass a UTF-8 text file")
    settings = make_settings(None, None, cache_dir)
    try:
        from fourfold.vllm_plugin.calibrate import calibrate_model
    except ImportError as error:
        raise FourfoldError(
            "calibration cannot run here",
            why=f"{error}",
            fix="install vLLM beside fourfold; fourfold doctor says which",
        ) from error
    start = time.monotonic()
    with working("calibrating inside the engine …"), stdout_to_stderr():
        path = calibrate_model(model, settings, text, dtype=dtype)
    result = {
        "model": model,
        "file": str(path),
        "bytes": path.stat().st_size,
        "seconds": round(time.monotonic() - start, 1),
    }
    if as_json:
        emit_json(result)
    else:
        typer.echo(f"{path} ({result['bytes']:,} bytes, {result['seconds']} s)")

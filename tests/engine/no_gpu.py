"""vLLM's CUDA platform on a machine without a GPU: enough of it to choose a backend, build specs and plan steps.

Called before anything else of vLLM is imported.  The vLLM that is read may be a wheel's Python without its compiled
extensions: what looks for them at import finds empty modules, and no operator is ever called.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

EXTENSIONS = ("_C", "_C_stable_libtorch")
ASKED_AT_IMPORT = ("block_fp8", "fp8", "fp4")


def pretend() -> None:
    """Make this process's vLLM believe in one Ampere GPU.  It holds until the process ends."""
    import vllm  # noqa: F401

    for name in EXTENSIONS:
        try:
            importlib.import_module(f"vllm.{name}")
        except ImportError:
            sys.modules[f"vllm.{name}"] = ModuleType(f"vllm.{name}")
    for what in ASKED_AT_IMPORT:
        setattr(torch.ops._C, f"cutlass_scaled_mm_supports_{what}", lambda *_: False)
    torch.ops._C.cutlass_group_gemm_supported = lambda *_: False
    flash: Any = ModuleType("vllm.vllm_flash_attn")
    for name in ("flash_attn_varlen_func", "get_scheduler_metadata", "compile_flash_attn_varlen_func_from_specs"):
        setattr(flash, name, None)
    sys.modules["vllm.vllm_flash_attn"] = flash

    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class OneAmpere(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(8, 6))
        get_device_name = classmethod(lambda cls, device_id=0: "none")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 24 << 30)

    platforms._current_platform = OneAmpere()
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        multi_processor_count=82, shared_memory_per_multiprocessor=100 << 10
    )

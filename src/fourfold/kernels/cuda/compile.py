"""Kernels from source: NVRTC, a cache of cubins on disk, loaded functions."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.files import write_atomically

HEADERS = ("mma.h", "project.h", "ring.h")
MIN_CAPABILITY = (8, 0)


def _bindings() -> tuple[Any, Any]:
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise FourfoldError(
            "the CUDA kernels cannot be compiled",
            why=f"{error}",
            fix="pip install cuda-bindings nvidia-cuda-nvrtc with the major version of your CUDA",
        ) from None
    return driver, nvrtc


def _checked(result: tuple[Any, ...], what: str) -> Any:
    if int(result[0]) != 0:
        raise FourfoldError(
            f"{what} failed", why=f"{result[0]!r}", fix="run `fourfold doctor` and check the GPU driver"
        )
    return result[1] if len(result) == 2 else result[1:]


def source(name: str) -> str:
    """Text of a kernel or header of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def compile_cubin(name: str, defines: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    """Machine code of ``name``.cu for one compute capability; needs no GPU.

    Raises:
        FourfoldError: NVRTC is absent or refuses the source (its log is in the message).
    """
    _, nvrtc = _bindings()
    text, headers = source(f"{name}.cu"), [source(h).encode() for h in HEADERS]
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            text.encode(), f"{name}.cu".encode(), len(headers), headers, [h.encode() for h in HEADERS]
        ),
        "nvrtcCreateProgram",
    )
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    options += [f"-D{key}={value}" for key, value in sorted(defines.items())]
    status = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if int(status[0]) != 0:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
        nvrtc.nvrtcGetProgramLog(program, log)
        raise FourfoldError(f"kernel {name} does not compile", why=log.decode(errors="replace").strip("\0 \n"))
    cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
    _checked((*nvrtc.nvrtcGetCUBIN(program, cubin), None), "nvrtcGetCUBIN")
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def cached_cubin(name: str, defines: Mapping[str, int], capability: tuple[int, int], folder: Path) -> bytes:
    """``compile_cubin``, kept in ``folder`` under a name that changes with source, defines, target and compiler."""
    _, nvrtc = _bindings()
    digest = hashlib.sha256()
    for part in (source(f"{name}.cu"), *(source(h) for h in HEADERS), sorted(defines.items()), capability):
        digest.update(repr(part).encode())
    digest.update(repr(_checked(nvrtc.nvrtcVersion(), "nvrtcVersion")).encode())
    path = folder / f"{name}-{digest.hexdigest()[:24]}.cubin"
    if path.exists():
        return path.read_bytes()
    cubin = compile_cubin(name, defines, capability)

    def write(temporary: Path) -> None:
        temporary.write_bytes(cubin)

    write_atomically(path, write)
    return cubin


class Kernel(NamedTuple):
    """A loaded kernel: CUfunction as an integer, its name, and whether it is launched so that it may start while its
    predecessor drains (sm_90; it waits for it by itself)."""

    handle: int
    name: str
    dependent: bool


@functools.cache
def _load(name: str, defines: tuple[tuple[str, int], ...], device: int, shared: int, dependent: bool) -> Kernel:
    driver, _ = _bindings()
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise FourfoldError(
            f"compute capability {capability[0]}.{capability[1]} is too old for the 4-bit kernels",
            why="they use instructions of 8.0 (Ampere) and later",
            fix="serve this model without Fourfold (FOURFOLD=0) on this GPU",
        )
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the context current
        cubin = cached_cubin(name, dict(defines), capability, Settings.from_env(os.environ).cache_dir / "kernels")
        module = _checked(driver.cuModuleLoadData(cubin), f"loading kernel {name}")
        function = _checked(driver.cuModuleGetFunction(module, name.encode()), f"finding kernel {name}")
        if shared > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked((*driver.cuFuncSetAttribute(function, attribute, shared), None), f"shared memory of {name}")
    return Kernel(int(function), name, dependent and capability >= (9, 0))


def load(
    name: str, defines: Mapping[str, int], device: torch.device, shared: int = 0, dependent: bool = True
) -> Kernel:
    """Compile (or read from the cache) and load a kernel on a device; calls with equal arguments share it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _load(name, tuple(sorted(defines.items())), index, shared, dependent)


def pointer(tensor: torch.Tensor | None) -> int:
    """Device address, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def stream_of(device: torch.device) -> int:
    """Handle of PyTorch's current stream."""
    return torch.cuda.current_stream(device).cuda_stream

"""Kernels from source: NVRTC, a cache of cubins on disk, loaded functions and their launch."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from fourfold.config import Settings
from fourfold.errors import FourfoldError
from fourfold.files import write_atomically

HEADERS = ("mma.h", "project.h")
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


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION = 6


@functools.cache
def _launcher() -> Any:
    """``cuLaunchKernelEx`` through ctypes: a launch through the bindings' objects costs several times as much, and
    between graphs the engine waits for every launch."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    function.restype = ctypes.c_int
    return function


class Kernel:
    """A loaded kernel that takes one structure by value.

    Args:
        handle: CUfunction as an integer.
        dependent: launched so that it may start while its predecessor drains (sm_90); it waits for it by itself.
    """

    __slots__ = (
        "_attribute",
        "_config",
        "_config_address",
        "_launch",
        "_pointer",
        "_pointer_address",
        "handle",
        "name",
    )

    def __init__(self, handle: int, name: str, dependent: bool) -> None:
        self.handle, self.name = handle, name
        self._launch, self._config, self._pointer = _launcher(), _Config(), (ctypes.c_void_p * 1)()
        self._attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
        self._attribute.value[0] = 1
        self._config.attributes = ctypes.pointer(self._attribute)
        self._config.attribute_count = int(dependent)
        self._config_address = ctypes.addressof(self._config)
        self._pointer_address = ctypes.addressof(self._pointer)

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, arguments: ctypes.Structure, stream: int
    ) -> None:
        """Queue on a stream (its handle as an integer); captured if the stream is capturing.  Not thread-safe."""
        config = self._config
        config.grid[:] = grid
        config.block[:] = (threads, 1, 1)
        config.shared, config.stream = shared, stream
        self._pointer[0] = ctypes.addressof(arguments)
        status = self._launch(self._config_address, self.handle, self._pointer_address, None)
        if status:
            raise FourfoldError(
                f"launch of {self.name} with grid {grid} and {shared} bytes of shared memory failed",
                why=f"CUDA driver error {status}",
                fix="run `fourfold doctor` and check the GPU driver",
            )


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


def structure(name: str, fields: Sequence[tuple[str, Any]]) -> type[ctypes.Structure]:
    """A ctypes structure laid out as the kernel's ``Args``."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


def pointer(tensor: torch.Tensor | None) -> int:
    """Device address, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def stream_of(device: torch.device) -> int:
    """Handle of PyTorch's current stream."""
    return torch.cuda.current_stream(device).cuda_stream

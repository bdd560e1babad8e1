"""Launches that cost little: between CUDA graphs the engine waits for every one of them.

A launch through the bindings' objects costs several times as much as ``cuLaunchKernelEx`` through ctypes with
everything but the arguments prepared.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

from fourfold.errors import FourfoldError
from fourfold.kernels.cuda.compile import Kernel

_PROGRAMMATIC_STREAM_SERIALIZATION = 6


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


@functools.cache
def _driver() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    function.restype = ctypes.c_int
    return function


class Launch:
    """A kernel with its grid, ready to be queued again and again.  Not thread-safe.

    Args:
        kernel: loaded; it takes one structure by value.
        arguments: that structure in the notation of ``struct`` with native alignment: ``P`` pointer, ``q`` 64-bit,
            ``i`` int, ``f`` float.
        grid: thread blocks; threads: of a block; shared: bytes of dynamic shared memory.
    """

    __slots__ = ("_attribute", "_buffer", "_call", "_config", "_fixed", "_pack", "_pointer", "what")

    def __init__(
        self, kernel: Kernel, arguments: str, grid: tuple[int, int, int], threads: int, shared: int = 0
    ) -> None:
        layout = struct.Struct("@" + arguments)
        self._pack, self._call = layout.pack_into, _driver()
        self._buffer = ctypes.create_string_buffer(layout.size)
        self._pointer = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
        self._attribute.value[0] = 1
        self._config = _Config(
            grid=grid,
            block=(threads, 1, 1),
            shared=shared,
            attributes=ctypes.pointer(self._attribute),
            attribute_count=int(kernel.dependent),
        )
        self._fixed = (ctypes.addressof(self._config), kernel.handle, ctypes.addressof(self._pointer), None)
        self.what = f"launch of {kernel.name} with grid {grid} and {shared} bytes of shared memory"

    def __call__(self, stream: int, *values: float) -> None:
        """Queue on a stream (its handle); captured if the stream is capturing.  The driver copies the arguments."""
        self._pack(self._buffer, 0, *values)
        self._config.stream = stream
        status = self._call(*self._fixed)
        if status:
            raise FourfoldError(
                f"{self.what} failed",
                why=f"CUDA driver error {status}",
                fix="run `fourfold doctor` and check the GPU driver",
            )

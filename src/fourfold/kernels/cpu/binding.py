"""Builds and binds the C++ kernels: one compile at first use, cached by source, compiler flags and CPU."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
from pathlib import Path

import torch

from fourfold.config import Settings
from fourfold.errors import FourfoldError

HERE = Path(__file__).parent
SOURCES = ("paged.cpp",)
HEADERS = ("paged.h", "layer.h", "plan.h", "rows.h", "quantise.h", "attend.h", "vec.h")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Activations the kernels read and write; values are the enum of paged.h."""

_INTEGERS_BEFORE = "tokens sequences heads kv_heads head_size head_size_v block_size dtype threads"
_STRIDES = "page_stride head_stride v_codes k_scales v_scales"
_MATRICES = (
    "key_centre key_matrix query_matrix value_centre value_matrix value_inverse "
    "sink_key sink_value feedback key_clips value_clips"
)


class Call(ctypes.Structure):
    """``ff_call`` of paged.h, field for field."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in _INTEGERS_BEFORE.split()),
        *((n, ctypes.c_int64) for n in _STRIDES.split()),
        ("cache", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("query_start", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        *((n, ctypes.c_void_p) for n in ("query", "key", "value", "output")),
        *((f"{n}_stride", ctypes.c_int64) for n in ("query", "key", "value", "output")),
        *((n, ctypes.c_void_p) for n in _MATRICES.split()),
        ("key_clip_count", ctypes.c_int64),
        ("value_clip_count", ctypes.c_int64),
        ("soft_cap", ctypes.c_float),
        ("window", ctypes.c_int64),
        ("raw", ctypes.c_int64),
        ("causal", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("scratch_floats", ctypes.c_int64),
    ]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return platform.processor() or platform.machine()


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels.

    Raises:
        FourfoldError: without a C++ compiler, or when the compile fails.
    """
    from torch.utils import cpp_extension

    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        raise FourfoldError(
            f"no C++ compiler ({compiler}) was found",
            why="the CPU kernels are compiled for this processor at first use",
            fix="install g++ or clang++, or point CXX at one",
        )
    text = b"".join((HERE / name).read_bytes() for name in (*SOURCES, *HEADERS))
    key = hashlib.sha256(text + " ".join((compiler, *FLAGS, _cpu_name(), torch.__version__)).encode()).hexdigest()[:16]
    name = f"fourfold_cpu_{key}"
    folder = Settings.from_env().cache_dir / "kernels" / name
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.so"
    if not target.exists():
        try:
            cpp_extension.load(
                name=name,
                sources=[str(HERE / source) for source in SOURCES],
                extra_cflags=list(FLAGS),
                extra_ldflags=["-fopenmp"],
                build_directory=str(folder),
                is_python_module=False,
            )
        except (RuntimeError, OSError) as error:
            raise FourfoldError(
                "the CPU kernels could not be compiled",
                why=str(error).strip().splitlines()[-1],
                fix=f"check that {compiler} is GCC 11+ or Clang 14+ with OpenMP; the build folder is {folder}",
            ) from error
    lib = ctypes.CDLL(str(target))
    for function in ("ff_scratch_floats", "ff_attention", "ff_store"):
        getattr(lib, function).argtypes = [ctypes.POINTER(Call)]
        getattr(lib, function).restype = ctypes.c_int64
    lib.ff_sizeof_call.restype = ctypes.c_int64
    if lib.ff_sizeof_call() != ctypes.sizeof(Call):
        raise FourfoldError(
            "paged.h and binding.py describe different structs",
            why=f"{lib.ff_sizeof_call()} against {ctypes.sizeof(Call)} bytes",
            fix=f"remove {folder} and reinstall fourfold",
        )
    return lib

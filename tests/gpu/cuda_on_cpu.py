"""store.cu compiled for the CPU (cuda_on_cpu.h) and run on tensors: its logic can be wrong on any machine."""

from __future__ import annotations

import ctypes
import functools
import struct
import subprocess
import tempfile
from pathlib import Path

import torch

from fourfold.kernels.cuda import compile as nvrtc
from fourfold.kernels.cuda.pack import PackedParams
from fourfold.kernels.cuda.store import _ARGUMENTS, kernel_defines, shared_bytes
from fourfold.layout import PageLayout

HARNESS = """
#include "store.cu"
alignas(128) char smem[SHARED];
extern "C" void run(const void* arguments, int heads, int blocks) {
  Args a;
  memcpy(&a, arguments, sizeof a);
  cpu::grid_size = {(u32)heads, (u32)blocks};
  for (int h = 0; h < heads; h++)
    for (int b = 0; b < blocks; b++) {
      memset(smem, 0xff, SHARED);  // NaN, whatever is not written
      cpu::block_index = {(u32)h, (u32)b};
      cpu::body = [&] { store(a); };
      cpu::run_block();
    }
}
extern "C" int argument_bytes() { return sizeof(Args); }
"""


@functools.cache
def _library(defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="fourfold-cuda-on-cpu-"))
    header = Path(__file__).with_name("cuda_on_cpu.h").read_text(encoding="utf-8")
    for name, text in (
        ("mma.h", header),
        ("project.h", nvrtc.source("project.h")),
        ("store.cu", nvrtc.source("store.cu")),
        ("harness.cpp", HARNESS),
    ):
        (folder / name).write_text(text, encoding="utf-8")
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", *(f"-D{name}={value}" for name, value in defines),
         "harness.cpp", "-o", "store.so"],
        cwd=folder, check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(folder / "store.so"))


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    layout: PageLayout,
    params: PackedParams,
    *,
    block_tokens: int = 32,
    blocks: int = 2,
) -> None:
    """As ``fourfold.kernels.cuda.store.store``; ``blocks`` of keys and of values a head, ``block_tokens`` at once."""
    kind = (params.metric_keys, params.outer_k, params.outer_v)
    assert shared_bytes(layout, *kind) <= 1 << 18
    library = _library(tuple(sorted(kernel_defines(layout, params.sink, *kind, params.dtype).items())))
    packed = struct.pack(
        "@" + _ARGUMENTS,
        key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0), slots.data_ptr(), positions.data_ptr(),
        cache.data_ptr(), cache.stride(0), cache.stride(1), *params.store_addresses, slots.numel(),
        layout.num_kv_heads, block_tokens,
    )  # fmt: skip
    size = library.argument_bytes()
    assert len(packed) <= size < len(packed) + 8
    library.run(packed.ljust(size, b"\0"), layout.num_kv_heads, 2 * blocks)

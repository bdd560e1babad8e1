"""Decode attention on the CPU: 4-bit pages against vLLM's CPU_ATTN on 16-bit pages, side by side in one run.

    python benchmarks/cpu_decode.py [--out results/cpu-decode] [--repeats 40]

Each call stores one new token per sequence and attends, as an engine's decode step does; vLLM's needs two calls.
Several caches are used in turn, together larger than the last-level cache, because an engine's layers evict each other.
Our kernel is checked against a float64 reference on its own bytes before it is timed.  The floor is the bytes of the
context over the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fourfold.bench.record import record
from fourfold.kernels import reference
from fourfold.kernels.cpu.attention import CpuLayer
from fourfold.layout import PageLayout
from fourfold.quant import codec
from fourfold.quant.params import identity_params

SHAPES = [  # name, head size, KV heads, group
    ("SmolLM2-135M", 64, 3, 3),
    ("Qwen2.5-1.5B", 128, 2, 6),
    ("Llama-3.1-8B", 128, 8, 4),
]
BATCHES = [(1, 2048), (1, 8192), (8, 2048), (8, 8192)]
BLOCK = 128
CACHE_BYTES = 96 << 20  # per contestant, over all input sets


class Case:
    """Input sets of one shape for both kernels, with the same queries and new tokens."""

    def __init__(self, head_size: int, kv_heads: int, group: int, batch: int, context: int, dtype: torch.dtype) -> None:
        self.d, self.kv_heads, self.heads = head_size, kv_heads, kv_heads * group
        self.batch, self.context = batch, context
        self.layout = PageLayout(BLOCK, kv_heads, head_size, head_size)
        self.params = identity_params(kv_heads, head_size, head_size)
        self.layer = CpuLayer(self.layout, self.heads, head_size**-0.5, self.params)
        pages = context // BLOCK
        dense = batch * context * kv_heads * head_size * 2 * dtype.itemsize
        self.sets = max(2, min(8, -(-CACHE_BYTES // dense)))
        self.tables = [torch.randperm(batch * pages).view(batch, pages).to(torch.int32) for _ in range(self.sets)]
        self.packed = []
        self.dense = []
        for _ in range(self.sets):
            cache = torch.randint(0, 256, (batch * pages, kv_heads, self.layout.head_page_bytes), dtype=torch.uint8)
            _, _, ks, vs = codec.page_views(cache, self.layout)
            ks.copy_(torch.rand(ks.shape) * 0.1 + 0.2)
            vs.copy_(torch.rand(vs.shape) * 0.1 + 0.2)
            self.packed.append(cache)
            self.dense.append(torch.randn(batch * pages, kv_heads, BLOCK * 2, head_size).to(dtype))
        self.query, self.key, self.value = (
            torch.randn(batch, n, head_size).to(dtype) for n in (self.heads, kv_heads, kv_heads)
        )
        self.output = torch.empty_like(self.query)
        self.start = torch.arange(batch + 1, dtype=torch.int32)
        self.lengths = torch.full((batch,), context, dtype=torch.int32)
        self.slots = [t[:, -1].long() * BLOCK + BLOCK - 1 for t in self.tables]
        self.metadata = self._vllm_metadata(dtype)

    def _vllm_metadata(self, dtype: torch.dtype) -> torch.Tensor:
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        self.isa = _get_attn_isa(dtype, BLOCK, self.d, "auto")
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=self.batch, num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.d,
            seq_lens=self.lengths, dtype=dtype, query_start_loc=self.start, causal=True,
            sliding_window_size=-1, isa=self.isa, enable_kv_split=True,
        )  # fmt: skip

    def fourfold(self, i: int) -> None:
        i %= self.sets
        self.layer.attend(
            self.query, self.key, self.value, self.packed[i], self.output, query_start=self.start,
            seq_lens=self.lengths, block_table=self.tables[i], slots=self.slots[i],
        )  # fmt: skip

    def cpu_attn(self, i: int) -> None:
        from vllm import _custom_ops as ops

        i %= self.sets
        keys, values = self.dense[i].chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(self.key, self.value, keys, values, self.slots[i], self.isa)
        ops.cpu_attention_with_kv_cache(
            query=self.query, key_cache=keys, value_cache=values, output=self.output, query_start_loc=self.start,
            seq_lens=self.lengths, scale=self.d**-0.5, causal=True, alibi_slopes=None, sliding_window=-1,
            block_table=self.tables[i], softcap=0, scheduler_metadata=self.metadata, s_aux=None,
        )  # fmt: skip

    def error(self) -> float:
        """Relative error of our kernel on its own bytes, first sequence, against the float64 oracle."""
        self.fourfold(0)
        p = self.params
        want = reference.attend(
            self.query[:1].double().numpy(), self.packed[0].numpy(), self.tables[0][0].tolist(), self.context,
            block_size=BLOCK, scale=self.d**-0.5, query_matrix=p.query_matrix.double().numpy(),
            value_inverse=p.value_matrix.T.double().numpy(), value_centre=p.value_centre.double().numpy(),
            sink_key=p.sink_key.double().numpy(), sink_value=p.sink_value.double().numpy(),
        )  # fmt: skip
        got = self.output[:1].double().numpy()
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def interleaved_medians(calls: dict[str, Callable[[int], None]], repeats: int) -> dict[str, float]:
    """Median microseconds of each call, taken in turns so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 3):
        for name, call in calls.items():
            start = time.perf_counter()
            call(i)
            if i >= 3:
                times[name].append(time.perf_counter() - start)
    return {name: float(np.median(t)) * 1e6 for name, t in times.items()}


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, read and written counted."""
    a, b = torch.empty(1 << 28, dtype=torch.uint8), torch.empty(1 << 28, dtype=torch.uint8)
    best = min(_timed(lambda: b.copy_(a)) for _ in range(5))
    return 2 * a.numel() / best


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for metrics.json")
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e9:.1f} GB/s, {torch.get_num_threads()} threads")
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for name, d, kv_heads, group in SHAPES:
            for batch, context in BATCHES:
                if kv_heads == 8 and batch * context > 16384:
                    continue  # two copies of several sets would not fit small machines
                case = Case(d, kv_heads, group, batch, context, dtype)
                error = case.error()
                limit = 1e-5 if dtype == torch.float32 else 1e-2
                if not error <= limit:
                    print(f"wrong result: error {error:.1e} at {name} {batch} × {context}", file=sys.stderr)
                    return 1
                us = interleaved_medians({"fourfold": case.fourfold, "cpu_attn": case.cpu_attn}, arguments.repeats)
                held = batch * context * kv_heads
                floor = {
                    "fourfold": held * case.layout.bytes_per_token_head / bandwidth * 1e6,
                    "cpu_attn": held * 2 * d * dtype.itemsize / bandwidth * 1e6,
                }
                ratio = us["cpu_attn"] / us["fourfold"]
                rows.append({
                    "shape": name, "head_size": d, "kv_heads": kv_heads, "group": group, "batch": batch,
                    "context": context, "dtype": str(dtype).removeprefix("torch."),
                    "us": us, "floor_us": floor, "error": error, "ratio": {"cpu_attn": ratio},
                })  # fmt: skip
                print(
                    f"{name:13} {rows[-1]['dtype']:8} {batch} × {context:5}: fourfold {us['fourfold']:8.0f} µs "
                    f"(floor {floor['fourfold']:6.0f}), CPU_ATTN {us['cpu_attn']:8.0f} µs (floor "
                    f"{floor['cpu_attn']:6.0f}), {ratio:.2f}× as fast, error {error:.1e}",
                    flush=True,
                )
    if arguments.out:
        config = {"block_size": BLOCK, "repeats": arguments.repeats, "threads": torch.get_num_threads()}
        result = {"rows": rows, "copy_bytes_per_s": bandwidth}
        command = ["python", *sys.argv]
        print(record(arguments.out.parent, arguments.out.name, result, command=command, config=config))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

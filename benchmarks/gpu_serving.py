"""Serving on one GPU: the same Poisson load on the same KV budget, one KV mode after another.

    python benchmarks/gpu_serving.py --lengths LENGTHS.json --out results/gpu_serving

A Llama-3.1-8B-shaped model with random weights (the load fixes every answer's length, so text does not matter), vLLM's
engine with its default compilation and CUDA graphs.  LENGTHS.json is [[prompt tokens, answer tokens], …], ShareGPT's
for the recorded table.  Each mode runs in a process of its own; several rates share one start.  Writes
DIR/metrics.json: {"rows": [{"mode", "rate", "capacity_tokens", "ttft_mean_s", …}], "environment", "config"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}  # fmt: skip
DTYPES = {"bf16": "auto", "fourfold": "auto"}
"""vLLM's --kv-cache-dtype of a mode; any other mode is its own name."""
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FOURFOLD_CACHE_DIR")
"""Where compiled kernels and calibrations are kept."""


def rate(text: str) -> tuple[float, int]:
    """``RATE`` or ``RATE:REQUESTS``."""
    value, _, requests = text.partition(":")
    return float(value), int(requests or 1500)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def one(engine: Any, name: str, prompt: int, answer: int) -> tuple[float, float, float]:
    """Seconds to the first token, from the first to the last, and tokens of one request."""
    from vllm import SamplingParams

    generator = random.Random(name)
    tokens = [generator.randint(10, 100_000) for _ in range(prompt)]
    params = SamplingParams(max_tokens=answer, min_tokens=answer, ignore_eos=True, temperature=0.0, detokenize=False)
    began, first, count, now = time.perf_counter(), 0.0, 0, 0.0
    async for output in engine.generate({"prompt_token_ids": tokens}, params, name):
        now = time.perf_counter()
        count = len(output.outputs[0].token_ids)
        first = first or (now if count else 0.0)
    return first - began, now - first, float(count)


def preemptions() -> float:
    from prometheus_client import REGISTRY

    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(s.value for s in samples if s.name == "vllm:num_preemptions_total")


async def load(engine: Any, lengths: list[list[int]], rate: float, seed: int) -> dict[str, float]:
    """One Poisson load; times in seconds or milliseconds as named."""
    arrivals, before, began, tasks = random.Random(seed), preemptions(), time.perf_counter(), []
    due = began
    for i, (prompt, answer) in enumerate(lengths):
        tasks.append(asyncio.create_task(one(engine, f"{rate}-{i}", prompt, answer)))
        due += arrivals.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    rows = await asyncio.gather(*tasks)
    took = time.perf_counter() - began
    ttft, tpot = [r[0] for r in rows], [1e3 * r[1] / (r[2] - 1) for r in rows if r[2] > 1]
    return {
        "ttft_mean_s": statistics.mean(ttft), "ttft_p50_s": quantile(ttft, 0.5), "ttft_p99_s": quantile(ttft, 0.99),
        "tpot_mean_ms": statistics.mean(tpot), "tpot_p50_ms": quantile(tpot, 0.5),
        "tpot_p99_ms": quantile(tpot, 0.99), "latency_mean_s": statistics.mean(r[0] + r[1] for r in rows),
        "latency_p99_s": quantile([r[0] + r[1] for r in rows], 0.99),
        "output_tokens_per_s": sum(r[2] for r in rows) / took, "seconds": took, "preemptions": preemptions() - before,
    }  # fmt: skip


async def serve(job: dict[str, Any]) -> list[dict[str, Any]]:
    """All rates of one mode; runs in a process of its own."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.perf_counter()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["engine"]))
    started = time.perf_counter() - began
    lengths = json.loads(Path(job["lengths"]).read_text())
    random.Random(1).shuffle(lengths)
    await asyncio.gather(*(one(engine, f"warm-{i}", 64 + 16 * i, 32) for i in range(32)))
    cache = engine.vllm_config.cache_config
    rows = []
    for rate, requests in job["rates"]:
        row = await load(engine, lengths[:requests], rate, seed=2)
        capacity = cache.num_gpu_blocks * cache.block_size
        rows.append(
            {
                "mode": job["mode"],
                "rate": rate,
                "requests": requests,
                "capacity_tokens": capacity,
                "start_s": started,
                **row,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    engine.shutdown()
    return rows


def run_mode(mode: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Start a process for one mode and return its rows."""
    engine: dict[str, Any] = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096,
        "kv_cache_dtype": DTYPES.get(mode, mode), "kv_cache_memory_bytes": int(options.kv_gib * 2**30),
        "max_num_seqs": options.max_num_seqs, "enable_prefix_caching": False, "disable_log_stats": False,
    }  # fmt: skip
    if mode == "fourfold":
        engine["attention_backend"] = "CUSTOM"
    engine.update(options.engine)
    job = {
        "mode": mode, "engine": engine, "rates": options.rates, "lengths": str(options.lengths),
        "result": str(folder / f"{mode}.json"),
    }  # fmt: skip
    path = folder / f"{mode}.job"
    path.write_text(json.dumps(job))
    environment = {**os.environ, "FOURFOLD": str(int(mode == "fourfold"))}
    if options.cold:
        environment.update((name, str(folder / mode / name)) for name in CACHES)
    log = options.out / f"{mode}.log"
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, __file__, "--job", str(path)], env=environment, stdout=file, stderr=file, check=False
        )
    if done.returncode or not Path(job["result"]).exists():
        raise SystemExit(f"{mode} stopped with code {done.returncode}; see {log}")
    return json.loads(Path(job["result"]).read_text())


def environment() -> dict[str, Any]:
    import torch
    import vllm

    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "vllm": vllm.__version__,
        "python": platform.python_version(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/gpu_serving"))
    parser.add_argument("--modes", default="bf16,fp8,fourfold,int4_per_token_head,turboquant_4bit_nc")
    parser.add_argument("--rates", type=rate, nargs="+", default=[(64.0, 1500)], help="RATE[:REQUESTS], one start")
    parser.add_argument("--cold", action="store_true", help="empty caches for every mode, as at a first start")
    parser.add_argument("--kv-gib", type=float, default=5.0)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as JSON")
    options = parser.parse_args()
    if options.job:
        job = json.loads(Path(options.job).read_text())
        Path(job["result"]).write_text(json.dumps(asyncio.run(serve(job))))
        return
    if options.lengths is None or not options.lengths.is_file():
        parser.error("--lengths names a JSON file of [[prompt tokens, answer tokens], …]")
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL))
        for mode in options.modes.split(","):
            rows += run_mode(mode, options, folder)
            for row in rows[-len(options.rates) :]:
                print(
                    f"{row['mode']:>20} {row['rate']:6.0f}/s  capacity {row['capacity_tokens']:7d}  "
                    f"TTFT {row['ttft_mean_s']:6.2f} s (p99 {row['ttft_p99_s']:6.2f})  "
                    f"TPOT {row['tpot_mean_ms']:5.1f} ms (p99 {row['tpot_p99_ms']:5.1f})  "
                    f"{row['output_tokens_per_s']:6.0f} tok/s  {row['preemptions']:4.0f} preemptions  "
                    f"start {row['start_s']:.0f} s",
                    flush=True,
                )
            config = {"kv_gib": options.kv_gib, "cold": options.cold, "max_num_seqs": options.max_num_seqs,
                      "engine": options.engine}  # fmt: skip
            result = {"rows": rows, "config": config, "environment": environment()}
            temporary = options.out / "metrics.json.tmp"
            temporary.write_text(json.dumps(result, indent=1) + "\n")
            temporary.replace(options.out / "metrics.json")


if __name__ == "__main__":
    main()

"""What the serving benchmarks share: the model's shape, an engine in a process of its own, Poisson loads, statistics.

The parent calls ``run_job`` and reads rows as they come; the child is this file as a script.  A job is
``{"labels": {…}, "engine": {AsyncEngineArgs}, "requests": FILE, "rates": [[rate, requests], …], "result": FILE}``,
its requests ``[{"prompt_token_ids": [int, …], "output_tokens": int}, …]``; every row starts with the job's labels.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from serving_busy import Busy

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}  # fmt: skip
DTYPES = {"bf16": "auto", "fourfold": "auto"}
"""vLLM's --kv-cache-dtype of a mode; any other mode is its own name."""


class JobFailed(RuntimeError):
    """An engine's process ended early; the message has the end of its log."""


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def engine_arguments(mode: str, model: Path, kv_gib: float, max_num_seqs: int) -> dict[str, Any]:
    """``AsyncEngineArgs`` of a KV mode; ``model`` is a folder with a config.json and no weights."""
    engine: dict[str, Any] = {
        "model": str(model), "load_format": "dummy", "max_model_len": 4096,
        "kv_cache_dtype": DTYPES.get(mode, mode), "kv_cache_memory_bytes": int(kv_gib * 2**30),
        "max_num_seqs": max_num_seqs, "enable_prefix_caching": False, "disable_log_stats": False,
    }  # fmt: skip
    if mode == "fourfold":
        engine["attention_backend"] = "CUSTOM"
    return engine


async def one(
    engine: Any, name: str, prompt: list[int], answer: int, *, ignore_eos: bool = True
) -> tuple[float, float, float]:
    """Seconds to the first token, from the first to the last, and tokens of one request."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=answer, min_tokens=answer, ignore_eos=ignore_eos, temperature=0.0, detokenize=False
    )
    began, first, count, now = time.perf_counter(), 0.0, 0, 0.0
    async for output in engine.generate({"prompt_token_ids": prompt}, params, name):
        now = time.perf_counter()
        count = len(output.outputs[0].token_ids)
        first = first or (now if count else 0.0)
    return first - began, now - first, float(count)


def counters() -> dict[str, float]:
    """Totals of vLLM's preemptions and of everything that the ranked scheduler exports, summed over labels.

    The scheduler's numbers come from the engine's process, and only where PROMETHEUS_MULTIPROC_DIR is set.
    """
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    totals = {"vllm:num_preemptions_total": 0.0}
    for metric in get_prometheus_registry().collect():
        for sample in metric.samples:
            if sample.name in totals or sample.name.startswith("fourfold:rank_"):
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def scheduler_numbers(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float | None]:
    """The ranked scheduler's counters during a load, and its gauges after it (None: not known yet)."""
    numbers: dict[str, float | None] = {}
    for name, value in after.items():
        if name.startswith("fourfold:rank_") and not name.endswith("_created"):
            value -= before.get(name, 0.0) if name.endswith("_total") else 0.0
            numbers[name.removeprefix("fourfold:rank_").removesuffix("_total")] = None if math.isnan(value) else value
    return numbers


async def load(engine: Any, requests: list[dict[str, Any]], rate: float, seed: int) -> dict[str, Any]:
    """One Poisson load, drained; times in seconds or milliseconds as named."""
    arrivals, before, began, tasks = random.Random(seed), counters(), time.perf_counter(), []
    due = began
    for i, request in enumerate(requests):
        work = one(engine, f"{rate}-{i}", request["prompt_token_ids"], request["output_tokens"])
        tasks.append(asyncio.create_task(work))
        due += arrivals.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    rows = await asyncio.gather(*tasks)
    took, after = time.perf_counter() - began, counters()
    ttft, tpot = [r[0] for r in rows], [1e3 * r[1] / (r[2] - 1) for r in rows if r[2] > 1]
    row: dict[str, Any] = {
        "ttft_mean_s": statistics.mean(ttft), "ttft_p50_s": quantile(ttft, 0.5), "ttft_p99_s": quantile(ttft, 0.99),
        "tpot_mean_ms": statistics.mean(tpot), "tpot_p50_ms": quantile(tpot, 0.5),
        "tpot_p99_ms": quantile(tpot, 0.99), "latency_mean_s": statistics.mean(r[0] + r[1] for r in rows),
        "latency_p99_s": quantile([r[0] + r[1] for r in rows], 0.99), "ttft_worst_s": max(ttft),
        "output_tokens_per_s": sum(r[2] for r in rows) / took, "seconds": took,
        "preemptions": after["vllm:num_preemptions_total"] - before["vllm:num_preemptions_total"],
    }  # fmt: skip
    scheduler = scheduler_numbers(before, after)
    return {**row, "scheduler": scheduler} if scheduler else row


async def warm_up(engine: Any) -> None:
    """32 requests of growing prompts.  They do not ignore EOS (they are too short to end by it): answers cut at
    max_tokens are the ones that teach a ranked scheduler nothing."""
    generator = random.Random(0)
    prompts = [[generator.randint(10, 40_000) for _ in range(64 + 16 * i)] for i in range(32)]
    await asyncio.gather(*(one(engine, f"warm-{i}", p, 32, ignore_eos=False) for i, p in enumerate(prompts)))


async def serve(job: dict[str, Any]) -> None:
    """All rates of one engine, one after another; each row is appended to the job's result file as it is known."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.perf_counter()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["engine"]))
    started = time.perf_counter() - began
    requests = json.loads(Path(job["requests"]).read_text())
    await warm_up(engine)
    config = engine.vllm_config
    labels = {
        "capacity_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        "async_scheduling": bool(config.scheduler_config.async_scheduling), "start_s": started,
    }  # fmt: skip
    with Path(job["result"]).open("a") as file:
        for rate, count in job["rates"]:
            with Busy() as busy:
                row = await load(engine, requests[:count], rate, seed=2)
            row |= busy.shares
            file.write(json.dumps({**job["labels"], "rate": rate, "requests": count, **labels, **row}) + "\n")
            file.flush()
    engine.shutdown()


def _follow(process: subprocess.Popen[bytes], path: Path) -> Iterator[dict[str, Any]]:
    """Lines that appear in ``path`` until the process has ended."""
    with path.open() as file:
        while True:
            ended = process.poll() is not None
            yield from map(json.loads, file.read().splitlines())
            if ended:
                return
            time.sleep(0.2)


def run_job(job: dict[str, Any], name: str, log: Path, environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Start a process for one engine and yield its rows as they are measured.

    Args:
        job: without "result"; ``name``: of the job, for messages; ``log``: where the engine's output goes.
        environment: variables of the engine's process, over this one's.

    Raises:
        JobFailed: the process failed, or ended before all rates were measured.
    """
    path, result = log.with_suffix(".job"), log.with_suffix(".rows")
    path.write_text(json.dumps({**job, "result": str(result)}))
    result.write_text("")
    count = 0
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, __file__, str(path)], env={**os.environ, **environment}, stdout=file, stderr=file
        )
        try:
            for row in _follow(process, result):
                count += 1
                yield row
        finally:
            process.kill()
            process.wait()
    if process.returncode or count < len(job["rates"]):
        end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise JobFailed(f"{end}\n{name} stopped with code {process.returncode}; see {log}")
    path.unlink()
    result.unlink()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(Path(sys.argv[1]).read_text())))

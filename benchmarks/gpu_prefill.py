"""Prompt throughput on one GPU, with and without a cached prefix, and prompts that fill the whole model length.

    python benchmarks/gpu_prefill.py --out results/gpu_prefill [--modes bf16,fourfold]

A Llama-3.1-8B-shaped model with random weights.  ``fresh``: 8,192 new tokens.  ``cached``: 8,192 new tokens after a
prefix of 8,192 that is in the cache.  Medians of seven requests of one answer token, one at a time, each with a prompt
of its own.  ``--long``: instead, two prompts of 131,000 tokens together, with 95% of the card given to vLLM, so that
any memory its profiling run did not see would run out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fourfold.files import write_json
from gpu_serving import environment
from serving_load import DTYPES, MODEL

CHUNK = 8192


def prompt(seed: int, tokens: int) -> list[int]:
    import random

    generator = random.Random(seed)
    return [generator.randint(10, 100_000) for _ in range(tokens)]


def measure(job: dict[str, Any]) -> dict[str, float]:
    """One mode, in this process: seconds and tokens a second."""
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)

    def seconds(*prompts: list[int]) -> float:
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - began

    if job["long"]:
        length = job["engine"]["max_model_len"] - 72
        took = seconds(prompt(1, length), prompt(2, length))
        return {"long_s": took, "long_tokens_per_s": 2 * length / took}
    for i in range(3):
        seconds(prompt(100 + i, CHUNK))
    fresh = [seconds(prompt(i, CHUNK)) for i in range(7)]
    prefix = prompt(50, CHUNK)
    seconds(prefix)
    cached = [seconds(prefix + prompt(60 + i, CHUNK)) for i in range(8)][1:]
    return {
        "fresh_tokens_per_s": CHUNK / statistics.median(fresh), "fresh_s": statistics.median(fresh),
        "cached_tokens_per_s": CHUNK / statistics.median(cached), "cached_s": statistics.median(cached),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--modes", default="bf16,fourfold")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as JSON")
    parser.add_argument("--out", type=Path, default=Path("results/gpu_prefill"))
    options = parser.parse_args()
    if options.job:
        job = json.loads(Path(options.job).read_text())
        Path(job["result"]).write_text(json.dumps(measure(job)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    length = 131_072 if options.long else 2 * CHUNK + 64
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": length}))
        for mode in options.modes.split(","):
            engine: dict[str, Any] = {
                "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": length,
                "kv_cache_dtype": DTYPES.get(mode, mode), "max_num_batched_tokens": CHUNK,
                "gpu_memory_utilization": 0.95 if options.long else 0.5, **options.engine,
            }  # fmt: skip
            if mode == "fourfold":
                engine["attention_backend"] = "CUSTOM"
            job = {"engine": engine, "long": options.long, "result": str(folder / f"{mode}.json")}
            path = folder / f"{mode}.job"
            path.write_text(json.dumps(job))
            log = options.out / f"{mode}.log"
            with log.open("w") as file:
                done = subprocess.run(
                    [sys.executable, __file__, "--job", str(path)], stdout=file, stderr=file, check=False,
                    env={**os.environ, "FOURFOLD": str(int(mode == "fourfold"))},
                )  # fmt: skip
            if done.returncode:
                raise SystemExit(f"{mode} stopped with code {done.returncode}; see {log}")
            rows[mode] = json.loads(Path(job["result"]).read_text())
            print(mode, {key: round(value, 3) for key, value in rows[mode].items()}, flush=True)
    result = {"modes": rows, "config": {"long": options.long, "engine": options.engine}, "environment": environment()}
    write_json(options.out / "metrics.json", result)


if __name__ == "__main__":
    main()

"""Serving on one GPU: the same Poisson load on the same KV budget, one KV mode after another.

    python benchmarks/gpu_serving.py --lengths LENGTHS.json --out results/gpu_serving

A Llama-3.1-8B-shaped model with random weights (the load fixes every answer's length, so text does not matter), vLLM's
engine with its default compilation and CUDA graphs.  LENGTHS.json is [[prompt tokens, answer tokens], …], ShareGPT's
for the recorded table.  Each mode runs in a process of its own; several rates share one start.  Writes
DIR/metrics.json: {"rows": [{"mode", "rate", "capacity_tokens", "ttft_mean_s", …}], "environment", "config"}.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
from pathlib import Path
from typing import Any

from fourfold.files import write_json
from serving_busy import SHARES
from serving_load import MODEL, JobFailed, engine_arguments, run_job

CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FOURFOLD_CACHE_DIR")
"""Where compiled kernels and calibrations are kept."""


def rate(text: str) -> tuple[float, int]:
    """``RATE`` or ``RATE:REQUESTS``."""
    value, _, count = text.partition(":")
    return float(value), int(count or 1500)


def requests(lengths: Path, count: int) -> list[dict[str, Any]]:
    """Random prompts of the given lengths, the same for every mode."""
    pairs, generator = json.loads(lengths.read_text()), random.Random(1)
    generator.shuffle(pairs)
    return [
        {"prompt_token_ids": [generator.randint(10, 100_000) for _ in range(prompt)], "output_tokens": answer}
        for prompt, answer in pairs[:count]
    ]


def environment() -> dict[str, Any]:
    import torch
    import vllm

    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "vllm": vllm.__version__,
        "python": platform.python_version(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/gpu_serving"))
    parser.add_argument("--modes", default="bf16,fp8,fourfold,int4_per_token_head,turboquant_4bit_nc")
    parser.add_argument("--rates", type=rate, nargs="+", default=[(64.0, 1500)], help="RATE[:REQUESTS], one start")
    parser.add_argument("--cold", action="store_true", help="empty caches for every mode, as at a first start")
    parser.add_argument("--kv-gib", type=float, default=5.0)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as JSON")
    options = parser.parse_args()
    if options.lengths is None or not options.lengths.is_file():
        parser.error("--lengths names a JSON file of [[prompt tokens, answer tokens], …]")
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL))
        load = folder / "requests.json"
        load.write_text(json.dumps(requests(options.lengths, max(n for _, n in options.rates))))
        for mode in options.modes.split(","):
            engine = engine_arguments(mode, folder, options.kv_gib, options.max_num_seqs)
            job = {
                "labels": {"mode": mode}, "engine": {**engine, "skip_tokenizer_init": True, **options.engine},
                "requests": str(load), "rates": options.rates,
            }  # fmt: skip
            variables = {"FOURFOLD": str(int(mode == "fourfold"))}
            if options.cold:
                variables.update((name, str(folder / mode / name)) for name in CACHES)
            try:
                for row in run_job(job, mode, options.out / f"{mode}.log", variables):
                    rows.append(row)
                    print(
                        f"{row['mode']:>20} {row['rate']:6.0f}/s  capacity {row['capacity_tokens']:7d}  "
                        f"TTFT {row['ttft_mean_s']:6.2f} s (p99 {row['ttft_p99_s']:6.2f})  "
                        f"TPOT {row['tpot_mean_ms']:5.1f} ms (p99 {row['tpot_p99_ms']:5.1f})  "
                        f"{row['output_tokens_per_s']:6.0f} tok/s  {row['preemptions']:4.0f} preemptions  "
                        f"start {row['start_s']:.0f} s  " + " ".join(f"{k} {row[k]:.2f}" for k in SHARES if row[k]),
                        flush=True,
                    )
            except JobFailed as error:
                raise SystemExit(str(error)) from None
            config = {"kv_gib": options.kv_gib, "cold": options.cold, "max_num_seqs": options.max_num_seqs,
                      "engine": options.engine}  # fmt: skip
            result = {"rows": rows, "config": config, "environment": environment()}
            write_json(options.out / "metrics.json", result)


if __name__ == "__main__":
    main()

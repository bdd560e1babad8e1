"""What one engine step is made of: wall time and GPU kernels of steady steps, decodes with prompt chunks beside them.

    python benchmarks/gpu_profile.py --mode fourfold --running 350 --new 1 --out results/gpu_profile

A Llama-3.1-8B-shaped model with random weights, the engine inside this process.  ``--running`` requests decode while
``--new`` requests of 181 prompt tokens arrive every step and as many end.  Prints milliseconds a step for each kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from fourfold.files import write_json
from serving_load import MODEL, engine_arguments

PROMPT = 181


def build(options: argparse.Namespace, folder: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = engine_arguments(options.mode, folder, options.kv_gib, max_num_seqs=512)
    arguments |= {"skip_tokenizer_init": True, **options.engine}
    return LLMEngine.from_engine_args(EngineArgs(**arguments))


class Load:
    """Keeps ``running`` requests alive: every step ``new`` arrive, and as many end."""

    def __init__(self, engine: Any, options: argparse.Namespace) -> None:
        self.engine, self.options, self.count = engine, options, 0

    def add(self, answer: int) -> None:
        from vllm import SamplingParams

        prompt = [(7 * self.count + 13 * i) % 100_000 + 10 for i in range(PROMPT)]
        params = SamplingParams(
            max_tokens=answer, min_tokens=answer, ignore_eos=True, temperature=0.0, detokenize=False
        )
        self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, params)
        self.count += 1

    def fill(self) -> None:
        new, running = self.options.new, self.options.running
        for i in range(running):
            self.add(40 + (i // new if new else 10_000 - i))
        for _ in range(30):
            self.engine.step()

    def step(self) -> None:
        for _ in range(self.options.new):
            self.add(self.options.running // max(self.options.new, 1))
        self.engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="fourfold")
    parser.add_argument("--running", type=int, default=350)
    parser.add_argument("--new", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kv-gib", type=int, default=8)
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as JSON")
    parser.add_argument("--out", type=Path, default=Path("results/gpu_profile"))
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["FOURFOLD"] = str(int(options.mode == "fourfold"))
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL))
        load = Load(build(options, folder), options)
    load.fill()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(options.steps):
        load.step()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - began) / options.steps * 1e3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(20):
            load.step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profile.events():
        kernels[event.name][0] += event.device_time / 1e3 / 20
        kernels[event.name][1] += 1 / 20
    rows = sorted(((ms, n, name) for name, (ms, n) in kernels.items()), reverse=True)
    total = sum(row[0] for row in rows)
    print(f"{options.mode}: {wall:.2f} ms a step, {total:.2f} ms of kernels, {options.running} running")
    for ms, n, kernel in rows[:16]:
        print(f"  {ms:7.3f} ms {n:7.1f} x {kernel[:90]}")
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"mode": options.mode, "running": options.running, "new": options.new, "wall_ms": wall,
              "kernels": [{"name": k, "ms": ms, "count": n} for ms, n, k in rows]}  # fmt: skip
    write_json(options.out / f"{options.mode}.json", result)


if __name__ == "__main__":
    main()

"""One KV mode in one process: run windows through a real vLLM engine and compare its logits with the baseline's.

``python -m fourfold.evals.worker JOB.json``.  The engine runs inside this process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``): two imports of vLLM less than a server, and no traffic.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from fourfold.evals.engine import EXTENSION, measure_windows
from fourfold.evals.process import work


class LocalEngine:
    """``vllm.LLM`` in this process; see ``engine.Engine``."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self.llm = LLM(model=model, worker_extension_cls=EXTENSION, **arguments)
        self.params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True, detokenize=False
        )

    def process(self, window: list[int]) -> list[float]:
        """Run one window; vLLM's log-probabilities of its tokens."""
        output = self.llm.generate([{"prompt_token_ids": window}], self.params, use_tqdm=False)[0]
        return [output.prompt_logprobs[i][window[i]].logprob for i in range(1, len(window))]

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the worker."""
        return self.llm.collective_rpc(method, args=arguments)[0]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job; see ``fourfold.evals.perplexity`` for its fields."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # inside one process vLLM takes one thread for itself unless this is set
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    start = time.monotonic()
    engine = LocalEngine(job["model"], job["engine"])
    started = time.monotonic()
    result = measure_windows(
        engine,
        job["windows"],
        Path(job["folder"]),
        save=job["save"],
        compare=job["compare"],
        progress=lambda done: print(f"WINDOW {done}", flush=True),
    )
    cache = engine.llm.llm_engine.vllm_config.cache_config
    return {
        **result,
        "block_size": cache.block_size,
        "num_gpu_blocks": cache.num_gpu_blocks,
        "start_s": round(started - start, 2),
        "eval_s": round(time.monotonic() - started, 2),
    }


if __name__ == "__main__":
    work(run)

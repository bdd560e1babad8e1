"""One KV mode in one process: answer prompts greedily, all at once, on vLLM's engine as it is served.

``python -m fourfold.evals.generate JOB.json``; the job holds ``model``, ``engine`` (arguments of ``vllm.LLM``),
``prompts`` (text), ``stop`` (strings), ``max_tokens`` and ``result`` (the path of the answers).
"""

from __future__ import annotations

import time
from typing import Any

from fourfold.evals.process import work


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Answer the job's prompts; ``answers`` are in their order, ``cut`` counts those that ran to ``max_tokens``."""
    from vllm import LLM, SamplingParams

    start = time.monotonic()
    llm = LLM(model=job["model"], **job["engine"])
    started = time.monotonic()
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], stop=job["stop"])
    answers = [output.outputs[0] for output in llm.generate(job["prompts"], params, use_tqdm=False)]
    config = llm.llm_engine.vllm_config
    return {
        "answers": [answer.text for answer in answers],
        "cut": sum(answer.finish_reason == "length" for answer in answers),
        "output_tokens": sum(len(answer.token_ids) for answer in answers),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "block_size": config.cache_config.block_size,
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
        "skip_layers": config.cache_config.kv_cache_dtype_skip_layers,
        "start_s": round(started - start, 2),
        "generate_s": round(time.monotonic() - started, 2),
    }


if __name__ == "__main__":
    work(run)

"""Runs engines one after another in a process of its own: ``python child.py JOBS.json`` writes ``JOBS.json.out``.

A job: {"engine": {LLM arguments}, "calls": [{"prompts": [[token ids]], "max_tokens": n | [n, …]}]}.  Its result:
capacity, what the workers hold, the tokens of each call, for a call with "gaps" by how much the best token led at each
place (log-probability), when each request was first scheduled, and vLLM's counters.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def look(model: Any) -> list[dict[str, Any]]:
    """Shape, strides, dtype and bytes of each layer's cache, as the worker holds them."""
    return [
        {
            "shape": list(m.kv_cache.shape),
            "stride": list(m.kv_cache.stride()),
            "dtype": str(m.kv_cache.dtype),
            "bytes": m.kv_cache.untyped_storage().nbytes(),
        }
        for m in model.modules()
        if getattr(m, "kv_cache", None) is not None and m.kv_cache.dim() == 4
    ]


def lead(place: Any) -> float:
    """Log-probability of the best token over the second's."""
    best, second = sorted((token.logprob for token in place.values()), reverse=True)[:2]
    return best - second


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    defaults = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "disable_log_stats": False}
    llm = LLM(**{**defaults, **job["engine"]})
    cache = llm.llm_engine.vllm_config.cache_config
    result: dict[str, Any] = {
        "blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "calls": [],
        "gaps": [],
        "started": [],
    }
    result["layers"] = llm.apply_model(look)[0]
    for call in job.get("calls", []):
        prompts, limits = call["prompts"], call["max_tokens"]
        limits = limits if isinstance(limits, list) else [limits] * len(prompts)
        more = {"logprobs": 2} if call.get("gaps") else {}
        params = [
            SamplingParams(max_tokens=n, temperature=0.0, detokenize=False, ignore_eos=True, **more) for n in limits
        ]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        result["calls"].append([list(o.outputs[0].token_ids) for o in outputs])
        if more:
            result["gaps"].append([[lead(place) for place in o.outputs[0].logprobs] for o in outputs])
        result["started"].append([o.metrics.scheduled_ts if o.metrics else None for o in outputs])
    wanted = ("num_preemptions", "prefix_cache_hits", "spec_decode_num_accepted_tokens", "spec_decode_num_drafts")
    result["counters"] = {
        m.name.removeprefix("vllm:"): m.value
        for m in llm.get_metrics()
        if m.name.endswith(wanted) and hasattr(m, "value")
    }
    return result


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # inside one process vLLM takes one thread for itself unless this is set
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    path = Path(sys.argv[1])
    results = []
    for job in json.loads(path.read_text()):
        results.append(run(job))
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    path.with_suffix(".out").write_text(json.dumps(results))


if __name__ == "__main__":
    main()

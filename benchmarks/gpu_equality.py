"""Text in float32 under every kind of CUDA graph, speculation, prefix hits and chunked prefill: all the same?

    python benchmarks/gpu_equality.py --out results/gpu-equality [--workers 8]

A tiny Llama with random weights (4 layers, 8/2 heads of 128); eight prompts of 1 to 2,000 tokens in chunks of 256, each
asked twice, the second time from the prefix cache; 24 tokens each.  The plain run is eager and without speculation.
Engines run side by side, in processes of their own.  Writes DIR/metrics.json and exits with 1 if any text differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2048,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4, "head_dim": 128, "vocab_size": 32000,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip
GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full": {"compilation_config": {"cudagraph_mode": "FULL"}},
    "full decode only": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
}
LENGTHS = (5, 17, 64, 130, 700, 33, 1, 2000)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Run one engine, in this process."""
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])
    generator = torch.Generator().manual_seed(0)
    prompts = [{"prompt_token_ids": torch.randint(10, 30000, (n,), generator=generator).tolist()} for n in LENGTHS]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    texts = [
        [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
        for _ in range(2)
    ]
    wanted = ("prefix_cache_hits", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    counters = {m.name.removeprefix("vllm:"): m.value for m in llm.get_metrics() if m.name.endswith(wanted)}
    return {"texts": texts, "counters": counters}


def start(name: str, graphs: str, drafts: int, folder: Path, out: Path, runner: str) -> dict[str, Any]:
    """Run one engine in a process of its own."""
    engine: dict[str, Any] = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096,
        "kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 64, "seed": 0, "dtype": "float32",
        "attention_backend": "CUSTOM", "max_num_batched_tokens": 256, "enable_prefix_caching": True,
        "disable_log_stats": False, "gpu_memory_utilization": 0.1, **GRAPHS[graphs],
    }  # fmt: skip
    if drafts:
        engine["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        }  # fmt: skip
    path = folder / f"{name}.job"
    path.write_text(json.dumps({"engine": engine}))
    environment = {**os.environ, "FOURFOLD": "1", "VLLM_USE_V2_MODEL_RUNNER": runner}
    log = out / f"{name.replace(' ', '-')}.log"
    with log.open("w") as file:
        done = subprocess.run([sys.executable, __file__, "--job", str(path)], env=environment, stdout=file, stderr=file)
    result = path.with_suffix(".result")
    if done.returncode or not result.exists():
        return {"error": f"stopped with code {done.returncode}; see {log.name}"}
    log.unlink()
    return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("results/gpu-equality"))
    parser.add_argument("--workers", type=int, default=4, help="engines at a time")
    parser.add_argument("--runner", default="0", choices=["0", "1"], help="vLLM's model runner: 0 for V1, 1 for V2")
    options = parser.parse_args()
    if options.job:
        job = json.loads(options.job.read_text())
        options.job.with_suffix(".result").write_text(json.dumps(answer(job)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.runner == "1":
        print("without drafts: vLLM's V2 runner has no n-gram speculation", flush=True)
    drafted = (0,) if options.runner == "1" else (0, 1, 3, 5)
    cases = [(f"{graphs} {drafts}", graphs, drafts) for graphs in GRAPHS for drafts in drafted]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL))
        # the first one calibrates and compiles for all
        results = {cases[0][0]: start(*cases[0], folder, options.out, options.runner)}
        with ThreadPoolExecutor(options.workers) as pool:
            rest = pool.map(lambda case: start(*case, folder, options.out, options.runner), cases[1:])
            results.update(zip((case[0] for case in cases[1:]), rest, strict=True))
    plain = results["eager 0"].get("texts", [[]])[0]
    rows = []
    for label, graphs, drafts in cases:
        result = results[label]
        same = [sum(a == b for a, b in zip(text, plain, strict=True)) for text in result.get("texts", [])]
        row = {"graphs": graphs, "drafts": drafts, "same": same, "of": len(LENGTHS)}
        rows.append({**row, **result.get("counters", {}), **({"error": result["error"]} if "error" in result else {})})
        print(rows[-1], flush=True)
    temporary = options.out / "metrics.json.tmp"
    temporary.write_text(json.dumps({"rows": rows, "runner": options.runner}, indent=1) + "\n")
    temporary.replace(options.out / "metrics.json")
    if any(row["same"] != [len(LENGTHS)] * 2 for row in rows):
        raise SystemExit("texts differ")


if __name__ == "__main__":
    main()

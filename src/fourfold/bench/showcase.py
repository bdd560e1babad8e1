"""What the demo does and how: sizes, server flags, the request rate, and metrics.json."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from fourfold.bench.answers import more_loops
from fourfold.bench.prompts import Request
from fourfold.errors import FourfoldError
from fourfold.modes import KvMode

DEGENERATE_SLACK, CHANCE = 0.1, 1e-3
"""Answers of a small model loop now and then, at 16 bits too.  A run is invalid if more of them do by this share of the
requests, and chance alone would give so many less often than this."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much the demo does.

    The load is what the machine can just serve: as many output tokens a second as eight requests at once get.  A
    cache that holds more than eight requests keeps up; the 16-bit one holds five or six, queues and preempts.

    Attributes:
        memory: KV bytes of a server.  A 16-bit cache of the default model holds about five requests of full length in
            the 20 MiB of the plain demo; shorter answers in a smaller cache wait the same, but not so long.
        max_len: context of the servers, tokens.
        prompt_tokens, answer_tokens: longest prompt and answer that are taken from ShareGPT.
        min_answer_tokens: the shortest answer.
        cut_answers: longer answers are cut, else their conversations left out.
        seconds: the time over which requests arrive.
        overload: offered output tokens a second, as a multiple of what 8 requests at once get from this machine.
        windows, window_tokens: of the quality measurement.
        min_requests: enough to fill the cache, on slow machines.
        max_requests: an upper bound, for fast machines.
    """

    memory: int = 20 << 20
    max_len: int = 512
    prompt_tokens: int = 160
    answer_tokens: int = 128
    min_answer_tokens: int = 32
    cut_answers: bool = True
    seconds: float = 36.0
    overload: float = 1.0
    windows: int = 4
    window_tokens: int = 500  # the built-in text has a little over 2,000 tokens
    min_requests: int = 24
    max_requests: int = 200

    def requests(self, rate: float) -> int:
        """How many requests to send at ``rate`` a second."""
        return max(self.min_requests, min(self.max_requests, round(rate * self.seconds)))


QUICK = Plan(seconds=15.0, windows=1, window_tokens=256, min_requests=16, max_requests=60)
ORDERED = Plan(
    memory=240 << 20,
    max_len=2048,
    prompt_tokens=1024,
    answer_tokens=1024,
    min_answer_tokens=4,
    cut_answers=False,
    overload=4.0,
    min_requests=100,
    max_requests=100,
)
"""For ``--scheduler ranked``: order matters where work differs, so prompts and answers are as long as they are in
ShareGPT, and where many wait, so they come four times faster than eight at once are served.  The 16-bit cache holds
some 25 requests: with eight, a preemption costs less than the slot that stays empty to prevent it."""
ORDERED_QUICK = replace(ORDERED, windows=1, window_tokens=256, min_requests=20, max_requests=20)
MAX_OVERTAKE_S = 300.0
"""The ranked demo's bound on overtaking.  It should be several times the wait that first-come order gives; on a CPU
that is half a minute, as long as the default bound."""


QUEUED = 0.1
"""Share of the time that requests must wait for the 16-bit cache for a load to have been one."""

RANKED = "+ranked"
"""Ends the name of a result that was served by the ranked scheduler."""


def pick_dtype(simd: list[str], machine_has_gpu: bool) -> str:
    """vLLM's ``auto`` (the model's dtype) where 16-bit arithmetic is fast, float32 on CPUs without it."""
    if machine_has_gpu or not simd or {"avx512_bf16", "amx_bf16", "bf16"} & set(simd):
        return "auto"
    return "float32"


def allotted_bytes(mode: KvMode, budget: int, dtype: str) -> int:
    """KV bytes to give the engine so that ``mode`` holds what ``budget`` bytes hold.

    vLLM on a CPU keeps unquantised keys and values in the dtype of the activations.  Where that is float32 (see
    ``pick_dtype``) they take twice the room of 16 bits, so the baseline gets twice the bytes and holds exactly the
    tokens of a 16-bit cache.  4-bit pages are the same in every dtype and get the budget itself.
    """
    return 2 * budget if dtype == "float32" and not mode.plugin else budget


def physical_cores() -> int:
    """Cores that this process may use, the threads of one core counted once."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    files = (Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list") for cpu in cpus)
    return len({file.read_text() if file.is_file() else file for file in files})


def server_environment(machine_has_gpu: bool) -> dict[str, str]:
    """vLLM's own settings for the demo's servers, equal for both modes.

    On a CPU vLLM starts an API server, an engine and a worker, and each imports vLLM.  With its multiprocessing off
    the worker lives in the engine: one import less, nothing that polls between the two, and a step is the same.  vLLM
    then takes the number of threads from the environment, where it would otherwise bind one to each core.
    """
    if machine_has_gpu:
        return {}
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(physical_cores())}


def server_flags(mode: KvMode, budget: int, dtype: str, port: int, block_size: int, max_len: int) -> list[str]:
    """Flags of the demo's servers, equal for both modes but for the cache."""
    memory = str(allotted_bytes(mode, budget, dtype))
    return [
        *("--port", str(port), "--dtype", dtype, "--max-model-len", str(max_len), "--served-model-name", "model"),
        *("--kv-cache-memory-bytes", memory, "--block-size", str(block_size), "--max-num-seqs", "128"),
        *("--max-num-batched-tokens", "1024", "--no-enable-prefix-caching", "--enforce-eager"),
        "--disable-uvicorn-access-log",
        *mode.flags,
    ]


def probe_throughput(url: str, requests: list[Request], tokens: int = 48) -> float:
    """Output tokens a second while a few requests are answered at once, their prompts' time included.

    The first requests warm the server up, with prompts of their own: a prompt that is in the prefix cache costs
    nothing, and the difference of two rounds over the same prompts once gave four times what the machine could do.

    Raises:
        FourfoldError: the server refuses a request.
    """

    def ask(request: Request) -> None:
        body = {
            "model": "model",
            "prompt": request.prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=600, trust_env=False)
        if response.status_code != 200:
            raise FourfoldError(f"the server refused a request with {response.status_code}", why=response.text[:300])

    warm, measured = requests[:2], requests[2:]
    with ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(ask, warm))
        start = time.monotonic()
        list(pool.map(ask, measured))
        return len(measured) * tokens / (time.monotonic() - start)


HEADLINE = (
    *("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tpot_mean_ms", "tpot_p50_ms", "tpot_p99_ms"),
    *("e2el_mean_s", "e2el_p99_s"),
    *("output_tokens_per_s", "preemptions", "completed", "failed", "errors"),
)
"""What metrics.json keeps of a run, per mode; capacity, bytes, validity and quality are added."""


def loops_more(base: int, ours: int, total: int) -> bool:
    """Whether 4-bit pages made answers go round in circles: more than the slack, and more than chance."""
    return ours > base + DEGENERATE_SLACK * total and more_loops(base, ours, total) < CHANCE


def assemble(
    results: dict[str, Any],
    quality: dict[str, Any],
    budget: int,
    dtype: str,
    model: str,
    rate: float,
    text: Path | None,
) -> dict[str, Any]:
    """metrics.json without the environment (see docs/json.md)."""
    base_loops = results["bf16"]["answers"]["degenerate"]
    modes: dict[str, Any] = {}
    for name, row in results.items():
        scores = quality["modes"][name.removesuffix(RANKED)]
        answers, total = row["answers"], row["answers"]["total"]
        modes[name] = {
            "capacity_tokens": row["engine"]["capacity_tokens"],
            "kv_bytes": budget,
            "kv_bytes_allotted": row["kv_bytes_allotted"],
            **{key: row[key] for key in HEADLINE},
            "scheduler": "ranked" if name.endswith(RANKED) else "fcfs",
            "valid": bool(row["valid"]) and not loops_more(base_loops, answers["degenerate"], total),
            "answers": answers,
            "perplexity": scores["perplexity"],
            "kl": scores.get("kl", 0.0),
            "top1_agreement": scores.get("top1_agreement", 1.0),
        }
    first = results["bf16"]
    engine = {**first["engine"], "model": Path(model).name, "dtype": quality["dtype"]}
    engine["block_size"] = engine["cache"].get("block_size")
    engine["cache"] = {name: row["engine"]["cache"] for name, row in results.items()}
    engine["start_s"] = {name: row["start_s"] for name, row in results.items()}
    del engine["capacity_tokens"]
    notes = []
    if any(row["kv_bytes_allotted"] != budget for row in results.values()):
        notes.append(
            f"This processor has no bfloat16 arithmetic, so both servers compute in float32, and vLLM then keeps "
            f"unquantised keys and values in 32 bits. The bf16 server was given {2 * budget / 2**20:,.0f} MiB, twice "
            f"the budget, and so holds exactly the tokens that 16 bits would in {budget / 2**20:,.0f} MiB."
        )
    waiting = first["series"]["waiting"]
    if sum(count > 0 for count in waiting) < QUEUED * len(waiting):
        notes.append(
            "Nothing queued, at 16 bits either: this load was too light to compare anything. The machine was probably "
            "busy while it was probed, and the request rate came out too low. Run it again when it is quiet, or choose "
            "a higher --request-rate."
        )
    if any(name.endswith(RANKED) for name in results):
        notes.append(
            "Ranked: the same load in the order of predicted work. The load asks for exact answer lengths; the "
            "scheduler was told not to use them (FOURFOLD_TRUST_MAX_TOKENS=0) and predicts from the prompts' text."
        )
    count, arrivals = first["answers"]["total"], f"Poisson arrivals at {rate:.2f} a second"
    return {
        "modes": modes,
        "engine": engine,
        "load": {
            "text": f"{count} ShareGPT prompts, {arrivals}, {first['output_tokens']:,} output tokens, same seed",
            "request_rate": rate,
            "num_prompts": count,
        },
        "quality": {
            "text": f"{quality['tokens']:,} tokens of {text.name if text else 'the built-in text'}",
            "tokens": quality["tokens"],
            "windows": quality["windows"],
        },
        "notes": notes,
        "detail": {name: {"series": row["series"], "requests": row["requests"]} for name, row in results.items()},
    }

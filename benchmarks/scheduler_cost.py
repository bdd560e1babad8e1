"""What the ranked scheduler costs in the engine's loop: vLLM's real scheduler under a load, without a model.

    python benchmarks/scheduling_requests.py build/scheduling
    python benchmarks/scheduler_cost.py build/scheduling --out results/scheduler-cost

Steps follow each other every --step-ms of a clock that only the scheduler sees; requests of ``scheduling_requests.py``
arrive at --rate, and every answer is as long as its conversation's.  Async scheduling, one step ahead, the pool of
``gpu_serving.py``'s 4-bit pages.  Policies: vLLM's own first-come scheduler, and the ranked one with the embedded
ranker, told the lengths (oracle: no text, no score, nothing learnt), and switched off.  Counted until the last request
has arrived, in processor time of one thread: µs of schedule() and update_from_output() a step and of add_request() a
request, and their sum in ms a second of the load.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.engine.scheduling import Clock, Engine, make_config, make_request, make_scheduler
from transformers import AutoTokenizer
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from fourfold.bench.record import record
from fourfold.rank.ngram import NgramRanker
from fourfold.rank.policy import Policy, PolicyConfig
from fourfold.vllm_plugin.prompt_text import PromptText
from fourfold.vllm_plugin.ranking import Ranking
from fourfold.vllm_plugin.scheduler import RankedAsyncScheduler

POLICIES = ("fcfs", "off", "ranked", "oracle")
BLOCKS, MAX_SEQS, BATCHED_TOKENS, MAX_LEN = 9929, 512, 2048, 4096
NEVER = 1 << 30
"""Where the dice model would end an answer; here max_tokens does."""


def timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **more: Any) -> Any:
        began = time.thread_time()
        try:
            return call(*arguments, **more)
        finally:
            times.append(time.thread_time() - began)

    return wrapped


def measure(
    policy: str, requests: list[dict[str, Any]], text: PromptText, rate: float, step_s: float
) -> dict[str, Any]:
    """One load."""
    os.environ["FOURFOLD_RANKER"] = "off"  # the scheduler is made without a ranker and given one below
    clock = Clock()
    config = make_config(
        blocks=BLOCKS, max_seqs=MAX_SEQS, batched_tokens=BATCHED_TOKENS, max_len=MAX_LEN, asynchronous=True
    )
    scheduler = make_scheduler(AsyncScheduler if policy == "fcfs" else RankedAsyncScheduler, config)
    if policy in ("ranked", "oracle"):
        decisions = Policy(NgramRanker.load(), PolicyConfig(trust_max_tokens=False))
        scheduler._ranking = Ranking(decisions, text, oracle=policy == "oracle", clock=clock)
        scheduler._take_over(scheduler._ranking)
    times: dict[str, list[float]] = {name: [] for name in ("schedule", "update_from_output", "add_request")}
    for name, values in times.items():
        setattr(scheduler, name, timed(getattr(scheduler, name), values))
    engine, arrivals, due, running = Engine(scheduler, clock, ahead=1), random.Random(2), 0.0, []
    waiting = iter(enumerate(requests))
    following = next(waiting, None)
    while following is not None:
        while following is not None and due <= clock.now:
            i, asked = following
            request = make_request(
                str(i), asked["prompt_token_ids"], max_tokens=asked["output_tokens"], ignore_eos=True
            )
            engine.add(request, NEVER)
            due += arrivals.expovariate(rate)
            following = next(waiting, None)
        engine.step(step_s)
        running.append(len(scheduler.running))
    means = {f"{name}_us": 1e6 * statistics.mean(values) for name, values in times.items()}
    total = 1e3 * sum(map(sum, times.values())) / clock.now
    return {"policy": policy, "running": statistics.mean(running), **means, "ms_per_s": total, "steps": len(running)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what scheduling_requests.py wrote")
    parser.add_argument("--rate", type=float, default=80.0)
    parser.add_argument("--step-ms", type=float, default=18.5)
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts")
    parser.add_argument("--out", type=Path, default=Path("results/scheduler-cost"))
    options = parser.parse_args()
    requests = json.loads((options.folder / "requests.json").read_text())
    text = PromptText(AutoTokenizer.from_pretrained(options.folder))
    rows = []
    for policy in POLICIES:
        runs = [measure(policy, requests, text, options.rate, options.step_ms / 1e3) for _ in range(options.repeats)]
        rows.append(sorted(runs, key=lambda run: run["ms_per_s"])[len(runs) // 2])
        print({name: round(value, 1) if isinstance(value, float) else value for name, value in rows[-1].items()})
    config = {"rate": options.rate, "step_ms": options.step_ms, "blocks": BLOCKS, "requests": len(requests)}
    print(record(options.out.parent, options.out.name, {"rows": rows}, command=["python", *sys.argv], config=config))


if __name__ == "__main__":
    main()

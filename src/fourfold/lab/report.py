"""What a simulated run came to, in the terms of a serving benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.lab.engine import Engine, EngineConfig
from fourfold.lab.queues import FirstCome, Queue, Ranked
from fourfold.lab.steptime import StepTime
from fourfold.lab.workload import Spec
from fourfold.rank.base import Ranker
from fourfold.rank.policy import Policy, PolicyConfig

POLICIES = ("fcfs", "ranked", "oracle")


@dataclass(frozen=True, slots=True)
class Summary:
    """Times in seconds, TPOT in milliseconds."""

    ttft_mean_s: float
    ttft_p99_s: float
    latency_mean_s: float
    latency_p99_s: float
    tpot_mean_ms: float
    tpot_p99_ms: float
    output_tokens_per_s: float
    worst_wait_s: float
    preemptions: int
    most_preemptions: int
    elapsed_s: float


def summarise(engine: Engine) -> Summary:
    """Statistics over the finished requests of an engine."""
    done = engine.done
    ttft = np.array([r.first_s - r.spec.arrival for r in done])
    latency = np.array([r.last_s - r.spec.arrival for r in done])
    tpot = np.array([(r.last_s - r.first_s) / max(1, r.generated - 1) for r in done])
    elapsed = engine.now - min(r.spec.arrival for r in done)
    return Summary(
        ttft_mean_s=float(ttft.mean()),
        ttft_p99_s=float(np.quantile(ttft, 0.99)),
        latency_mean_s=float(latency.mean()),
        latency_p99_s=float(np.quantile(latency, 0.99)),
        tpot_mean_ms=1e3 * float(tpot.mean()),
        tpot_p99_ms=1e3 * float(np.quantile(tpot, 0.99)),
        output_tokens_per_s=sum(r.generated for r in done) / elapsed,
        worst_wait_s=max(r.started_s - r.spec.arrival for r in done),
        preemptions=engine.preemptions,
        most_preemptions=max(r.preemptions for r in done),
        elapsed_s=elapsed,
    )


def simulate(
    specs: Sequence[Spec],
    policy: str,
    engine: EngineConfig,
    step_time: StepTime,
    *,
    ranker: Ranker | None = None,
    config: PolicyConfig | None = None,
) -> tuple[Summary, Engine]:
    """Run one workload under ``fcfs`` (vLLM's default), ``ranked`` or ``oracle`` (the policy, told the lengths)."""
    queue: Queue = FirstCome() if policy == "fcfs" else Ranked(Policy(ranker, config), oracle=policy == "oracle")
    simulated = Engine(engine, step_time, queue)
    simulated.run(list(specs))
    return summarise(simulated), simulated

"""What the ranked scheduler tells an operator: Prometheus metrics, and one line in the log.

The scheduler lives in the engine's process and ``/metrics`` in the API server's.  vLLM's ``SchedulerStats`` travels
between them but has no field for a scheduler's own numbers, so they go the way that prometheus_client has for several
processes: where ``PROMETHEUS_MULTIPROC_DIR`` names a folder (``fourfold serve --scheduler ranked`` makes one, vLLM does
with several API servers), every process writes its numbers there and vLLM's ``/metrics`` adds them up.  Without it only
the log has them.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.logger import init_logger

from fourfold.rank.policy import CLASSES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from fourfold.vllm_plugin.ranking import Ranking

logger = init_logger("vllm.fourfold")
PUBLISH_S, LOG_S = 1.0, 10.0
"""Seconds between two updates of the metrics, and between two lines of the log."""

_COUNTERS = {
    "queue_seconds": "Seconds that requests waited before their first start, by predicted length",
    "starts": "First starts, by predicted length",
    "aged_starts": "Starts that ageing, not length, brought to the front",
    "preemptions_avoided": "Requests held back that had room for their prompt but not for their predicted answer",
    "preemptions": "Preemptions by the ranked scheduler",
    "scored": "Requests scored by the ranker",
    "ranker_seconds": "Seconds spent in the ranker",
    "ranker_text_seconds": "Seconds spent on turning prompts back into text for the ranker",
    "ranker_failures": "Requests that the ranker failed on",
}
_GAUGES = {
    "tau": "Kendall's tau between scores and lengths over the last requests, NaN until there are enough",
    "ranking": "1 while requests are ordered by predicted work, 0 while first-come",
}


@functools.cache
def _metrics() -> dict[str, Any]:
    """One set a process, however many engines it holds."""
    by_class = ("queue_seconds", "starts")
    made: dict[str, Any] = {
        name: Counter(f"fourfold:rank_{name}", text, ["engine", *(["predicted"] if name in by_class else [])])
        for name, text in _COUNTERS.items()
    }
    for name, text in _GAUGES.items():
        made[name] = Gauge(f"fourfold:rank_{name}", text, ["engine"], multiprocess_mode="mostrecent")
    return made


class RankMetrics:
    """Publishes a ``Ranking``'s numbers; ``tick`` is cheap enough for every step."""

    def __init__(self, ranking: Ranking, vllm_config: VllmConfig) -> None:
        self._ranking = ranking
        self._engine = str(getattr(vllm_config.parallel_config, "data_parallel_index", 0))
        self._published: dict[tuple[str, ...], float] = {}
        self._logged: dict[str, float] = {}
        self._next_publish = self._next_log = 0.0

    def tick(self) -> None:
        """Publish and log if it is time."""
        now = time.monotonic()
        if now < self._next_publish:
            return
        self._next_publish = now + PUBLISH_S
        self.publish()
        if now >= self._next_log:
            self._next_log = now + LOG_S
            self.log()

    def counts(self) -> dict[tuple[str, ...], float]:
        """Every counter's total under (name,) or (name, predicted length)."""
        stats = self._ranking.policy.stats
        values: dict[tuple[str, ...], float] = {
            ("aged_starts",): stats.aged_starts,
            ("preemptions_avoided",): stats.deferred_starts,
            ("preemptions",): stats.preemptions,
            ("scored",): stats.scored,
            ("ranker_seconds",): stats.ranker_s,
            ("ranker_text_seconds",): self._ranking.text_s,
            ("ranker_failures",): stats.ranker_failures,
        }
        for kind in CLASSES:
            values["queue_seconds", kind] = stats.queue_s[kind]
            values["starts", kind] = stats.starts[kind]
        return values

    def publish(self) -> None:
        """Bring the Prometheus metrics up to date."""
        metrics = _metrics()
        for key, value in self.counts().items():
            grown = value - self._published.get(key, 0.0)
            metrics[key[0]].labels(self._engine, *key[1:]).inc(max(0.0, grown))
            self._published[key] = value
        policy = self._ranking.policy
        tau = policy.model.tau
        metrics["tau"].labels(self._engine).set(float("nan") if tau is None else tau)
        metrics["ranking"].labels(self._engine).set(float(policy.ranking))

    def log(self) -> None:
        """One line about what happened since the last; nothing if no request started or ended."""
        stats, policy = self._ranking.policy.stats, self._ranking.policy
        now = {"/".join(key): value for key, value in self.counts().items()}
        since = {name: value - self._logged.get(name, 0.0) for name, value in now.items()}
        self._logged = now
        if not any(since[f"starts/{kind}"] for kind in CLASSES) and not since["preemptions"]:
            return
        waits = ", ".join(
            f"{kind} {since[f'queue_seconds/{kind}'] / max(1.0, since[f'starts/{kind}']):.2f} s" for kind in CLASSES
        )
        spent = 1e6 * since["ranker_seconds"] / max(1.0, since["scored"])
        text = 1e6 * since["ranker_text_seconds"] / max(1.0, since["scored"])
        logger.info(
            "Ranked scheduler (%s): queue time by predicted length: %s; tau %s; started by age: %d, held back: %d, "
            "preempted: %d; ranker: %.0f us a request, text: %.0f us, failures: %d",
            "by predicted work" if policy.ranking else "first-come",
            waits,
            "not known yet" if policy.model.tau is None else f"{policy.model.tau:.2f}",
            since["aged_starts"],
            since["preemptions_avoided"],
            since["preemptions"],
            spent,
            text,
            stats.ranker_failures,
        )

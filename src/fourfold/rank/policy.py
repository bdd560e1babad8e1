"""The scheduling policy: who is next, who may start, who gives way.  No torch, no vLLM, no clock of its own.

A vLLM ``Scheduler`` subclass and the simulator drive the same object::

    job = policy.add("id", prompt, prompt_tokens=…, max_tokens=…, arrival=now)      request arrives
    policy.order(job)                            sort key in the waiting queue, constant while it waits there
    policy.may_start(job, running, …)            for the first in the queue: start it, or wait
    policy.start(job, now)                       it was scheduled (first time, or again after a preemption)
    job.generated = n                            whenever it is handy, before the calls below
    policy.victim(running)                       no block is free: which one is preempted
    policy.preempt(job)                          it was; queue it again under its new ``order``
    policy.finish(job, tokens, complete=…)       or policy.abort(job), in any state

**Order.**  Shortest predicted remaining work first (after arXiv 2408.15792, which orders by length alone), with
linear ageing: the key is ``arrival + slack`` where ``0 <= slack <= max_overtake_s`` grows with the predicted
work.  All waiting requests age alike, so the key does not change while a request waits and a plain heap keeps
the order.  (Only when ranking is switched off or on does ``epoch`` change: then ``refresh`` those that wait.)

**Bound on waiting.**  Let request r arrive at time t with user priority p.  A request of priority p that
arrives after ``t + max_overtake_s`` has a key above its own arrival, hence above ``t + max_overtake_s``, hence
above r's key; and the engine only ever starts the first of the queue.  So nothing of r's priority that arrives
later than ``t + max_overtake_s`` starts before r: r waits at most as long as the engine needs for the work that
has arrived by then, first-come order's own bound with the queue taken ``max_overtake_s`` later.  A preemption
shortens the remaining work and keeps the arrival, so the bound holds for every resumption too.

**Bound on preemptions.**  A request that was preempted ``max_preemptions`` times is *protected*: it is never a
victim again, and it starts again only when the worst cases (prompt + max_tokens) of all protected requests
that run, with it, fit in the pool.  When no block is free and a protected request needs one, the protected
ones hold less than their worst cases, hence less than the pool: some unprotected request holds the rest and
is the victim.  So no request is preempted more than ``max_preemptions`` times.

**Failure.**  A request whose scoring raises has slack 0.  When measured tau falls to noise, all have: plain
first-come order, and admission goes on with the lengths seen.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from fourfold.errors import FourfoldError
from fourfold.rank.admission import Pool, steps_that_fit
from fourfold.rank.base import Ranker
from fourfold.rank.lengthmap import LengthMap
from fourfold.rank.online import LengthModel

logger = logging.getLogger(__name__)
CLASSES = ("short", "medium", "long")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """What an operator can choose.

    Attributes:
        max_overtake_s: longest time by which a later request may arrive and still go first, seconds.
        max_preemptions: how often one request can be preempted.
        reserve_level: quantile of the remaining length that admission reserves KV for.
        headroom: share of the pool that admission leaves free for lengths it did not foresee.
        recompute_cost: steps of the engine that it takes to compute a token of context again.  Where few requests run,
            starting one more is worth a preemption later; 0 never risks one.
        trust_max_tokens: cap predictions by the request's max_tokens.  Off for load tests that set max_tokens
            to the length they want, which would otherwise tell the scheduler what it has to guess.
        answer_limit: no answer is longer than so many tokens, whatever it asks for; 0 if nothing is known.
        learn: correct lengths on line, and fall back to first-come when tau is noise.
    """

    max_overtake_s: float = 30.0
    max_preemptions: int = 2
    reserve_level: float = 0.3
    headroom: float = 0.04
    recompute_cost: float = 0.003
    trust_max_tokens: bool = True
    answer_limit: int = 0
    learn: bool = True

    def __post_init__(self) -> None:
        checks = (
            (self.max_overtake_s >= 0, "max_overtake_s must not be negative"),
            (self.max_preemptions >= 0, "max_preemptions must not be negative"),
            (0 < self.reserve_level < 1, "reserve_level must lie between 0 and 1"),
            (0 <= self.headroom < 0.5, "headroom must lie between 0 and 0.5"),
            (self.recompute_cost >= 0, "recompute_cost must not be negative"),
            (self.answer_limit >= 0, "answer_limit must not be negative"),
        )
        for good, what in checks:
            if not good:
                raise FourfoldError(f"the scheduler's {what}")


@dataclass(slots=True, eq=False)
class Job:
    """One request as the policy sees it.

    Attributes:
        arrival: seconds on the caller's clock; sequence: order of ``add``, breaks ties.
        prompt_tokens, max_tokens: as asked.  generated: output tokens so far (the caller keeps it up to date).
        priority: the user's, lower goes first (as in vLLM).
        score, bucket: the ranker's; slack: seconds added to the arrival.
        known_tokens: the exact answer length where something knows it (an oracle, or ignore_eos).
    """

    request_id: str
    arrival: float
    sequence: int
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    score: float = float("nan")
    bucket: int = 0
    known_tokens: int | None = None
    slack: float = 0.0
    generated: int = 0
    preemptions: int = 0
    started: float | None = None

    @property
    def worst_tokens(self) -> int:
        return self.prompt_tokens + self.max_tokens


@dataclass(slots=True)
class PolicyStats:
    """Counters for metrics: queue seconds and starts by predicted class, and what the policy did."""

    queue_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    starts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))
    aged_starts: int = 0
    """Requests that started when their slack was used up: ageing, not length, brought them to the front."""
    deferred_starts: int = 0
    """Requests that had room for their prompt but not for their predicted answer: preemptions avoided."""
    preemptions: int = 0
    ranker_failures: int = 0
    ranker_s: float = 0.0
    scored: int = 0


class Policy:
    """Ranked order with ageing, KV reservation, bounded preemption, on-line correction."""

    def __init__(self, ranker: Ranker | None, config: PolicyConfig | None = None) -> None:
        self.config = config or PolicyConfig()
        self.ranker = ranker
        lengths = ranker.lengths if ranker else LengthMap(np.empty(0), np.full((1, 14), 256.0), np.array([256.0]))
        self.model = LengthModel(lengths, level=self.config.reserve_level)
        self.stats = PolicyStats()
        self.jobs: dict[str, Job] = {}
        self._sequence = 0
        self._mean_prompt = 0.0
        self._deferred: set[str] = set()
        self._known = False
        """Whether any answer's length was ever known."""

    @property
    def ranking(self) -> bool:
        """Whether new requests are ordered by their scores; otherwise first-come."""
        return self.ranker is not None and (self.model.useful or not self.config.learn)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        *,
        prompt_tokens: int,
        max_tokens: int,
        arrival: float,
        priority: int = 0,
        known_tokens: int | None = None,
    ) -> Job:
        """Score a new request.  A ranker that fails costs the request its rank, never the engine its life.

        A ``prompt`` of None (there is no text, only embeddings) has no rank either.
        """
        if request_id in self.jobs:
            raise FourfoldError(f"request {request_id} is already there")
        score = self._score(prompt) if known_tokens is None else float(known_tokens)
        job = Job(request_id, arrival, self._sequence, prompt_tokens, max_tokens, priority, score)
        job.known_tokens = known_tokens
        self._known |= known_tokens is not None
        job.bucket = self.model.bucket(score)
        self._sequence += 1
        self._mean_prompt += (prompt_tokens - self._mean_prompt) / min(self._sequence, 512)
        job.slack = self._slack(job)
        self.jobs[request_id] = job
        if self._teaches(job):
            self.model.arrive(job.sequence)
        return job

    def _teaches(self, job: Job) -> bool:
        """Whether something is learnt from the job's end."""
        return self.config.learn and np.isfinite(job.score) and job.known_tokens is None

    def _score(self, prompt: str | None) -> float:
        if self.ranker is None or prompt is None:
            return float("nan")
        began = time.perf_counter()
        try:
            score = float(self.ranker.score([prompt])[0])
        except Exception as error:
            self.stats.ranker_failures += 1
            if self.stats.ranker_failures == 1:
                logger.warning("The length ranker failed (%r); such requests are served first-come.", error)
            return float("nan")
        finally:
            self.stats.ranker_s += time.perf_counter() - began
            self.stats.scored += 1
        return score if np.isfinite(score) else float("nan")

    def _expected_total(self, job: Job) -> float:
        if job.known_tokens is not None:
            return float(max(job.known_tokens, job.generated + 1))
        expected = self.model.expected(job.bucket)
        if job.generated:
            known = self.model.totals(np.array([job.bucket]), np.array([job.generated]))
            expected = max(expected, float(known[0]))
        return min(expected, self._most(job))

    def _most(self, job: Job) -> float:
        """Tokens that an answer can have at most, as far as the policy may know it."""
        limit = self.config.answer_limit or math.inf
        asked = job.max_tokens if self.config.trust_max_tokens else math.inf
        return max(min(limit, asked), job.generated + 1)

    def _slack(self, job: Job) -> float:
        if job.known_tokens is None and (not self.ranking or np.isnan(job.score)):
            return 0.0
        longest = self.model.longest if job.known_tokens is None else self.model.ceiling
        scale = longest * (self._mean_prompt + longest / 2)
        return self.config.max_overtake_s * min(1.0, self.work(job) / scale)

    @property
    def epoch(self) -> int:
        """Changes when ranking goes off or on; waiting jobs must then be refreshed and sorted again."""
        return self.model.switches if self.config.learn else 0

    def refresh(self, job: Job) -> None:
        """Compute the slack of a waiting job again; still between 0 and max_overtake_s, so the bound holds."""
        job.slack = self._slack(job)

    def work(self, job: Job) -> float:
        """Predicted work left: KV tokens held, times the steps for which they are held.

        A request of c tokens with r to come holds c, c + 1, … c + r tokens in its r steps: ``r * (c + r / 2)``.
        KV is what the engine runs out of, so this, and not r alone, is the size by which shortest-first wins.
        """
        left = self.remaining(job)
        return left * (job.prompt_tokens + job.generated + left / 2)

    def order(self, job: Job) -> tuple[int, float, int]:
        """Sort key, smallest first: user priority, arrival + slack, order of arrival."""
        return (job.priority, job.arrival + job.slack, job.sequence)

    def protected(self, job: Job) -> bool:
        """Whether the job has used up its preemptions."""
        return job.preemptions >= self.config.max_preemptions

    def remaining(self, job: Job) -> float:
        """Predicted output tokens that are still to come, at least 0."""
        return max(0.0, self._expected_total(job) - job.generated)

    def may_start(self, job: Job, running: Collection[Job], pool: Pool, *, room: bool = True) -> bool:
        """Whether the first waiting job may start beside ``running`` (its prompt fits; that the caller checks).

        Predicted KV of all together must stay within the pool (``admission.steps_that_fit``), or be worth a preemption
        later (``_worth_it``); a protected job also needs room for the worst cases of all protected ones.  An idle
        engine starts anything.
        ``room``: there are free blocks for the prompt now; only then does a refusal count as a preemption avoided.
        """
        if self.protected(job):
            worst = sum(pool.blocks(other.worst_tokens) for other in running if self.protected(other))
            if running and worst + pool.blocks(job.worst_tokens) > pool.total_blocks:
                return False
        if not running:
            return True
        together = [*running, job]
        generated = np.array([j.generated for j in together], dtype=np.int64)
        context = generated + np.array([j.prompt_tokens for j in together], dtype=np.int64)
        totals = self._totals(together, generated)
        limit = pool.total_blocks * (1.0 - self.config.headroom) + pool.shared_blocks
        steps = steps_that_fit(context, totals - generated, pool, limit)
        fits = math.isinf(steps) or self._worth_it(steps, len(together), int(context[-1]))
        if not fits and room and job.request_id not in self._deferred:
            self._deferred.add(job.request_id)
            self.stats.deferred_starts += 1
        return fits

    def _worth_it(self, steps: float, count: int, context: int) -> bool:
        """Whether starting a job pays although the pool will be full after ``steps``.

        Until then it makes ``steps`` tokens, and then somebody's context is dropped and computed again, for which
        all ``count`` requests wait: ``recompute_cost`` steps a token, and a step is a token for each of them.
        """
        lost = count * self.config.recompute_cost
        return steps * (1.0 - lost) > lost * context and lost > 0.0

    def _totals(self, jobs: list[Job], generated: np.ndarray) -> np.ndarray:
        """Tokens that the jobs' answers will have, by what is reserved for them."""
        totals = self.model.totals(np.array([j.bucket for j in jobs], dtype=np.int64), generated)
        return self._bounded(jobs, generated, totals)

    def _bounded(self, jobs: list[Job], generated: np.ndarray, totals: np.ndarray) -> np.ndarray:
        """``totals``, or what is known, and at most what an answer can have (``_most``, for all at once)."""
        limit = np.full(len(jobs), self.config.answer_limit or math.inf)
        if self.config.trust_max_tokens:
            limit = np.minimum(limit, [j.max_tokens for j in jobs])
        totals = np.minimum(totals, np.maximum(limit, generated + 1))
        if not self._known:
            return totals
        known = np.array([-1 if j.known_tokens is None else j.known_tokens for j in jobs])
        return np.where(known >= 0, known, totals)

    def start(self, job: Job, now: float) -> None:
        """Note that a waiting job was scheduled."""
        if job.started is None:
            job.started = now
            kind = CLASSES[min(2, 3 * job.bucket // self.model.means.size)]
            self.stats.queue_s[kind] += now - job.arrival
            self.stats.starts[kind] += 1
            self.stats.aged_starts += job.slack > 0 and now >= job.arrival + job.slack

    def victim(self, running: Iterable[Job]) -> Job | None:
        """The job to preempt: of the least urgent user priority, the one with most predicted work left.

        Ties go to the latest arrival.  None if every job is protected (see the bound above: then no block is
        missing, as long as starts went through ``may_start``).
        """
        return next(iter(self.victims(running)), None)

    def victims(self, running: Iterable[Job]) -> list[Job]:
        """The jobs that may be preempted, in the order in which ``victim`` would name one after the other."""
        jobs = [job for job in running if not self.protected(job)]
        if not jobs:
            return []
        generated = np.array([job.generated for job in jobs], dtype=np.int64)
        expected = self.model.means[[job.bucket for job in jobs]]
        longer = self.model.totals(np.array([job.bucket for job in jobs], dtype=np.int64), generated)
        expected = np.where(generated > 0, np.maximum(expected, longer), expected)
        expected = self._bounded(jobs, generated, expected)
        left = np.maximum(expected - generated, 1.0)  # a running request has at least a token to come
        context = generated + np.array([job.prompt_tokens for job in jobs])
        work = (left * (context + left / 2)).tolist()
        ranked = sorted(zip(jobs, work, strict=True), key=lambda p: (p[0].priority, p[1], p[0].sequence), reverse=True)
        return [job for job, _ in ranked]

    def preempt(self, job: Job, *, counted: bool = True) -> None:
        """Note a preemption; the job keeps its arrival and is ordered by what it still has to do.

        ``counted`` is False where an operator emptied the engine: that is no sign of missing KV and uses up
        none of the job's preemptions.
        """
        if counted:
            job.preemptions += 1
            self.stats.preemptions += 1
        job.slack = min(job.slack, self._slack(job))

    def finish(self, job: Job, tokens: int, *, complete: bool = True) -> None:
        """Forget a finished job and learn from it (``complete``: it was not cut at max_tokens)."""
        if self._teaches(job):
            self.model.observe(job.sequence, job.score, job.bucket, tokens, complete=complete)
        self._forget(job)

    def abort(self, job: Job) -> None:
        """Forget a job in any state; nothing is learnt from it."""
        self.model.forget(job.sequence)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        self.jobs.pop(job.request_id, None)
        self._deferred.discard(job.request_id)

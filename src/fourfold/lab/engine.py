"""A discrete-event model of a vLLM-like engine: paged KV, chunked prefill, continuous batching, recompute.

Every step first serves the running requests in order (one token each, or the next chunk of their prompt, within
the token budget) and then starts waiting ones, as vLLM's V1 scheduler does.  A running request that finds no
free block has another preempted: the victim's KV is dropped and computed again later.  No request starts in a
step that preempted one.  The step's time comes from ``StepTime``.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.errors import FourfoldError
from fourfold.lab.queues import Queue, Request
from fourfold.lab.steptime import StepTime
from fourfold.lab.workload import Spec
from fourfold.rank.admission import Pool


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's size, in vLLM's terms."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 2048


class Engine:
    """The simulated engine.  ``submit``, ``abort`` and ``step`` at will; ``now`` is its clock in seconds.

    Attributes:
        running: in the order in which they are served.  done: finished requests.  aborted: aborted ones.
        free_blocks: blocks that no request holds.
        preemptions: so far.  recomputed_tokens: KV that preemptions threw away.
    """

    def __init__(self, config: EngineConfig, step_time: StepTime, queue: Queue) -> None:
        self.config, self.step_time, self.queue = config, step_time, queue
        self.pool = Pool(config.num_blocks, config.block_size)
        self.now = 0.0
        self.running: list[Request] = []
        self.waiting: dict[str, Request] = {}
        self.done: list[Request] = []
        self.aborted: list[Request] = []
        self.free_blocks = config.num_blocks
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.steps = 0

    def submit(self, spec: Spec) -> Request:
        """Queue a request.  Raises FourfoldError for one that the whole pool could not hold."""
        if self.pool.blocks(spec.prompt_tokens + spec.max_tokens) > self.config.num_blocks:
            raise FourfoldError(
                f"request {spec.request_id} does not fit in the KV pool",
                why=f"{spec.prompt_tokens} + {spec.max_tokens} tokens, {self.config.num_blocks} blocks",
            )
        request = Request(spec)
        self.waiting[spec.request_id] = request
        self.queue.push(request)
        return request

    def abort(self, request: Request) -> None:
        """Drop a request that waits or runs."""
        waiting = self.waiting.pop(request.spec.request_id, None) is not None
        if not waiting:
            self.running.remove(request)
            self._release(request)
        self.queue.drop(request, waiting)
        self.aborted.append(request)

    def _release(self, request: Request) -> None:
        self.free_blocks += request.blocks
        request.blocks = 0

    def _grow(self, request: Request, tokens: int) -> bool:
        """Give a request the blocks for ``tokens`` more tokens, or nothing."""
        need = -(-(request.computed + tokens) // self.config.block_size) - request.blocks
        if need > self.free_blocks:
            return False
        if need > 0:
            request.blocks += need
            self.free_blocks -= need
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        self.recomputed_tokens += request.computed
        request.computed = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting[request.spec.request_id] = request
        self.queue.push_back(request)

    def step(self) -> float:
        """One engine step; returns its seconds (0.0 if there was nothing to do) and moves ``now``."""
        budget = self.config.max_num_batched_tokens
        scheduled: dict[int, tuple[Request, int]] = {}
        preempted = False
        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            tokens = min(request.tokens - request.computed, budget)
            while not self._grow(request, tokens):
                victim = self.queue.victim(self.running)
                if self.running.index(victim) < position:
                    position -= 1
                self._preempt(victim)
                preempted = True
                if id(victim) in scheduled:
                    budget += scheduled.pop(id(victim))[1]
                if victim is request:
                    break
            else:
                scheduled[id(request)] = (request, tokens)
                budget -= tokens
                position += 1
        if not preempted:
            self._start_waiting(budget, scheduled)
        if not scheduled:
            return 0.0
        return self._run(list(scheduled.values()))

    def _start_waiting(self, budget: int, scheduled: dict[int, tuple[Request, int]]) -> None:
        while budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.queue.head()
            if request is None:
                return
            tokens = min(request.tokens, budget)
            if -(-tokens // self.config.block_size) > self.free_blocks:
                return
            if not self.queue.may_start(request, self.running, self.pool):
                return
            self.queue.pop(self.now)
            del self.waiting[request.spec.request_id]
            if request.started_s < 0:
                request.started_s = self.now
            self._grow(request, tokens)
            self.running.append(request)
            scheduled[id(request)] = (request, tokens)
            budget -= tokens

    def _run(self, work: list[tuple[Request, int]]) -> float:
        prefill = decode = context = 0
        for request, tokens in work:
            if tokens == 1 and request.generated:
                decode += 1
                context += request.computed
            else:
                prefill += tokens
        seconds = self.step_time.seconds(prefill, decode, context)
        self.now += seconds
        self.steps += 1
        finished = False
        for request, tokens in work:
            request.computed += tokens
            if request.computed == request.tokens:
                request.generated += 1
                request.last_s = self.now
                if request.generated == 1:
                    request.first_s = self.now
                finished = finished or request.generated >= request.spec.output_tokens
        if finished:
            for request in [r for r in self.running if r.generated >= r.spec.output_tokens]:
                self.running.remove(request)
                self._release(request)
                self.queue.finished(request)
                self.done.append(request)
        return seconds

    def run(self, specs: list[Spec]) -> None:
        """Serve a workload (in order of arrival) to its end."""
        coming = sorted(specs, key=lambda spec: spec.arrival)
        position = 0
        while position < len(coming) or self.running or self.waiting:
            if not self.running and not self.waiting:
                self.now = max(self.now, coming[position].arrival)
            while position < len(coming) and coming[position].arrival <= self.now:
                self.submit(coming[position])
                position += 1
            if self.step() == 0.0 and not (self.running or position < len(coming)):
                raise AssertionError("the engine is idle while requests wait")

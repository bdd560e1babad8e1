"""The two ways to run the waiting queue: vLLM's own first-come order, and Fourfold's policy."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field

from fourfold.lab.workload import Spec
from fourfold.rank.admission import Pool
from fourfold.rank.policy import Job, Policy


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the simulated engine.

    Attributes:
        computed: tokens whose KV is in the pool; blocks: blocks it holds.
        generated: output tokens so far; first_s, last_s: when the first and the latest came.
        preemptions: so far; started_s: first scheduled.
    """

    spec: Spec
    computed: int = 0
    blocks: int = 0
    generated: int = 0
    preemptions: int = 0
    started_s: float = -1.0
    first_s: float = -1.0
    last_s: float = -1.0
    job: Job | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        """Prompt and output tokens so far; the last one has no KV yet once the request decodes."""
        return self.spec.prompt_tokens + self.generated


class Queue(ABC):
    """Waiting requests, and the decisions that the engine asks for."""

    @abstractmethod
    def push(self, request: Request) -> None:
        """A new request arrives."""

    @abstractmethod
    def head(self) -> Request | None:
        """The next to start, not removed."""

    @abstractmethod
    def pop(self, now: float) -> Request:
        """Remove the head: it starts."""

    @abstractmethod
    def may_start(self, request: Request, running: list[Request], pool: Pool) -> bool:
        """Whether the head may start now."""

    @abstractmethod
    def victim(self, running: list[Request]) -> Request:
        """Which running request gives its blocks back."""

    @abstractmethod
    def push_back(self, request: Request) -> None:
        """A preempted request waits again."""

    @abstractmethod
    def finished(self, request: Request) -> None:
        """A running request has its last token."""

    @abstractmethod
    def drop(self, request: Request, waiting: bool) -> None:
        """A request was aborted."""

    @abstractmethod
    def __len__(self) -> int: ...


class FirstCome(Queue):
    """vLLM's default: first come, first served; the latest of the running batch is preempted, and goes first."""

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()

    def push(self, request: Request) -> None:
        self._waiting.append(request)

    def head(self) -> Request | None:
        return self._waiting[0] if self._waiting else None

    def pop(self, now: float) -> Request:
        return self._waiting.popleft()

    def may_start(self, request: Request, running: list[Request], pool: Pool) -> bool:
        return True

    def victim(self, running: list[Request]) -> Request:
        return running[-1]

    def push_back(self, request: Request) -> None:
        self._waiting.appendleft(request)

    def finished(self, request: Request) -> None:
        """First-come order learns nothing."""

    def drop(self, request: Request, waiting: bool) -> None:
        if waiting:
            self._waiting.remove(request)

    def __len__(self) -> int:
        return len(self._waiting)


class Ranked(Queue):
    """``fourfold.rank.policy``; with ``oracle`` it is told the true lengths."""

    def __init__(self, policy: Policy, *, oracle: bool = False) -> None:
        self.policy, self._oracle = policy, oracle
        self._heap: list[tuple[tuple[int, float, int], int, Request]] = []
        self._gone: set[int] = set()
        self._pushes = 0
        self._epoch = policy.epoch

    def push(self, request: Request) -> None:
        spec = request.spec
        request.job = self.policy.add(
            spec.request_id,
            spec.prompt,
            prompt_tokens=spec.prompt_tokens,
            max_tokens=spec.max_tokens,
            arrival=spec.arrival,
            priority=spec.priority,
            known_tokens=spec.output_tokens if self._oracle else None,
        )
        self.push_back(request)

    def push_back(self, request: Request) -> None:
        job = _job(request)
        if request.preemptions > job.preemptions:
            job.generated = request.generated
            self.policy.preempt(job)
        heapq.heappush(self._heap, (self.policy.order(job), self._pushes, request))
        self._pushes += 1

    def _sort_again(self) -> None:
        self._epoch = self.policy.epoch
        waiting = [request for _, _, request in self._heap if id(request) not in self._gone]
        self._gone.clear()
        for request in waiting:
            self.policy.refresh(_job(request))
        self._heap = [(self.policy.order(_job(request)), i, request) for i, request in enumerate(waiting)]
        heapq.heapify(self._heap)

    def head(self) -> Request | None:
        if self._epoch != self.policy.epoch:
            self._sort_again()
        while self._heap and id(self._heap[0][2]) in self._gone:
            self._gone.discard(id(heapq.heappop(self._heap)[2]))
        return self._heap[0][2] if self._heap else None

    def pop(self, now: float) -> Request:
        request = self.head()
        assert request is not None
        heapq.heappop(self._heap)
        self.policy.start(_job(request), now)
        return request

    def may_start(self, request: Request, running: list[Request], pool: Pool) -> bool:
        return self.policy.may_start(_job(request), _jobs(running), pool)

    def victim(self, running: list[Request]) -> Request:
        job = self.policy.victim(_jobs(running))
        if job is None:
            raise AssertionError("every running request is protected and a block is missing")
        return next(request for request in running if request.job is job)

    def finished(self, request: Request) -> None:
        spec = request.spec
        self.policy.finish(_job(request), request.generated, complete=request.generated < spec.max_tokens)

    def drop(self, request: Request, waiting: bool) -> None:
        self.policy.abort(_job(request))
        if waiting:
            self._gone.add(id(request))

    def __len__(self) -> int:
        return len(self._heap) - len(self._gone)


def _job(request: Request) -> Job:
    assert request.job is not None
    return request.job


def _jobs(running: list[Request]) -> list[Job]:
    jobs = []
    for request in running:
        job = _job(request)
        job.generated = request.generated
        jobs.append(job)
    return jobs

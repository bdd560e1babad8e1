"""The ranked scheduler inside vLLM's own: nothing lost, nothing starved, every block accounted for."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fourfold.rank.policy import PolicyConfig
from fourfold.vllm_plugin.scheduler import RankedScheduler

from .scheduling import BLOCK, Clock, Engine, make_config, make_request, make_scheduler, ranked, waiting

PRIORITIES = st.sampled_from([0, 0, 0, 0, -1, 1])


class Serving(RuleBasedStateMachine):
    """Random arrivals, answers, aborts, clocks and cache resets; lengths that the ranker gets badly wrong."""

    asynchronous: ClassVar[bool] = False

    @initialize(
        blocks=st.integers(13, 26),
        seqs=st.integers(3, 12),
        batched=st.sampled_from([16, 48, 128]),
        prefix=st.booleans(),
        overtake=st.floats(0, 2),
        preemptions=st.integers(0, 3),
        trust=st.booleans(),
    )
    def start(self, blocks, seqs, batched, prefix, overtake, preemptions, trust):
        config = make_config(
            blocks=blocks, max_seqs=seqs, batched_tokens=max(batched, seqs), prefix=prefix,
            asynchronous=self.asynchronous,
        )  # fmt: skip
        policy = PolicyConfig(max_overtake_s=overtake, max_preemptions=preemptions, trust_max_tokens=trust)
        self.clock = Clock()
        self.scheduler: Any = ranked(make_scheduler(RankedScheduler, config), self.clock, policy, longest=100)
        self.engine = Engine(self.scheduler, self.clock, ahead=1 if self.asynchronous else 0)
        self.limits: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.emptied: set[str] = set()
        self.requests: dict[str, Any] = {}

    @rule(
        expected=st.sampled_from([1, 1, 5, 20, 60, 100]),
        length=st.integers(1, 100) | st.integers(60, 100),
        prompt=st.integers(1, 60),
        limit=st.just(100) | st.integers(1, 100),
        priority=PRIORITIES,
        shared=st.booleans(),
        children=st.sampled_from([1, 2, 4, 6]),
    )
    def arrive(self, expected, length, prompt, limit, priority, shared, children):
        """``children``: as with n > 1, where vLLM sends the same prompt once for each answer."""
        for _ in range(children):
            name = f"r{len(self.requests)}"
            ids = [expected] + [3 if shared else 10 + len(self.requests)] * (prompt - 1)
            request = make_request(name, ids, max_tokens=limit, priority=priority)
            self.limits[name] = min(length, limit)
            self.requests[name] = request
            self.engine.add(request, length)

    @rule(steps=st.integers(1, 25), seconds=st.sampled_from([0.0, 0.01, 0.3]))
    def serve(self, steps, seconds):
        for _ in range(steps):
            before = {request.request_id for request in waiting(self.scheduler)}
            output = self.engine.step(seconds)
            self.check_starts(before, {request.req_id for request in output.scheduled_new_reqs})

    def check_starts(self, queued, started):
        """Nothing that arrived more than the bound after a waiting request of its priority starts before it."""
        jobs = self.scheduler._ranking.policy.jobs
        bound = self.scheduler._ranking.policy.config.max_overtake_s
        for name in started & jobs.keys():
            for other in (queued - started) & jobs.keys():
                if jobs[other].priority == jobs[name].priority and jobs[other].started is None:
                    assert jobs[name].arrival <= jobs[other].arrival + bound + 1e-9

    @precondition(lambda self: self.limits)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.limits)))
        if name not in self.engine.finished:
            self.aborted.add(name)
        self.engine.abort(name)

    @rule()
    def empty_the_cache(self):
        self.emptied |= {request.request_id for request in self.scheduler.running}
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    @invariant()
    def everyone_is_somewhere_once(self):
        queued = [request.request_id for request in waiting(self.scheduler)]
        running = [request.request_id for request in self.scheduler.running]
        assert self.scheduler.get_request_counts() == (len(running), len(queued))
        assert sorted(queued + running) == sorted(self.limits.keys() - self.engine.finished.keys() - self.aborted)
        assert self.scheduler._ranking.policy.jobs.keys() == set(queued + running)

    @invariant()
    def blocks_in_use_are_those_of_running_requests(self):
        manager = self.scheduler.kv_cache_manager
        held = {
            block.block_id
            for request in self.scheduler.running
            for block in manager.get_blocks(request.request_id).blocks[0]
        }
        assert self.engine.used_blocks() == len(held)

    @invariant()
    def preemptions_are_bounded_and_priorities_are_the_users(self):
        policy = self.scheduler._ranking.policy
        for job in policy.jobs.values():
            assert job.preemptions <= policy.config.max_preemptions
            request = self.requests[job.request_id]
            assert request.priority == job.priority
            if job.request_id not in self.emptied:
                assert job.preemptions == request.num_preemptions

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        work = sum(self.limits.values()) + sum(math.ceil(r.num_prompt_tokens / BLOCK) for r in self.requests.values())
        # all work one request after the other, and what each preemption may repeat
        patience = 50 + 2 * work * (2 + self.scheduler._ranking.policy.config.max_preemptions)
        while self.scheduler.get_num_unfinished_requests() or self.engine.flight:
            assert patience > 0, "somebody starves"
            patience -= 1
            self.serve(1, 0.01)
            self.everyone_is_somewhere_once()
            self.preemptions_are_bounded_and_priorities_are_the_users()
        assert self.engine.used_blocks() == 0
        assert not self.scheduler._ranking.policy.jobs
        for name in self.limits.keys() - self.aborted:
            tokens = self.engine.received[name]
            assert len(tokens) == self.limits[name] == self.engine.finished[name]
            assert tokens[:-1] == [100 + place % 50 for place in range(1, len(tokens))]


class ServingAhead(Serving):
    """The same with the next step scheduled before a step's output is there."""

    asynchronous = True


Serving.TestCase.settings = ServingAhead.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None
)
TestServing = Serving.TestCase
TestServingAhead = ServingAhead.TestCase

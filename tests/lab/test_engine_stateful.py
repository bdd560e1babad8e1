"""Random arrivals, aborts and steps over the policy and the simulated KV pool: the promises of the policy hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fourfold.errors import FourfoldError
from fourfold.lab.engine import Engine, EngineConfig
from fourfold.lab.queues import FirstCome, Queue, Ranked, Request
from fourfold.lab.steptime import StepTime
from fourfold.lab.workload import Spec
from fourfold.rank.base import Ranker
from fourfold.rank.lengthmap import LengthMap
from fourfold.rank.policy import Policy, PolicyConfig

STEP = StepTime(0.25, 0.001, 0.0, 0.0)
BLOCKS, BLOCK = 12, 4


class DigitRanker(Ranker):
    """Scores the number in the prompt; "fail" raises, "nan" returns NaN.  Often wrong on purpose."""

    name = "digits"

    def __init__(self) -> None:
        scores = np.arange(40, dtype=np.float64)
        self.lengths = LengthMap.fit(scores, scores / 2 + 1, buckets=8)

    def score(self, prompts):
        if "fail" in prompts:
            raise RuntimeError("broken ranker")
        return np.array([math.nan if p == "nan" else float(p) for p in prompts])


class EngineMachine(RuleBasedStateMachine):
    """Drives an engine and keeps its own books."""

    ranked = True

    @initialize(
        overtake=st.sampled_from([0.0, 2.0, 8.0]),
        cap=st.integers(0, 2),
        level=st.sampled_from([0.1, 0.5]),
        seqs=st.sampled_from([3, 64]),
        tokens=st.sampled_from([8, 64]),
        oracle=st.booleans(),
        cost=st.sampled_from([0.0, 0.008, 0.2]),
    )
    def begin(self, overtake, cap, level, seqs, tokens, oracle, cost):
        self.config = PolicyConfig(overtake, cap, level, headroom=0.0, recompute_cost=cost)
        self.policy = Policy(DigitRanker(), self.config)
        queue: Queue = Ranked(self.policy, oracle=oracle) if self.ranked else FirstCome()
        self.engine = Engine(EngineConfig(BLOCKS, BLOCK, seqs, tokens), STEP, queue)
        self.submitted: dict[str, Request] = {}
        self.was_waiting: dict[str, Request] = {}

    @rule(
        prompt=st.integers(1, 24),
        output=st.integers(1, 20),
        slack=st.integers(0, 4),
        text=st.one_of(st.integers(0, 39).map(str), st.sampled_from(["fail", "nan"])),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
    )
    def submit(self, prompt, output, slack, text, priority):
        name = f"r{len(self.submitted)}"
        spec = Spec(name, self.engine.now, prompt, output, text, output + slack, priority)
        self.submitted[name] = self.engine.submit(spec)

    @rule(seed=st.integers(0, 2**16), count=st.integers(4, 24), wrong=st.booleans())
    def burst(self, seed, count, wrong):
        """Many at once, at times all predicted to be as short as can be: what preempts most."""
        rng = np.random.default_rng(seed)
        for _ in range(count):
            prompt, output = int(rng.integers(1, 10)), int(rng.integers(1, 30))
            text = "0" if wrong else str(min(39, 2 * output))
            name = f"r{len(self.submitted)}"
            self.submitted[name] = self.engine.submit(Spec(name, self.engine.now, prompt, output, text, output + 2))

    @rule()
    def refuse_what_cannot_fit(self):
        before = len(self.engine.waiting)
        with pytest.raises(FourfoldError, match="does not fit"):
            self.engine.submit(Spec("big", self.engine.now, BLOCKS * BLOCK, 1, "1", 1))
        assert len(self.engine.waiting) == before

    @precondition(lambda self: self.engine.running or self.engine.waiting)
    @rule(data=st.data())
    def abort(self, data):
        alive = [*self.engine.running, *self.engine.waiting.values()]
        self.engine.abort(data.draw(st.sampled_from(alive)))

    @rule(count=st.sampled_from([1, 2, 8, 20]))
    def step(self, count):
        for _ in range(count):
            waiting_before = dict(self.engine.waiting)
            running_before = {id(r) for r in self.engine.running}
            preemptions = self.engine.preemptions
            self.engine.step()
            started = [r for r in waiting_before.values() if r.spec.request_id not in self.engine.waiting]
            left = [r for r in waiting_before.values() if r.spec.request_id in self.engine.waiting]
            if self.ranked:
                self.nobody_overtakes_past_the_bound(started, left)
            if self.engine.waiting and not running_before and preemptions == self.engine.preemptions:
                assert started, "an idle engine left the queue waiting"

    def nobody_overtakes_past_the_bound(self, started, left):
        for first in started:
            for other in left:
                assert first.spec.priority <= other.spec.priority
                if first.spec.priority == other.spec.priority:
                    assert first.spec.arrival <= other.spec.arrival + self.config.max_overtake_s + 1e-9

    @invariant()
    def every_request_is_in_one_place(self):
        if not hasattr(self, "engine"):
            return
        e = self.engine
        places = [r.spec.request_id for r in [*e.running, *e.waiting.values(), *e.done, *e.aborted]]
        assert sorted(places) == sorted(self.submitted)
        assert len(e.queue) == len(e.waiting)
        if self.ranked:
            assert set(self.policy.jobs) == {r.spec.request_id for r in [*e.running, *e.waiting.values()]}

    @invariant()
    def blocks_add_up(self):
        if not hasattr(self, "engine"):
            return
        e = self.engine
        held = 0
        for request in e.running:
            assert request.blocks == -(-request.computed // BLOCK) > 0
            held += request.blocks
        assert all(r.blocks == 0 and r.computed == 0 for r in e.waiting.values())
        assert all(r.blocks == 0 for r in [*e.done, *e.aborted])
        assert e.free_blocks == BLOCKS - held >= 0

    @invariant()
    def preemptions_are_bounded(self):
        if hasattr(self, "engine") and self.ranked:
            assert all(r.preemptions <= self.config.max_preemptions for r in self.submitted.values())

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(200 * (1 + len(self.submitted))):
            if not (self.engine.running or self.engine.waiting):
                break
            self.step(1)
        assert not self.engine.waiting, "starved"
        assert not self.engine.running
        for request in self.engine.done:
            assert request.generated == request.spec.output_tokens
            assert request.spec.arrival <= request.started_s <= request.first_s <= request.last_s
        assert self.engine.free_blocks == BLOCKS


class FirstComeMachine(EngineMachine):
    """The same engine under vLLM's own order, which bounds nothing but must lose nothing either."""

    ranked = False


TestPolicy = EngineMachine.TestCase
TestPolicy.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestFirstCome = FirstComeMachine.TestCase
TestFirstCome.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)

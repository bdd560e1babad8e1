import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import FourfoldError
from fourfold.rank.admission import Pool, steps_that_fit
from fourfold.rank.base import Ranker
from fourfold.rank.lengthmap import LEVELS, LengthMap
from fourfold.rank.metrics import kendall_tau
from fourfold.rank.online import LengthModel
from fourfold.rank.policy import Policy, PolicyConfig


class NumberRanker(Ranker):
    """The prompt is the expected length."""

    name = "number"

    def __init__(self) -> None:
        scores = np.linspace(1, 400, 1600)
        self.lengths = LengthMap.fit(scores, scores)

    def score(self, prompts):
        return np.array([float(p) for p in prompts])


def _add(policy, name, prompt, arrival, **more):
    return policy.add(name, prompt, arrival=arrival, **{"prompt_tokens": 50, "max_tokens": 1000, **more})


def test_short_before_long_before_much_later():
    policy = Policy(NumberRanker(), PolicyConfig(max_overtake_s=10))
    long, short = _add(policy, "long", "390", 0.0), _add(policy, "short", "5", 1.0)
    late = _add(policy, "late", "5", 10.5)
    assert sorted([long, short, late], key=policy.order) == [short, long, late]


def test_user_priority_counts_first_and_equal_scores_keep_their_order():
    policy = Policy(NumberRanker())
    jobs = [_add(policy, f"{i}", "100", 3.0) for i in range(5)]
    urgent = _add(policy, "urgent", "390", 4.0, priority=-1)
    # the mean prompt is the same, so equal requests have equal keys and only the sequence decides
    assert sorted([*reversed(jobs), urgent], key=policy.order) == [urgent, *jobs]


@settings(max_examples=200, deadline=None)
@given(
    st.floats(0, 100),
    st.lists(
        st.tuples(st.floats(0, 1000), st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 6000), st.booleans()),
        max_size=20,
    ),
)
def test_slack_never_leaves_its_bounds(overtake, jobs):
    policy = Policy(NumberRanker(), PolicyConfig(max_overtake_s=overtake))
    for i, (arrival, prompt_tokens, length, generated, known) in enumerate(jobs):
        job = policy.add(
            str(i),
            str(length),
            prompt_tokens=prompt_tokens,
            max_tokens=5000,
            arrival=arrival,
            known_tokens=length if known else None,
        )
        before = job.slack
        assert 0 <= before <= overtake
        assert policy.order(job)[1] == arrival + before
        job.generated = generated
        policy.preempt(job)
        assert 0 <= job.slack <= before
        policy.refresh(job)
        assert 0 <= job.slack <= overtake


def test_victim_has_most_work_and_is_not_protected():
    policy = Policy(NumberRanker(), PolicyConfig(max_preemptions=1))
    short, long, longer = (_add(policy, n, n, 0.0) for n in ("10", "200", "390"))
    assert policy.victim([short, longer, long]) is longer
    policy.preempt(longer)
    assert policy.protected(longer)
    assert policy.victim([short, longer, long]) is long
    low = _add(policy, "low", "10", 0.0, priority=5)
    assert policy.victim([short, long, low]) is low
    for job in (short, long, low):
        policy.preempt(job)
    assert policy.victim([short, long, longer, low]) is None


def test_work_done_makes_a_victim_less_likely():
    policy = Policy(NumberRanker())
    a, b = _add(policy, "a", "300", 0.0), _add(policy, "b", "300", 0.0)
    b.generated = 280
    assert policy.victim([a, b]) is a


def test_admission_reserves_the_predicted_answer():
    policy = Policy(NumberRanker(), PolicyConfig(headroom=0.0, recompute_cost=0.0))
    pool = Pool(total_blocks=40, block_size=16)
    first = _add(policy, "first", "390", 0.0)
    assert policy.may_start(first, [], pool)
    # 2 x (50 + 390) tokens peak at 880: 55 blocks
    assert not policy.may_start(_add(policy, "second", "390", 0.0), [first], pool)
    assert policy.may_start(_add(policy, "third", "20", 0.0), [first], pool)
    assert policy.stats.deferred_starts == 1


def test_no_answer_is_taken_to_be_longer_than_the_limit():
    """Where max_tokens may not be read (load tests), and where it may: the lower of the two counts."""
    pool = Pool(total_blocks=40, block_size=16)
    for limit, trust, asked, fits in ((0, False, 90, False), (100, False, 800, True), (300, True, 90, True)):
        policy = Policy(
            NumberRanker(), PolicyConfig(headroom=0.0, recompute_cost=0.0, answer_limit=limit, trust_max_tokens=trust)
        )
        first, second = (_add(policy, n, "390", 0.0, max_tokens=asked) for n in ("first", "second"))
        # 2 x (50 + 390) tokens are 55 blocks; with answers of 100 tokens 19
        assert policy.may_start(second, [first], pool) is fits
        first.generated = 350  # the limit was wrong: at least one more token is to come
        assert policy.work(first) > 0


def test_a_protected_job_starts_only_where_its_worst_case_fits():
    policy = Policy(NumberRanker(), PolicyConfig(max_preemptions=1))
    pool = Pool(total_blocks=100, block_size=16)
    one, two = (_add(policy, n, "5", 0.0, max_tokens=800) for n in "ab")
    policy.preempt(one)
    policy.preempt(two)
    assert not policy.may_start(two, [one], pool)
    assert policy.may_start(two, [_add(policy, "c", "5", 0.0)], pool)
    assert policy.may_start(two, [one], Pool(total_blocks=110, block_size=16))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 60)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 400),
)
def test_steps_that_fit_are_those_of_a_step_by_step_count(jobs, block, limit):
    context = np.array([c for c, _ in jobs])
    left = np.array([r for _, r in jobs], dtype=np.float64)
    used = [sum((c + s) / block + 0.5 for c, r in jobs if r >= s) for s in range(1, int(left.max()) + 1)]
    first = next((s for s, blocks in enumerate(used) if blocks > limit), math.inf)
    steps = steps_that_fit(context, left, Pool(1, block), limit)
    assert math.floor(steps) == first if math.isfinite(steps) else math.isinf(first)


def test_a_preemption_is_risked_where_few_run():
    """Two requests of 440 tokens in 640: full after 270 steps.  As one of many, not worth it."""
    pool = Pool(total_blocks=40, block_size=16)
    policy = Policy(NumberRanker(), PolicyConfig(headroom=0.0, recompute_cost=0.05))
    first, second = (_add(policy, name, "390", 0.0) for name in ("first", "second"))
    assert policy.may_start(second, [first], pool)
    careful = Policy(NumberRanker(), PolicyConfig(headroom=0.0, recompute_cost=0.5))
    first, second = (_add(careful, name, "390", 0.0) for name in ("first", "second"))
    assert not careful.may_start(second, [first], pool)
    # a third one finds the pool full at once
    third = _add(policy, "third", "390", 0.0)
    first.generated = second.generated = 240
    assert not policy.may_start(third, [first, second], pool)


def test_a_failing_ranker_costs_the_rank_and_not_the_request(caplog):
    class Broken(NumberRanker):
        def score(self, prompts):
            raise RuntimeError("no")

    policy = Policy(Broken())
    jobs = [_add(policy, f"{i}", "1", float(i)) for i in range(3)]
    assert [job.slack for job in jobs] == [0.0] * 3
    assert policy.stats.ranker_failures == 3
    assert caplog.text.count("ranker failed") == 1
    policy.finish(jobs[0], 10)
    assert policy.victim(jobs[1:]) in jobs


def test_without_a_ranker_it_is_first_come():
    policy = Policy(None)
    jobs = [_add(policy, f"{i}", "1", float(5 - i)) for i in range(5)]
    assert sorted(jobs, key=policy.order) == jobs[::-1]
    assert not policy.ranking


def test_a_worthless_ranker_is_dropped_and_a_good_one_is_taken_back(monkeypatch):
    monkeypatch.setattr("fourfold.rank.online.MOST_ENDED", 32)  # one that never ends is passed over
    policy = Policy(NumberRanker(), PolicyConfig(max_overtake_s=10))
    rng = np.random.default_rng(0)
    waiting = _add(policy, "waiting", "390", 0.0)
    assert waiting.slack > 0
    for i in range(300):
        policy.finish(_add(policy, f"n{i}", str(rng.integers(1, 400)), 0.0), int(rng.integers(1, 400)))
    assert abs(policy.model.tau) < 0.15
    assert not policy.ranking
    assert policy.epoch == 1
    policy.refresh(waiting)
    assert waiting.slack == 0.0
    for i in range(600):
        length = int(rng.integers(1, 400))
        policy.finish(_add(policy, f"g{i}", str(length), 0.0), length)
    assert policy.model.tau > 0.9
    assert policy.ranking
    assert policy.epoch == 2


def test_lengths_are_learnt_from_a_model_that_talks_three_times_as_much():
    lengths = NumberRanker().lengths
    model = LengthModel(lengths)
    rng = np.random.default_rng(0)
    before = model.expected(8)
    for key in range(1200):
        score = float(rng.uniform(1, 400))
        model.observe(key, score, model.bucket(score), int(3 * score))
    assert model.expected(8) / before == pytest.approx(3, rel=0.15)
    assert (np.diff(model.means) >= 0).all()
    assert (np.diff(model.quantiles, axis=0) >= -1e-9).all()


def test_cut_answers_teach_only_where_they_are_longer_than_expected():
    model = LengthModel(NumberRanker().lengths, every=1)
    before = model.means.copy()
    model.observe(0, 300.0, 12, 5, complete=False)
    assert np.array_equal(model.means, before)
    model.observe(1, 300.0, 12, 2000, complete=False)
    assert model.means[12] > before[12]


def test_tau_does_not_suffer_where_the_order_is_by_prediction():
    """All wait at once and run shortest prediction first: those that end together were predicted alike."""
    policy = Policy(NumberRanker())
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 400, 2048)
    guesses = np.clip(lengths + rng.normal(0, 120, lengths.size), 1, 400)
    jobs = [_add(policy, f"{i}", str(guess), 0.0) for i, guess in enumerate(guesses)]
    gone, *rest = sorted(range(len(jobs)), key=lambda i: jobs[i].score)
    policy.abort(jobs[gone])
    for i in rest:
        policy.finish(jobs[i], int(lengths[i]))
    true = kendall_tau(guesses, lengths)
    assert policy.model.tau == pytest.approx(true, abs=0.06)
    assert kendall_tau(guesses[rest[-512:]], lengths[rest[-512:]]) < 0.6 * true


def test_totals_are_conditional_quantiles():
    spread = np.tile(np.linspace(0, 1000, LEVELS.size), (1, 1))
    spread[0] = 1000 * LEVELS
    model = LengthModel(LengthMap(np.empty(0), spread, np.array([500.0])), level=0.5)
    bucket = np.zeros(3, dtype=np.int64)
    # uniform on [0, 1000]: half of what is left
    assert model.totals(bucket, np.array([0, 400, 800])) == pytest.approx([500, 700, 900], abs=1)
    beyond = model.totals(bucket[:1], np.array([2000]))
    assert beyond[0] > 2000


def test_finish_and_abort_forget_and_names_are_unique():
    policy = Policy(NumberRanker())
    job = _add(policy, "a", "10", 0.0)
    with pytest.raises(FourfoldError, match="already"):
        _add(policy, "a", "10", 0.0)
    policy.abort(job)
    policy.abort(job)
    assert not policy.jobs
    policy.finish(_add(policy, "a", "10", 0.0), 7)
    assert not policy.jobs


def test_stats_count_queue_time_by_class_and_aged_starts():
    policy = Policy(NumberRanker(), PolicyConfig(max_overtake_s=10))
    short, long = _add(policy, "s", "5", 0.0), _add(policy, "l", "390", 0.0)
    policy.start(short, 2.0)
    policy.start(long, 50.0)
    policy.start(long, 60.0)
    assert policy.stats.queue_s == {"short": 2.0, "medium": 0.0, "long": 50.0}
    assert policy.stats.starts == {"short": 1, "medium": 0, "long": 1}
    assert policy.stats.aged_starts == 2
    assert policy.stats.scored == 2


@pytest.mark.parametrize(
    "bad",
    [
        {"max_overtake_s": -1},
        {"max_preemptions": -1},
        {"reserve_level": 1.0},
        {"headroom": 0.9},
        {"answer_limit": -1},
        {"recompute_cost": -1},
    ],
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(FourfoldError, match="scheduler"):
        PolicyConfig(**bad)


def test_nan_scores_are_served_first_come():
    class Nan(NumberRanker):
        def score(self, prompts):
            return np.array([math.nan])

    job = _add(Policy(Nan()), "x", "1", 3.0)
    assert job.slack == 0.0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.integers(0, 500), st.integers(0, 2), st.integers(0, 2), st.booleans()),
        max_size=12,
    ),
    st.booleans(),
)
def test_victims_are_named_by_priority_and_work_one_after_the_other(rows, trust):
    policy = Policy(NumberRanker(), PolicyConfig(max_preemptions=2, trust_max_tokens=trust))
    jobs = []
    for i, (length, generated, priority, preemptions, known) in enumerate(rows):
        more = {"priority": priority, "known_tokens": length if known else None, "max_tokens": 450}
        job = _add(policy, f"{i}", f"{length}", 0.0, **more)
        job.generated, job.preemptions = generated, preemptions
        jobs.append(job)
    left, named = list(jobs), []
    while (victim := policy.victim(left)) is not None:
        named.append(victim)
        left.remove(victim)
    assert named == policy.victims(jobs)
    assert all(policy.protected(job) for job in left)
    keys = [(job.priority, policy.work(job)) for job in named]
    assert all(a[0] > b[0] or (a[0] == b[0] and a[1] >= b[1] - 1e-6) for a, b in itertools.pairwise(keys))


def test_an_operators_reset_uses_up_no_preemption():
    policy = Policy(NumberRanker(), PolicyConfig(max_preemptions=1))
    job = _add(policy, "a", "300", 0.0)
    slack = job.slack
    job.generated = 200
    policy.preempt(job, counted=False)
    assert (job.preemptions, policy.stats.preemptions) == (0, 0)
    assert job.slack < slack


def test_shared_blocks_and_room_for_the_prompt():
    policy = Policy(NumberRanker(), PolicyConfig(headroom=0.0, recompute_cost=0.0))
    first, second = _add(policy, "first", "390", 0.0), _add(policy, "second", "390", 0.0)
    assert not policy.may_start(second, [first], Pool(40, 16), room=False)
    assert policy.stats.deferred_starts == 0
    assert policy.may_start(second, [first], Pool(40, 16, shared_blocks=20))


def test_a_request_without_text_has_no_rank():
    policy = Policy(NumberRanker())
    assert _add(policy, "embeddings", None, 3.0).slack == 0.0
    assert (policy.stats.scored, policy.stats.ranker_failures) == (0, 0)

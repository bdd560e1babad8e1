import json
import time

import numpy as np
import pytest

from fourfold.errors import FourfoldError
from fourfold.lab.calibrate import fit_summary
from fourfold.lab.engine import Engine, EngineConfig
from fourfold.lab.queues import FirstCome
from fourfold.lab.report import simulate
from fourfold.lab.steptime import Step, StepTime, fit_steps
from fourfold.lab.workload import Spec, SyntheticRanker, load_lengths, poisson
from fourfold.rank.metrics import kendall_tau
from fourfold.rank.policy import PolicyConfig

TIMES = StepTime(5e-3, 3e-5, 2e-5, 3e-8)
BLIND = PolicyConfig(trust_max_tokens=False)


def _lengths(count, seed=0):
    """Log-normal lengths like those of chat traffic."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(np.exp(rng.normal(4.0, 1.3, count)), 4, 1500)
    outputs = np.clip(np.exp(rng.normal(5.2, 1.0, count)), 2, 1200)
    return [(int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)]


def test_one_request_takes_the_time_of_its_steps():
    engine = Engine(EngineConfig(64, 16, 8, 100), StepTime(1.0, 0.01, 0.1, 0.001), FirstCome())
    engine.run([Spec("a", 2.0, 250, 3, max_tokens=3)])
    done = engine.done[0]
    # three chunks of 100, 100 and 50 tokens; the last one gives the first token; two decode steps follow
    assert done.first_s == pytest.approx(2.0 + 3 * 1.0 + 2.5)
    assert done.last_s == pytest.approx(done.first_s + 2 * 1.1 + (250 + 251) * 0.001)
    assert engine.steps == 5


def test_first_come_preempts_the_latest_and_recomputes():
    engine = Engine(EngineConfig(4, 4, 8, 64), StepTime(1.0, 0.0, 0.0, 0.0), FirstCome())
    engine.run([Spec("a", 0.0, 4, 8, max_tokens=8), Spec("b", 0.0, 4, 8, max_tokens=8)])
    a, b = engine.done
    assert (a.spec.request_id, b.spec.request_id) == ("a", "b")
    assert (a.preemptions, b.preemptions) == (0, 1)
    assert engine.preemptions == 1
    assert engine.recomputed_tokens == 8


@pytest.fixture(scope="module")
def saturated():
    lengths = _lengths(1000)
    specs = poisson(lengths, rate=64, requests=1000, seed=1, max_tokens=2048)
    ranker = SyntheticRanker([o for _, o in lengths], tau=0.37)
    config = EngineConfig(2560)
    began = time.process_time()
    runs = {p: simulate(specs, p, config, TIMES, ranker=ranker, config=BLIND)[0] for p in ("fcfs", "ranked", "oracle")}
    return runs, time.process_time() - began


def test_ranking_pays_at_saturation(saturated):
    """The targets of the real scheduler, in the model of the engine, with a ranker of tau 0.37."""
    runs, _ = saturated
    fcfs, ranked, oracle = runs["fcfs"], runs["ranked"], runs["oracle"]
    assert fcfs.preemptions > 100
    assert ranked.preemptions <= 0.1 * fcfs.preemptions
    assert ranked.most_preemptions <= BLIND.max_preemptions
    assert ranked.ttft_mean_s <= fcfs.ttft_mean_s / 2
    assert fcfs.ttft_mean_s - ranked.ttft_mean_s >= 0.5 * (fcfs.ttft_mean_s - oracle.ttft_mean_s)
    assert ranked.latency_p99_s <= 1.1 * fcfs.latency_p99_s
    assert ranked.output_tokens_per_s >= fcfs.output_tokens_per_s


def test_thousands_of_requests_take_seconds(saturated):
    assert saturated[1] < 60  # three runs; a few seconds on an idle core


def test_a_worthless_ranker_costs_little(saturated):
    lengths = _lengths(1000)
    specs = poisson(lengths, rate=64, requests=1000, seed=1, max_tokens=2048)
    useless = SyntheticRanker([o for _, o in lengths], tau=0.0)
    run, engine = simulate(specs, "ranked", EngineConfig(2560), TIMES, ranker=useless, config=BLIND)
    fcfs = saturated[0]["fcfs"]
    assert not engine.queue.policy.ranking
    assert run.latency_p99_s <= 1.1 * fcfs.latency_p99_s
    assert run.ttft_mean_s <= 1.1 * fcfs.ttft_mean_s


def test_policies_agree_without_contention():
    lengths = _lengths(60)
    specs = poisson(lengths, rate=2, requests=60, seed=1, max_tokens=2048)
    ranker = SyntheticRanker([o for _, o in lengths], tau=0.37)
    runs = [simulate(specs, p, EngineConfig(5000), TIMES, ranker=ranker, config=BLIND)[0] for p in ("fcfs", "ranked")]
    assert runs[0] == runs[1]


def test_synthetic_rankers_have_the_tau_they_promise():
    outputs = [o for _, o in _lengths(800)]
    for tau in (0.0, 0.37, 0.8):
        scores = SyntheticRanker(outputs, tau=tau).score([str(i) for i in range(800)])
        assert kendall_tau(scores, outputs) == pytest.approx(tau, abs=0.04)


def test_step_times_are_recovered_from_recorded_steps(tmp_path):
    rng = np.random.default_rng(0)
    truth = StepTime(4e-3, 3e-5, 2e-5, 3e-8)
    steps = []
    for _ in range(300):
        work = int(rng.integers(0, 2048)), int(rng.integers(1, 300)), int(rng.integers(100, 10**5))
        steps.append(Step(*work, truth.seconds(*work) * float(rng.normal(1, 0.01))))
    fitted = fit_steps(steps)
    assert fitted.base == pytest.approx(truth.base, rel=0.1)
    assert fitted.prefill_token == pytest.approx(truth.prefill_token, rel=0.05)
    assert fitted.decode_seq == pytest.approx(truth.decode_seq, rel=0.15)
    assert fitted.context_token == pytest.approx(truth.context_token, rel=0.1)
    path = tmp_path / "run.json"
    fields = ("prefill_tokens", "decode_seqs", "context_tokens", "seconds")
    path.write_text(json.dumps({"steps": [{f: getattr(s, f) for f in fields} for s in steps]}))
    assert StepTime.load(path) == fitted
    fitted.save(tmp_path / "model.json")
    assert StepTime.load(tmp_path / "model.json") == fitted


def test_a_summary_calibrates_the_model():
    specs = poisson(_lengths(150), rate=40, requests=150, seed=2, max_tokens=2048)
    engine = EngineConfig(800)
    truth, _ = simulate(specs, "fcfs", engine, StepTime(8e-3, 3e-5, 2e-5, 3e-8))
    measured = {name: getattr(truth, name) for name in ("ttft_mean_s", "tpot_mean_ms", "output_tokens_per_s")}
    fitted, errors = fit_summary(specs, engine, measured, TIMES, fixed=frozenset({1, 2, 3}), rounds=4)
    assert max(abs(e) for e in errors.values()) < 0.1
    assert fitted.base == pytest.approx(8e-3, rel=0.1)


@pytest.mark.parametrize("text", ["", "{}", '{"steps": []}', '{"step_time": {"base": -1}}', "[1]"])
def test_bad_calibrations_are_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(FourfoldError):
        StepTime.load(path)
    with pytest.raises(FourfoldError):
        load_lengths(path)

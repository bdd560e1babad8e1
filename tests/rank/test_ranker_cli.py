import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fourfold.cli.ranker import app
from fourfold.rank.ngram import NgramRanker
from fourfold.rank.trace import TraceWriter

runner = CliRunner()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "toy.jsonl"
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for i in range(900):
            words = rng.integers(0, 30, 5)
            row = {"prompt": " ".join(f"w{w}" for w in words) + f" {i}", "length": int(words.sum()) + 5}
            file.write(json.dumps(row) + "\n")
    return path


def test_train_then_evaluate(data, tmp_path):
    output = tmp_path / "mine.safetensors"
    done = runner.invoke(app, ["train", "--data", str(data), "--output", str(output), "--json"])
    assert done.exit_code == 0, done.output
    trained = json.loads(done.stdout)
    assert trained["ranker"] == "ngram"
    assert trained["tau"] > 0.6
    assert trained["tau_low"] < trained["tau"] < trained["tau_high"]
    assert "validation tau" in done.stderr
    assert NgramRanker.load(output).metadata["held_out_tau"] == f"{trained['tau']:.4f}"

    done = runner.invoke(app, ["evaluate", "default", str(output), "--data", str(data), "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["rankers"][str(output)]["tau"] == trained["tau"]
    assert result["rankers"]["default"]["tau"] < trained["tau"]
    assert 0 < result["rankers"]["default"]["us_per_request"] < 5000
    assert abs(result["prompt_length_tau"]) < 1

    done = runner.invoke(app, ["evaluate", str(output), "--data", str(data)])
    assert done.exit_code == 0
    assert "µs a request" in done.stdout


def test_a_transformer_from_the_command_line(data, tiny_llama, tmp_path):
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    output = tmp_path / "ranker"
    flags = ["--model", str(tiny_llama), "--epochs", "0", "--device", "cpu", "--output", str(output), "--json"]
    done = runner.invoke(app, ["train", "--data", str(data), *flags])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["ranker"] == "transformer"
    done = runner.invoke(app, ["evaluate", str(output), "--data", str(data), "--limit", "20", "--json"])
    torch.set_num_threads(before)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rankers"][str(output)]["kind"] == "transformer"


def test_errors_are_one_message_and_code_2(data, tmp_path):
    bad = tmp_path / "bad.safetensors"
    bad.write_text("nothing")
    for command in (
        ["evaluate", str(bad), "--data", str(data)],
        ["evaluate", "--data", str(tmp_path / "none.jsonl")],
        ["train", "--data", str(bad), "--output", str(tmp_path / "x")],
        ["train", "--data", str(data), "--model", str(tmp_path / "none"), "--output", str(tmp_path / "x")],
    ):
        done = runner.invoke(app, command)
        assert done.exit_code == 2, done.output
        assert "error:" in done.stderr
        assert "Traceback" not in done.output


def test_a_trace_without_text_trains_ngrams_but_no_transformer(tiny_llama, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rng = np.random.default_rng(0)
    with TraceWriter(trace) as writer:
        for i in range(500):
            writer.write(
                f"w{i % 9} {i}", prompt_tokens=2, output_tokens=10 * (i % 9) + int(rng.integers(1, 9)), finish="stop"
            )
    output = str(tmp_path / "traced.safetensors")
    done = runner.invoke(app, ["train", "--data", str(trace), "--output", output, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["data"] == "trace trace.jsonl"
    done = runner.invoke(app, ["train", "--data", str(trace), "--model", str(tiny_llama), "--output", output])
    assert done.exit_code == 2
    assert "no prompt text" in done.stderr

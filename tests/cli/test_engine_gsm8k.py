"""GSM8K through lm-evaluation-harness on a real server, from a local file and without a network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fourfold.cli.main import app
from fourfold.errors import FourfoldError
from fourfold.evals.gsm8k import EXAMPLES, read_questions, render, report, score, task_config


def test_worked_examples_are_right() -> None:
    """Every equation in the examples holds, and the last number is the answer."""
    import re

    for _, answer in EXAMPLES:
        for left, right in re.findall(r"(\d+ [-+*/] \d+) = (\d+)", answer):
            assert eval(left) == int(right)  # digits and one operator, as matched above
        assert re.findall(r"\d+", answer)[-1] == answer.split("#### ")[1]


@pytest.mark.parametrize("line", ["{", "{}", '{"question": "a", "answer": "42"}'])
def test_files_of_another_form_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(FourfoldError):
        read_questions(path)


def test_filters_find_the_answer() -> None:
    import re

    strict, flexible = (entry["filter"][0]["regex_pattern"] for entry in task_config(Path("x"))["filter_list"])
    text = "He has 3 * 4 = 12 apples.\n#### 1,012"
    assert re.search(strict, text).group(1) == "1,012"
    assert [a or b for a, b in re.findall(flexible, text)][-1] == "1,012"


def test_answers_given_elsewhere_are_graded_by_the_harness() -> None:
    """In the questions' order, also beyond ten of them, and by both filters."""
    questions = [{"question": f"What is {n} and {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(1, 13)]
    asked = render(questions)
    assert [prompt.split("Question: ")[-1] for prompt in asked["prompts"]] == [
        f"{row['question']}\nAnswer:" for row in questions
    ]
    assert (asked["stop"], asked["max_tokens"]) == (["Question:", "</s>", "<|im_end|>"], 256)
    answers = [f" It is so.\n#### {2 * n}" for n in range(1, 13)]
    answers[4], answers[11] = "It is 10", "#### 25"
    row = score(questions, answers)
    assert [n for n, right in enumerate(row["correct"]) if not right] == [4, 11]
    assert (row["exact_match"], row["exact_match_flexible"]) == (10 / 12, 11 / 12)
    pair = report({"bf16": row, "fourfold": {**row, "correct": [True] * 12}}, "model")["against_bf16"]["fourfold"]
    assert (pair["only_base"], pair["only_other"]) == (0, 2)
    with pytest.raises(FourfoldError, match="11 answers"):
        score(questions, answers[:-1])


@pytest.mark.engine
def test_gsm8k_on_a_server(tiny_llama: Path, tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    rows = [{"question": f"What is {n} and {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(1, 6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["eval", "gsm8k", str(tiny_llama), "--data", str(data), "--kv", "bf16", "--limit", "3"]
    arguments += ["--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    row = value["modes"]["bf16"]
    assert (value["questions"], row["questions"]) == (3, 3)
    assert row["low"] <= row["exact_match"] <= row["high"]
    assert row["exact_match"] == 0.0  # random weights do not calculate
    assert value["against_bf16"] == {}

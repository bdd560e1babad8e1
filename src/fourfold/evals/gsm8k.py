"""GSM8K on a served model, through lm-evaluation-harness and a local file: no hub.

The task is written to a temporary folder as lm-eval's own YAML.  Four worked examples, written for this file, precede
every question, so that a model without instruction tuning knows the form of an answer.  An answer counts if the number
after ``####`` equals the reference's (``exact_match``); ``exact_match_flexible`` takes the last number of the answer.

``run`` asks a server.  Where the engine's machine has no harness, ``render`` writes the prompts on one that has, any
engine answers them, and ``score`` grades the answers afterwards: the same task, prompts and filters.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fourfold.errors import FourfoldError
from fourfold.evals.stats import paired_difference, wilson
from fourfold.files import write_json
from fourfold.logs import run_module

EXAMPLES = (
    (
        "A baker fills 6 trays with 8 rolls each and gives 9 rolls away. How many rolls are left?",
        "The trays hold 6 * 8 = 48 rolls. After giving 9 away, 48 - 9 = 39 are left.\n#### 39",
    ),
    (
        "Mira reads 12 pages on each of 5 days and then 20 pages on Saturday. How many pages has she read in all?",
        "On five days she reads 12 * 5 = 60 pages. With Saturday that makes 60 + 20 = 80 pages.\n#### 80",
    ),
    (
        "A ticket costs $14 and a family buys 4 of them with a $10 voucher. How much do they pay?",
        "Four tickets cost 14 * 4 = 56 dollars. The voucher takes off 10, so they pay 56 - 10 = 46 dollars.\n#### 46",
    ),
    (
        "A tank holds 90 litres. A third is used in the morning, half of the rest at night. How many litres remain?",
        "In the morning 90 / 3 = 30 litres are used and 60 remain. Half of 60 is 30, so 60 - 30 = 30 remain.\n#### 30",
    ),
)
MAX_TOKENS = 256
STRICT, FLEXIBLE = "strict-match", "flexible-extract"


def read_questions(path: Path) -> list[dict[str, str]]:
    """GSM8K's JSONL: ``question`` and ``answer``, whose last line is ``#### N``.

    Raises:
        FourfoldError: the file is missing or a line is not of that form.
    """
    if not path.is_file():
        raise FourfoldError(f"there is no file {path}", fix="pass GSM8K's test.jsonl with --data")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            question, answer = row["question"], row["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise FourfoldError(f"line {number} of {path.name} has no question and answer", why=repr(error)) from error
        if "####" not in answer:
            raise FourfoldError(f"the answer in line {number} of {path.name} does not end in #### and a number")
        rows.append({"question": str(question), "answer": str(answer)})
    if not rows:
        raise FourfoldError(f"{path.name} holds no questions")
    return rows


def task_config(data: Path, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """The lm-eval task that asks the questions of a JSONL file."""
    shots = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in EXAMPLES)
    number = r"(-?[$0-9.,]{2,})|(-?[0-9]+)"
    return {
        "task": "fourfold_gsm8k",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": shots + "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer.split('####')[-1].strip()}}",
        "num_fewshot": 0,
        "generation_kwargs": {
            "until": ["Question:", "</s>", "<|im_end|>"],
            "max_gen_toks": max_tokens,
            "do_sample": False,
            "temperature": 0.0,
        },
        "filter_list": [
            {
                "name": STRICT,
                "filter": [{"function": "regex", "regex_pattern": r"#### (\-?[0-9\.\,]+)"}, {"function": "take_first"}],
            },
            {
                "name": FLEXIBLE,
                "filter": [
                    {"function": "regex", "group_select": -1, "regex_pattern": number},
                    {"function": "take_first"},
                ],
            },
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "ignore_punctuation": False,
                "regexes_to_ignore": [",", r"\$", r"\.$"],
            }
        ],
        "metadata": {"version": 1.0},
    }


def run(
    url: str, model: str, tokenizer: str, questions: list[dict[str, str]], *, concurrency: int = 8
) -> dict[str, Any]:
    """Ask every question of a running server; returns what ``score`` does.

    Raises:
        FourfoldError: lm-evaluation-harness is missing or stopped.
    """
    model_args = {
        "model": model,
        "tokenizer": tokenizer,
        "base_url": f"{url}/v1/completions",
        "num_concurrent": concurrency,
        "max_retries": 3,
        "tokenized_requests": False,
        "timeout": 3600,
    }
    return _summary(_harness(questions, {"model_args": model_args}))


def render(questions: list[dict[str, str]]) -> dict[str, Any]:
    """What the harness would ask a model: ``{"prompts": [text, …], "stop": [string, …], "max_tokens"}``.

    Raises:
        FourfoldError: lm-evaluation-harness is missing or stopped.
    """
    rows = _harness(questions, {"answers": [""] * len(questions)})
    arguments = rows[0]["arguments"]
    if any(row["arguments"] != arguments for row in rows):
        raise FourfoldError("the harness would ask the questions under different settings")
    return {
        "prompts": [row["prompt"] for row in rows],
        "stop": arguments["until"],
        "max_tokens": arguments["max_gen_toks"],
    }


def score(questions: list[dict[str, str]], answers: list[str]) -> dict[str, Any]:
    """Grade the answers to ``render``'s prompts.

    Returns:
        ``{"exact_match", "exact_match_flexible", "low", "high", "correct": [bool, …],
        "questions": n}``; the interval is Wilson's at 95%.

    Raises:
        FourfoldError: lm-evaluation-harness is missing or stopped, or answers are missing.
    """
    if len(answers) != len(questions):
        raise FourfoldError(f"there are {len(answers)} answers to {len(questions)} questions")
    return _summary(_harness(questions, {"answers": answers}))


def _harness(questions: list[dict[str, str]], model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a question from lm-evaluation-harness: ``strict``, ``flexible``, ``prompt`` and ``arguments``.

    Args:
        questions: see ``read_questions``.
        model: ``model_args`` of a server, or ``answers`` that were given elsewhere.
    """
    with tempfile.TemporaryDirectory(prefix="fourfold-gsm8k-") as name:
        folder = Path(name)
        data = folder / "questions.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in questions), encoding="utf-8")
        result = folder / "result.json"
        path = write_json(folder / "job.json", {"task": task_config(data), "result": str(result), **model})
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
        run_module(
            "fourfold.evals.gsm8k",
            path,
            "lm-evaluation-harness stopped",
            fix="pip install 'fourfold[eval]'",
            env={**offline, "FOURFOLD": "0", "TOKENIZERS_PARALLELISM": "false"},
        )
        rows: list[dict[str, Any]] = json.loads(result.read_text(encoding="utf-8"))
    if len(rows) != len(questions):
        raise FourfoldError(f"lm-evaluation-harness answered {len(rows)} of {len(questions)} questions")
    return rows


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares and interval of ``_harness``'s rows (see ``score``)."""
    strict = [bool(row["strict"]) for row in rows]
    low, high = wilson(sum(strict), len(strict))
    return {
        "exact_match": sum(strict) / len(strict),
        "exact_match_flexible": sum(bool(row["flexible"]) for row in rows) / len(rows),
        "low": low,
        "high": high,
        "questions": len(strict),
        "correct": strict,
    }


def report(modes: Mapping[str, dict[str, Any]], model: str, baseline: str = "bf16") -> dict[str, Any]:
    """Several modes' results as one: without ``correct``, which gives the paired differences to the baseline.

    Returns:
        ``{"modes", "against_bf16": {mode: see paired_difference}, "model", "questions"}``.
    """
    differences = {}
    if baseline in modes:
        base = modes[baseline]["correct"]
        differences = {name: paired_difference(base, row["correct"]) for name, row in modes.items() if name != baseline}
    return {
        "modes": {name: {key: row[key] for key in row if key != "correct"} for name, row in modes.items()},
        "against_bf16": differences,
        "model": model,
        "questions": next(iter(modes.values()))["questions"],
    }


def _given(answers: list[str]) -> Any:
    """A model for lm-eval that has answered already: one answer a question, in the file's order."""
    from lm_eval.api.model import LM

    class Given(LM):
        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return [answers[request.doc_id] for request in requests]

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise NotImplementedError

    return Given()


def _work(path: Path) -> None:
    """The part that runs in a process of its own: lm-eval takes seconds to import and prints to stdout."""
    import lm_eval

    job = json.loads(path.read_text(encoding="utf-8"))
    result = lm_eval.simple_evaluate(
        model=_given(job["answers"]) if "answers" in job else "local-completions",
        model_args=job.get("model_args"),
        tasks=[job["task"]],
        bootstrap_iters=0,
        log_samples=True,
    )
    (samples,) = result["samples"].values()
    rows: dict[int, dict[str, Any]] = {}
    for sample in samples:
        row = rows.setdefault(sample["doc_id"], {})
        row["strict" if sample["filter"] == STRICT else "flexible"] = float(sample["exact_match"])
        ((row["prompt"], row["arguments"]),) = sample["arguments"]
    write_json(job["result"], [rows[index] for index in sorted(rows)])


if __name__ == "__main__":
    _work(Path(sys.argv[1]))

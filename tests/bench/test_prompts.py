"""Data sets: the cut-off ShareGPT file, LMSYS, custom JSONL, and the choice of requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.bench.prompts import (
    Prompt,
    json_elements,
    load,
    read_custom,
    read_lmsys,
    read_sharegpt,
    select,
    write_requests,
)
from fourfold.errors import FourfoldError


def conversation(*turns: tuple[str, str]) -> dict:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


ROWS = [
    conversation(("human", 'Say "hi" [now], {please}'), ("gpt", "hi \\ there")),
    conversation(("gpt", "I begin"), ("human", "no")),
    conversation(("human", "alone")),
    conversation(("human", "Grüße, 世界?"), ("gpt", "Hallo 🌍"), ("human", "more"), ("gpt", "x")),
    conversation(("human", ""), ("gpt", "x")),
]


def test_sharegpt_takes_conversations_that_open_with_a_question(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS, ensure_ascii=False), encoding="utf-8")
    assert read_sharegpt(path) == [
        Prompt('Say "hi" [now], {please}', "hi \\ there"),
        Prompt("Grüße, 世界?", "Hallo 🌍"),
    ]


def test_a_file_cut_anywhere_gives_its_complete_elements() -> None:
    text = json.dumps(ROWS, ensure_ascii=False, indent=1)
    ends, decoder, at = [], json.JSONDecoder(), 1
    for _ in ROWS:
        at = next(i for i in range(at, len(text)) if text[i] == "{")
        at = decoder.raw_decode(text, at)[1]
        ends.append(at)
    for cut in range(1, len(text) + 1):
        assert list(json_elements(text[:cut])) == ROWS[: sum(end <= cut for end in ends)]


def test_a_number_at_the_cut_is_not_complete() -> None:
    assert list(json_elements("[1, 23")) == [1]
    assert list(json_elements("[]")) == []
    with pytest.raises(FourfoldError):
        list(json_elements('{"a": 1}'))


def test_lmsys_from_jsonl_and_parquet(tmp_path: Path) -> None:
    rows = [
        {"conversation": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversation": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]},
        {"conversation": []},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_lmsys(path) == [Prompt("a", "b")]
    import pyarrow
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_lmsys(tmp_path / "a.parquet") == [Prompt("a", "b")]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"prompt": ""}',
        '{"prompt": "x"}',
        '{"prompt": "x", "output_tokens": 0}',
        '{"prompt": "x", "output_tokens": true}',
    ],
)
def test_custom_refuses_bad_rows(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "output_tokens": 3}\n' + line + "\n")
    with pytest.raises(FourfoldError):
        read_custom(path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FourfoldError, match="nothing here"):
        load("custom", tmp_path / "nothing here.jsonl")
    with pytest.raises(FourfoldError, match="local file"):
        load("lmsys", None)


def encode(text: str) -> list[int]:
    return list(range(len(text.split())))


def test_select_is_seeded_and_fits_the_context(tmp_path: Path) -> None:
    prompts = [Prompt("q " * n, "a " * (3 * n)) for n in range(1, 60)]
    chosen = select(prompts, 20, encode, lambda text: "user " + text, max_model_len=64, seed=3, min_output_tokens=4)
    again = select(prompts, 20, encode, lambda text: "user " + text, max_model_len=64, seed=3, min_output_tokens=4)
    other = select(prompts, 20, encode, lambda text: "user " + text, max_model_len=64, seed=4, min_output_tokens=4)
    assert chosen == again
    assert chosen != other
    assert all(r.prompt_tokens + r.output_tokens <= 64 and r.output_tokens >= 4 for r in chosen)
    assert all(r.prompt_tokens == len(encode(r.prompt)) for r in chosen)
    lines = write_requests(chosen, tmp_path / "r.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"prompt": chosen[0].prompt, "output_tokens": chosen[0].output_tokens}


def test_select_says_when_too_few_fit() -> None:
    with pytest.raises(FourfoldError, match="only 0 of 1"):
        select([Prompt("q " * 100, "a")], 1, encode, str, max_model_len=50)


def test_limits_cut_answers_and_leave_prompts_out() -> None:
    prompts = [Prompt("q " * 30, "a " * 90), Prompt("q " * 5, "a " * 90), Prompt("q", "", 2)]
    chosen = select(prompts, 2, encode, str, max_model_len=1000, max_prompt_tokens=10, max_output_tokens=16)
    assert sorted((r.prompt_tokens, r.output_tokens) for r in chosen) == [(1, 2), (5, 16)]


def test_select_can_leave_out_what_it_would_cut() -> None:
    prompts = [Prompt("short", "w " * n) for n in (5, 40, 16, 17)]
    chosen = select(prompts, 2, encode, str, max_model_len=1000, max_output_tokens=16, cut_answers=False)
    assert sorted(request.output_tokens for request in chosen) == [5, 16]
    with pytest.raises(FourfoldError, match="only 2 of 3"):
        select(prompts, 3, encode, str, max_model_len=1000, max_output_tokens=16, cut_answers=False)

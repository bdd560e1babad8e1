"""What counts as a bad answer."""

from __future__ import annotations

import itertools
import math

import pytest

from fourfold.bench.answers import CUT, MIN_BIGRAMS, check, is_degenerate, more_loops, repeated_bigrams
from fourfold.bench.driver import finish_reasons
from fourfold.evals.windows import default_text


def test_prose_is_not_degenerate() -> None:
    for paragraph in default_text().split("\n\n"):
        assert repeated_bigrams(paragraph) < 0.3
    assert not is_degenerate(default_text())


@pytest.mark.parametrize("unit", ["the ", "no, yes, ", "I am sorry, but I can not. ", "go\n"])
def test_loops_are_degenerate(unit: str) -> None:
    assert is_degenerate(unit * 60)


def test_a_loop_without_spaces_is_degenerate() -> None:
    assert is_degenerate("哈哈哈" * 100)
    assert is_degenerate("-" * 400)


def test_short_and_empty_texts_are_not_judged() -> None:
    assert repeated_bigrams("") == 0.0
    assert repeated_bigrams("no " * MIN_BIGRAMS) == 0.0


def test_share_is_exact() -> None:
    words = [a + b for a, b in itertools.product("abcdefgh", repeat=2)]
    assert repeated_bigrams(" ".join(words)) == 0.0
    twice = " ".join(words + words)
    assert repeated_bigrams(twice) == pytest.approx(1 - 64 / 127)  # the seam between the halves is new


def test_a_loop_after_a_good_start_counts() -> None:
    assert is_degenerate("This is how it begins, with a sentence. " + "and so on " * 80)


def test_counts_and_validity() -> None:
    loop = "la " * 50
    result = check(["fine answer", "", "half", "", loop], ["", "", f"{CUT}: finish_reason missing", "500", ""])
    assert result.as_json() == {"total": 5, "failed": 1, "cut": 1, "empty": 1, "degenerate": 1}
    assert not result.valid(1.0)
    loops = check(["fine", loop], ["", ""])
    assert not loops.valid()
    assert not loops.valid(0.49)
    assert loops.valid(0.5)
    assert check(["fine"], [""]).valid()


@pytest.mark.parametrize(
    ("message", "reasons"),
    [
        ('data: {"choices": [{"text": "a", "finish_reason": null}]}', []),
        ('data: {"choices": [{"text": "", "finish_reason": "length"}]}', ["length"]),
        ('data: {"choices": [], "usage": {}}', []),
        ("data: [DONE]", []),
        (': ping "finish_reason"', []),
        ('data: {"choices": [{"text": "my finish_reason is", "finish_reason": null}]}', []),
    ],
)
def test_finish_reasons(message: str, reasons: list[str]) -> None:
    assert finish_reasons(message) == reasons


def test_chance_of_more_loops_against_closed_forms() -> None:
    assert more_loops(0, 0, 20) == 1.0
    assert more_loops(0, 1, 20) == pytest.approx(0.5)  # one loop is in either run
    assert more_loops(0, 3, 20) == pytest.approx(20 * 19 * 18 / (40 * 39 * 38))
    assert more_loops(0, 20, 20) == pytest.approx(math.factorial(20) ** 2 / math.factorial(40))
    chances = [more_loops(2, ours, 24) for ours in range(2, 25)]
    assert chances == sorted(chances, reverse=True)

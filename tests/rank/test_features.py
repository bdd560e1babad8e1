import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.rank.features import BUCKETS, HEAD, TAIL, prompt_codes, unpack


def _buckets(text):
    return set(unpack(prompt_codes(text))[0].tolist())


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300))
def test_any_text_hashes(text):
    codes = prompt_codes(text)
    assert codes.dtype == np.uint32
    assert codes.size > 0
    buckets, values = unpack(codes)
    assert (np.diff(buckets) > 0).all()
    assert buckets.max() < BUCKETS
    assert np.linalg.norm(values) == pytest.approx(1.0)
    assert np.array_equal(codes, prompt_codes(text))


@pytest.mark.parametrize("text", ["", " ", "\n\n", "\ud800 lone surrogate", "日本語" * 2000, "x" * 10**6, "a " * 5000])
def test_strange_texts_hash(text):
    assert prompt_codes(text).size > 0


def test_a_word_hashes_alike_wherever_it_stands_and_in_any_case():
    shared = _buckets("please zebra now ok then") & _buckets("some other words before the ZEBRA came")
    none = _buckets("please yak now ok then") & _buckets("some other words before the OKAPI came")
    assert len(shared) > len(none)


def test_case_changes_nothing_and_order_does():
    assert np.array_equal(prompt_codes("Write a Poem about Rain"), prompt_codes("write a poem about rain"))
    assert not np.array_equal(prompt_codes("write rain about a poem"), prompt_codes("write a poem about rain"))


def test_only_head_and_tail_are_read():
    head, tail = "begin " * (HEAD // 6 + 1), " end" * (TAIL // 4 + 1)
    one, two = head + "p" * 3000 + tail, head + "q" * 3000 + tail
    assert np.array_equal(prompt_codes(one), prompt_codes(two))
    assert not np.array_equal(prompt_codes(one), prompt_codes(one + "!?"))


def test_counts_and_explicit_lengths():
    counts = prompt_codes("echo echo echo echo") >> np.uint32(24)
    assert counts.max() == 4
    assert _buckets("write an essay in 500 words") - _buckets("write an essay in 5 words")


def test_the_hash_does_not_change():
    """Rankers on disk depend on it: whoever changes a feature must raise FEATURES_VERSION (and retrain)."""
    codes = prompt_codes("Summarise this in 3 sentences:\n```x = 1```")
    assert codes.size == 29
    assert int(codes.astype(np.uint64).sum()) == 490930871

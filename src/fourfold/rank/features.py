"""Hashed features of a prompt, computed with a few numpy calls over its bytes.

A ranker that sits in a scheduler's ``add_request`` has microseconds, not milliseconds, and a Python loop over
words is already too slow for a long prompt.  Here one prefix sum gives the hash of *every* word at once::

    P[i] = sum_{j < i} T[byte j] * R**j   (mod 2**64)        hash(word [s, e)) = (P[e] - P[s]) * R**-s

with a random table T (upper case maps to lower case) and an odd R, whose inverse mod 2**64 exists.  Word
n-grams are then products of neighbouring hashes.  The hashing trick itself is from Weinberger et al.,
"Feature Hashing for Large Scale Multitask Learning" (arXiv 0902.2206).

Features of one prompt, all in one table of ``BUCKETS`` entries: words and pairs of words; the first
three and last two words with their places (a request says what it wants first: "write", "what is", "list");
and surface features in bins (length, words, lines, digits, question mark, code fence, a number before a unit
such as "words").  Only the first ``HEAD`` and the last ``TAIL`` bytes are read, so the cost is bounded.
"""

from __future__ import annotations

import math
import re

import numpy as np
from numpy.typing import NDArray

FEATURES_VERSION = 1
"""Changes whenever a prompt would hash differently; rankers and traces carry it and must agree."""
HASH_BITS = 18
BUCKETS = 1 << HASH_BITS
HEAD, TAIL = 512, 256
"""Bytes read from the beginning and from the end of a prompt."""
MAX_COUNT = 255

_MASK = (1 << 64) - 1
_MIX = 0xBF58476D1CE4E5B9
_SHIFT_OUT, _HALF, _MIX64 = np.uint64(64 - HASH_BITS), np.uint64(29), np.uint64(_MIX)
_MAX_COUNT32, _COUNT_SHIFT, _BUCKET_MASK = np.uint32(MAX_COUNT), np.uint32(24), np.uint32(BUCKETS - 1)
_UNITS = re.compile(
    rb"(\d{1,7})[ -](words?|sentences?|paragraphs?|characters|lines|pages|bullet|points|tweets?)\b", re.I
)
_DIGITS, _BRACKETS = b"0123456789", b"{};"

U64 = NDArray[np.uint64]


def _splitmix(count: int, seed: int) -> list[int]:
    """SplitMix64 (Steele et al., 2014): the fixed random numbers that the hashes are made of."""
    values, state = [], seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = ((state ^ (state >> 30)) * _MIX) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        values.append(z ^ (z >> 31))
    return values


def _powers(base: int, count: int) -> U64:
    values, x = [], 1
    for _ in range(count):
        values.append(x)
        x = x * base & _MASK
    return np.array(values, dtype=np.uint64)


def _tables() -> tuple[U64, NDArray[np.bool_]]:
    letters = np.array(_splitmix(256, 1), dtype=np.uint64)
    letters[65:91] = letters[97:123]
    word = np.zeros(256, dtype=bool)
    for lo, hi in ((39, 40), (48, 58), (65, 91), (97, 123), (128, 256)):
        word[lo:hi] = True
    return letters, word


_LETTERS, _WORD = _tables()
_BASE = 0x9E3779B97F4A7C15
_LENGTH = HEAD + TAIL + 8
_POWERS = _powers(_BASE, _LENGTH)
_INVERSES = _powers(pow(_BASE, -1, 1 << 64), _LENGTH)
# odd multipliers, one for each place in an n-gram and each kind of feature
_ODD = [value | 1 for value in _splitmix(32, 7)]
_K = np.array(_ODD, dtype=np.uint64)
_PLACES = _K[8:11], _K[11:13]


def _surface(text: str, raw: bytes, words: int) -> list[int]:
    """One hash for each binned surface feature, and one for each explicit length ("in 300 words")."""
    bits = len(text).bit_length()
    length = 2 * bits + (len(text) >> max(0, bits - 2) & 1)
    lines, digits = raw.count(b"\n"), len(raw) - len(raw.translate(None, _DIGITS))
    ends = text[-16:].rstrip()[-1:]
    bins = (
        length,
        lines if lines < 8 else 8 + lines.bit_length(),
        words if words < 12 else 12 + words.bit_length(),
        digits.bit_length(),
        min(raw.count(b"?"), 4),
        int(b"```" in raw),
        ord(ends) if ends and ends.isascii() and not ends.isalnum() else 0,
        2 * length + (ends == "?"),
        int(len(raw) - len(raw.translate(None, _BRACKETS)) > 2) + 2 * int(len(raw) > 1.5 * min(len(text), HEAD + TAIL)),
    )
    features = [_ODD[16 + k] * (2 * value + 3) & _MASK for k, value in enumerate(bins)]
    for number, unit in _UNITS.findall(raw)[:4] if digits else ():
        kind = int.from_bytes(unit[:4].lower(), "little")
        features.append(_ODD[26] * (2 * int(number).bit_length() + 3) * (2 * kind + 1) & _MASK)
    return features


def prompt_codes(text: str) -> NDArray[np.uint32]:
    """Hash one prompt.

    Args:
        text: the prompt, any length, any Unicode (also empty).

    Returns:
        uint32 [n], ascending in the low ``HASH_BITS`` bits: ``count << 24 | bucket``, each bucket once,
        count at most 255.  This is also what a trace stores.
    """
    raw = text[:HEAD].encode("utf-8", "replace")
    if len(text) > HEAD or len(raw) > HEAD:
        tail = text[HEAD:][-TAIL:].encode("utf-8", "replace")[-TAIL:]
        raw = raw[:HEAD] + b" \n " + tail
    data = np.frombuffer(b" " + raw + b" ", dtype=np.uint8)
    prefix = np.empty(data.size + 1, dtype=np.uint64)
    prefix[0] = 0
    np.add.accumulate(_LETTERS.take(data) * _POWERS[: data.size], out=prefix[1:])
    inside = _WORD.take(data)
    edges = (inside[1:] != inside[:-1]).nonzero()[0] + 1
    starts, ends = edges[::2], edges[1::2]
    h = (prefix[ends] - prefix[starts]) * _INVERSES[starts]
    n = h.size
    pairs = (h * _K[1])[:-1] ^ (h * _K[2])[1:]
    mixed = np.concatenate(
        (
            h * _K[0],
            pairs,
            h[:3] * _PLACES[0][:n],
            (h[-2:] ^ _K[13]) * _PLACES[1][:n],
            pairs[:1] * _K[14],
            np.array(_surface(text, raw, n), dtype=np.uint64),
        )
    )
    mixed ^= mixed >> _HALF
    mixed *= _MIX64
    mixed >>= _SHIFT_OUT
    buckets = mixed.astype(np.uint32)
    buckets.sort()
    last = np.concatenate(((buckets[1:] != buckets[:-1]).nonzero()[0], (buckets.size - 1,)))
    counts = last.astype(np.uint32)
    counts[1:] -= counts[:-1].copy()
    counts[0] += 1
    np.minimum(counts, _MAX_COUNT32, out=counts)
    counts <<= _COUNT_SHIFT
    counts |= buckets[last]
    return counts


def unpack(codes: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Buckets int64 [n] and values float64 [n] of ``prompt_codes``: ``(1 + ln count) / norm``, norm 1 in L2."""
    buckets = (codes & _BUCKET_MASK).astype(np.int64)
    values = _LOGS.take(codes >> _COUNT_SHIFT)
    return buckets, values / math.sqrt(values @ values)


_LOGS = np.concatenate(([0.0], 1.0 + np.log(np.arange(1, MAX_COUNT + 1))))

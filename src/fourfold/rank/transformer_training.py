"""Train a transformer ranker: ListMLE over batches of prompts, early stopping, held-out tau."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fourfold.errors import FourfoldError
from fourfold.rank.corpora import Example
from fourfold.rank.lengthmap import LengthMap
from fourfold.rank.metrics import kendall_tau
from fourfold.rank.ngram import NgramRanker
from fourfold.rank.training import Progress, Report, report
from fourfold.rank.transformer import Encoder, TransformerRanker

F64 = NDArray[np.float64]
MOST_LOST = 20
"""Steps in a row without a finite gradient after which training ends."""


@dataclass(frozen=True, slots=True)
class TransformerOptions:
    """Hyper-parameters; the defaults suit a backbone of 100 to 500 million parameters.

    Attributes:
        list_size: prompts a batch, which is one list; prompts of a batch have about the same length.
        rate, head_rate: AdamW learning rates of the backbone and of the new head.
        later_turns: share of the later turns that an epoch takes (first turns: all).
        epochs: 0 only calibrates the length map.
        checks: validation tau is measured this often an epoch; patience: checks without a better one.
        seconds: stop after that long, whatever the epoch.
    """

    list_size: int = 64
    rate: float = 3e-5
    head_rate: float = 3e-4
    weight_decay: float = 0.01
    warmup: float = 0.06
    later_turns: float = 1.0
    epochs: int = 3
    checks: int = 4
    patience: int = 4
    seconds: float = 240.0
    max_tokens: int = 256
    bf16: bool = True
    seed: int = 0


def draw_batches(
    sizes: NDArray[np.int64], first: NDArray[np.bool_], options: TransformerOptions, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Batches of one epoch, shuffled: first and later turns apart, each sorted by size with some noise."""
    batches: list[NDArray[np.int64]] = []
    for rows in (np.flatnonzero(first), np.flatnonzero(~first)):
        if not first[rows].all():
            rows = rng.permutation(rows)[: int(options.later_turns * rows.size)]
        noisy = np.log(sizes[rows]) + rng.normal(0.0, 0.3, rows.size)
        rows = rows[np.argsort(noisy)]
        batches += [
            part for i in range(0, rows.size, options.list_size) if (part := rows[i : i + options.list_size]).size > 1
        ]
    return [batches[i] for i in rng.permutation(len(batches))]


def has_bf16(device: str) -> bool:
    """Whether products in bfloat16 are faster than in float32: on GPUs, and on processors that have instructions."""
    import torch

    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # of no public name, so they may go
    return device != "cpu" or any(getattr(torch.cpu, name, bool)() for name in names)


def best_weight(scores: F64, beside: F64, lengths: F64) -> float:
    """Weight of the embedded ranker's scores with which the sum has the highest tau on the validation prompts."""
    if scores.std() == 0.0 or beside.std() == 0.0:
        return 0.0
    weights = np.array([0.0, 0.25, 0.5, 0.75, 1.0, 1.5]) * scores.std() / beside.std()
    return float(max(weights, key=lambda weight: kendall_tau(scores + weight * beside, lengths)))


def train_transformer(
    folder: Path,
    train: Sequence[Example],
    valid: Sequence[Example],
    held: Sequence[Example],
    options: TransformerOptions | None = None,
    *,
    device: str = "cpu",
    source: str = "",
    progress: Progress | None = None,
) -> tuple[TransformerRanker, Report]:
    """Fine-tune the checkpoint in ``folder`` (a backbone, or a ranker to go on with).

    bf16 (on by default) is autocast over float32 weights, where ``has_bf16``.  The weights with the best
    validation tau are kept; the length map is fitted on the validation prompts.  Steps whose gradient is not finite are
    left out.

    Raises:
        FourfoldError: the checkpoint cannot be loaded, or training diverged before any check was better than none.
    """
    import torch

    o = options or TransformerOptions()
    torch.manual_seed(o.seed)
    rng = np.random.default_rng(o.seed)
    encoder = Encoder(folder, device=device, max_tokens=o.max_tokens)
    rows = encoder.tokens([e.prompt for e in train])
    valid_rows = encoder.tokens([e.prompt for e in valid])
    lengths = np.array([e.length for e in train], dtype=np.float64)
    valid_lengths = np.array([e.length for e in valid], dtype=np.float64)
    sizes = np.array([len(row) for row in rows], dtype=np.int64)
    first = np.array([e.turn == 0 for e in train], dtype=bool)
    model = encoder.model
    if device == "cpu" and model.supports_gradient_checkpointing:
        # without, a list of 64 prompts of 256 tokens takes more than 24 GB with 135M parameters
        model.gradient_checkpointing_enable()
    autocast = torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=o.bf16 and has_bf16(device))

    def validate() -> float:
        with autocast:
            scores = encoder.scores(valid_rows)
        return kendall_tau(scores, valid_lengths) if np.isfinite(scores).all() else -1.0

    head = {id(p) for name, p in model.named_parameters() if name.split(".")[0] in ("score", "classifier")}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in head], "lr": o.rate},
        {"params": [p for p in model.parameters() if id(p) in head], "lr": o.head_rate},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=o.weight_decay)
    plan = [batch for _ in range(o.epochs) for batch in draw_batches(sizes, first, o, rng)]
    total, warm = max(1, len(plan)), max(1, int(o.warmup * len(plan)))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, max(0.02, (total - step) / max(1, total - warm)))
    )
    every = max(1, len(plan) // max(1, o.epochs * o.checks))
    best_tau = validate()
    best, stale, taken, lost, began = None, 0, 0, 0, time.monotonic()
    for step, batch in enumerate(plan, 1):
        model.train()
        order = batch[np.argsort(-(lengths[batch] + rng.random(batch.size) * 0.5), kind="stable")]
        with autocast:
            scores = encoder.forward([rows[i] for i in order])
        # ListMLE (see fourfold.rank.listmle): the batch is one list, already in its true order
        loss = (torch.logcumsumexp(scores.flip(0), 0).flip(0) - scores).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
            taken, lost = taken + 1, 0
        elif (lost := lost + 1) == MOST_LOST:  # one such step would make every weight NaN; so many have no end
            break
        schedule.step()
        late = time.monotonic() - began > o.seconds
        if step % every == 0 or step == len(plan) or late:
            tau = validate()
            if progress:
                progress(step, len(plan), f"loss {loss.item():.3f}, validation tau {tau:.3f}")
            if tau > best_tau:
                best_tau, stale = tau, 0
                best = {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}
            elif (stale := stale + 1) >= o.patience:
                break
            if late:
                break
    if best is not None:
        model.load_state_dict(best)
    with autocast:
        final = encoder.scores(valid_rows)
        if not np.isfinite(final).all() or (plan and not taken):
            raise FourfoldError(
                "training diverged", why="scores or gradients are no finite numbers", fix="lower the learning rate"
            )
        held_scores = encoder.scores(encoder.tokens([e.prompt for e in held]))
    words = NgramRanker.load()
    beside = words.score([e.prompt for e in valid])
    weight = best_weight(final, beside, valid_lengths)
    fitted = LengthMap.fit(final + weight * beside, valid_lengths)
    held_scores = held_scores + weight * words.score([e.prompt for e in held])
    result = report(held_scores, fitted, np.array([e.length for e in held], dtype=np.float64))
    metadata = {
        "data": source,
        "rows": f"{len(train)} train, {len(valid)} validation, {len(held)} held out",
        "loss": f"ListMLE, lists of {o.list_size}, seed {o.seed}, {o.epochs} epochs at {o.rate:g}",
        "held_out_tau": f"{result.tau:.4f}",
    }
    return TransformerRanker(encoder, fitted, metadata, words if weight else None, weight), result

"""Fit a step-time model to the summary of a real run, where no steps were recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple

import numpy as np

from fourfold.lab.engine import EngineConfig
from fourfold.lab.report import Summary, simulate
from fourfold.lab.steptime import StepTime
from fourfold.lab.workload import Spec

Errors = dict[str, float]
"""Field of ``Summary`` to simulated / measured - 1."""


def relative_errors(simulated: Summary, measured: Mapping[str, float]) -> Errors:
    """Simulated over measured, minus one, for every measured field (preemptions: over at least 1)."""
    return {name: getattr(simulated, name) / max(value, 1e-9) - 1.0 for name, value in measured.items()}


def fit_summary(
    specs: Sequence[Spec],
    engine: EngineConfig,
    measured: Mapping[str, float],
    start: StepTime,
    *,
    fixed: frozenset[int] = frozenset(),
    rounds: int = 3,
    progress: Callable[[int, float], None] | None = None,
) -> tuple[StepTime, Errors]:
    """Multiplicative pattern search over the four times, first-come order, mean squared log error.

    Args:
        measured: fields of ``Summary`` with their measured values.
        start: where to start; ``fixed``: positions (0 base … 3 context_token) to leave as they are.
        rounds: passes over the times; the step halves with each.

    Returns:
        the best model and its errors.
    """

    def loss(times: Sequence[float]) -> tuple[float, Errors]:
        summary, _ = simulate(specs, "fcfs", engine, StepTime(*times))
        errors = relative_errors(summary, measured)
        return float(np.mean([np.log(max(1e-3, 1.0 + e)) ** 2 for e in errors.values()])), errors

    best = list(astuple(start))
    (best_loss, best_errors), factor = loss(best), 1.3
    for number in range(rounds):
        for position in [p for p in range(4) if p not in fixed]:
            for step in (factor, 1.0 / factor):
                trial = list(best)
                trial[position] *= step
                trial_loss, errors = loss(trial)
                if trial_loss < best_loss:
                    best, best_loss, best_errors = trial, trial_loss, errors
                    break
        factor = factor**0.5
        if progress:
            progress(number + 1, best_loss)
    return StepTime(*best), best_errors

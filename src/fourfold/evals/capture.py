"""What runs inside vLLM's worker to measure quality: prompt logits are taken where vLLM computes them, and compared.

``prompt_logprobs`` makes the model runner call ``model.compute_logits`` on every prompt position, and that call is
wrapped.  vLLM's own ``prompt_logprobs=-1`` would turn 49,152 numbers a position into Python objects.  The
log-probability that vLLM reports for each token is compared with the captured one, so that a change in vLLM
cannot silently shift the rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fourfold.evals.divergence import ROWS, Store, Totals, log_probabilities

TOLERANCE = 2e-3
"""Largest difference between vLLM's log-probability of a token and the one from the captured logits."""


class Capture:
    """Wraps ``compute_logits`` and keeps the logits of prompt positions.

    With one request in flight a step computes one row to sample from and, for prompt log-probabilities, as many
    rows as the step has prompt positions; calls with a single row are the former and are left out.  vLLM's second
    model runner also computes a row for the last token of the prompt, which predicts nothing of it.
    """

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def install(self, model: Any) -> None:
        """Wrap the model's method, until ``remove``."""
        original = model.compute_logits

        def compute_logits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            logits = original(hidden_states, *args, **kwargs)
            if logits is not None and hidden_states.shape[0] > 1:
                self.rows.append(logits.detach())  # vLLM reads these logits and does not write them
            return logits

        model.compute_logits = compute_logits

    def remove(self, model: Any) -> None:
        """Take the wrapper off: the class's own method is found again."""
        del model.compute_logits

    def take(self, positions: int) -> torch.Tensor:
        """The ``[positions, vocabulary]`` logits since the last call, on the engine's device.

        Raises:
            RuntimeError: there are more or fewer rows than positions.
        """
        rows, self.rows = self.rows, []
        have = sum(len(block) for block in rows)
        if have not in (positions, positions + 1):
            raise RuntimeError(f"vLLM computed logits for {have} prompt positions, not {positions}")
        return (rows[0] if len(rows) == 1 else torch.cat(rows))[:positions]


class Quality:
    """Perplexity of windows, and their divergence from the baseline's log-probabilities in ``folder``."""

    def __init__(self, folder: Path, save: bool, compare: bool) -> None:
        self.folder, self.save, self.compare = folder, save, compare
        self.capture, self.totals = Capture(), Totals()
        self.store: Store | None = None
        self.largest = 0.0

    def add(self, index: int, window: list[int], reported: list[float]) -> None:
        """Add the window that vLLM has just processed, block by block.

        Args:
            index: of the window.
            window: its token ids.
            reported: vLLM's own log-probability of every token but the first.

        Raises:
            RuntimeError: the captured logits are not those of this window.
        """
        logits = self.capture.take(len(window) - 1)
        store = self.store = self.store or Store(self.folder, logits.shape[-1])
        device = logits.device
        targets, own = torch.tensor(window[1:], device=device), torch.tensor(reported, device=device)
        for at in range(0, len(targets), ROWS):
            logp = log_probabilities(logits[at : at + ROWS])
            part = targets[at : at + ROWS]
            self.totals.add_nll(logp, part)
            chosen = logp.gather(1, part[:, None])[:, 0]
            self.largest = max(self.largest, float((chosen - own[at : at + ROWS]).abs().max()))
            if self.save:
                store.write(index, logp.cpu(), append=at > 0)
            if self.compare:
                self.totals.add_divergence(store.read(index, at, len(part)).to(device), logp)
        if self.largest > TOLERANCE:
            raise RuntimeError(f"captured logits differ from vLLM's log-probabilities by {self.largest:.4g}")

    def result(self) -> dict[str, Any]:
        """Perplexity, positions and, where compared, ``kl`` and ``top1_agreement``."""
        totals = self.totals
        values = {
            "perplexity": totals.perplexity,
            "positions": totals.positions,
            "capture_difference": self.largest,
        }
        if self.compare:
            values["kl"] = totals.kl / totals.positions
            values["top1_agreement"] = totals.agree / totals.positions
        return values


class QualityExtension:
    """Methods that vLLM adds to its worker and calls by name (``collective_rpc``); nothing is wrapped until ``begin``.

    Arguments and results are JSON, so that a server's ``/collective_rpc`` can carry them.
    """

    def begin_quality(self, folder: str, save: bool, compare: bool) -> None:
        """Wrap the model; keep the log-probabilities in ``folder`` (``save``), or compare with those kept there."""
        self._quality = Quality(Path(folder), save, compare)
        self._quality.capture.install(self.get_model())  # type: ignore[attr-defined]

    @torch.inference_mode()
    def add_quality_window(self, index: int, window: list[int], reported: list[float]) -> None:
        """See ``Quality.add``."""
        self._quality.add(index, window, reported)

    def end_quality(self) -> dict[str, Any]:
        """Unwrap the model; the result, with the dtype that the model ran in."""
        model, config = self.get_model(), self.model_config  # type: ignore[attr-defined]
        self._quality.capture.remove(model)
        return {**self._quality.result(), "dtype": str(config.dtype).removeprefix("torch.")}

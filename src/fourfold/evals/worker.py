"""One KV mode in one process: run windows through a real vLLM engine and compare its logits with the baseline's.

``python -m fourfold.evals.worker JOB.json``.  The engine runs inside this process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``), so that the logits of prompt tokens can be taken where vLLM computes them:
``prompt_logprobs`` makes the model runner call ``model.compute_logits`` on every prompt position, and that call is
wrapped.  vLLM's own ``prompt_logprobs=-1`` would turn 49,152 numbers a position into Python objects.  The
log-probability that vLLM reports for each token is compared with the captured one, so that a change in vLLM
cannot silently shift the rows.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fourfold.evals.divergence import ROWS, Store, Totals, log_probabilities
from fourfold.files import write_json

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

    def install(self, model: Any) -> str:
        """Wrap the model's method; returns the model's class name."""
        original = model.compute_logits

        def compute_logits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            logits = original(hidden_states, *args, **kwargs)
            if logits is not None and hidden_states.shape[0] > 1:
                self.rows.append(logits.detach())  # vLLM reads these logits and does not write them
            return logits

        model.compute_logits = compute_logits
        return type(model).__name__

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


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job; see ``fourfold.evals.perplexity`` for its fields."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # inside one process vLLM takes one thread for itself unless this is set
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    from vllm import LLM, SamplingParams

    windows: list[list[int]] = job["windows"]
    start = time.monotonic()
    llm = LLM(model=job["model"], **job["engine"])
    config = llm.llm_engine.vllm_config
    capture = Capture()
    names = llm.apply_model(capture.install)
    started = time.monotonic()
    totals, largest = Totals(), 0.0
    store: Store | None = None
    for index, window in enumerate(windows):
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True, detokenize=False)
        output = llm.generate([{"prompt_token_ids": window}], params, use_tqdm=False)[0]
        logits = capture.take(len(window) - 1)
        store = store or Store(Path(job["folder"]), logits.shape[-1])
        reported = torch.tensor([output.prompt_logprobs[i][window[i]].logprob for i in range(1, len(window))])
        largest = max(largest, _score(logits, window, reported, totals, store, index, job))
        print(f"WINDOW {index + 1} {totals.perplexity:.4f}", flush=True)
    if largest > TOLERANCE:
        raise RuntimeError(f"captured logits differ from vLLM's log-probabilities by {largest:.4g}")
    cache = config.cache_config
    result = {
        "perplexity": totals.perplexity,
        "positions": totals.positions,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "architecture": names[0],
        "block_size": cache.block_size,
        "num_gpu_blocks": cache.num_gpu_blocks,
        "capture_difference": largest,
        "start_s": round(started - start, 2),
        "eval_s": round(time.monotonic() - started, 2),
    }
    if job["compare"]:
        result["kl"] = totals.kl / totals.positions
        result["top1_agreement"] = totals.agree / totals.positions
    return result


def _score(
    logits: torch.Tensor,
    window: list[int],
    reported: torch.Tensor,
    totals: Totals,
    store: Store,
    index: int,
    job: dict[str, Any],
) -> float:
    """Add one window to the totals, block by block; returns the largest difference to vLLM's own numbers."""
    targets, reported = torch.tensor(window[1:], device=logits.device), reported.to(logits.device)
    largest = 0.0
    for at in range(0, len(targets), ROWS):
        logp = log_probabilities(logits[at : at + ROWS])
        part = targets[at : at + ROWS]
        totals.add_nll(logp, part)
        chosen = logp.gather(1, part[:, None])[:, 0]
        largest = max(largest, float((chosen - reported[at : at + ROWS]).abs().max()))
        if job["save"]:
            store.write(index, logp.cpu(), append=at > 0)
        if job["compare"]:
            totals.add_divergence(store.read(index, at, len(part)).to(logits.device), logp)
    return largest


def main() -> None:
    """Entry point: read a job, write its result beside it."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_grad_enabled(False)
    write_json(job["result"], run(job))


if __name__ == "__main__":
    main()

"""Quality of one engine, wherever it runs: windows go in one after the other, its worker compares their logits.

The engine must have ``capture.QualityExtension`` as its worker extension, and nothing else to do meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import httpx

from fourfold.errors import FourfoldError

EXTENSION = "fourfold.evals.capture.QualityExtension"
"""For vLLM's ``worker_extension_cls``."""
SERVER_FLAGS = ("--worker-extension-cls", EXTENSION)
SERVER_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""What a server needs so that its quality can be measured; the second opens ``/collective_rpc``."""


class Engine(Protocol):
    """A vLLM engine that holds one mode."""

    def process(self, window: list[int]) -> list[float]:
        """Run token ids through the model; vLLM's own log-probability of every token but the first."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of ``capture.QualityExtension`` in the worker."""


class ServedEngine:
    """A running server that was started with ``SERVER_FLAGS`` and ``SERVER_ENVIRONMENT``.

    Args:
        url: of the server.
        model: name that it serves.
        timeout: seconds that one window may take.
    """

    def __init__(self, url: str, model: str, timeout: float = 600.0) -> None:
        self.url, self.model, self.timeout = url.rstrip("/"), model, timeout

    def process(self, window: list[int]) -> list[float]:
        """One request with prompt log-probabilities."""
        body = {
            "model": self.model,
            "prompt": window,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,  # of the prompt's own tokens only
            "ignore_eos": True,
        }
        rows = self._post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        return [float(rows[i][str(window[i])]["logprob"]) for i in range(1, len(window))]

    def call(self, method: str, *arguments: Any) -> Any:
        """Through vLLM's ``/collective_rpc``."""
        return self._post("/collective_rpc", {"method": method, "args": list(arguments)})["results"][0]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            response = httpx.post(f"{self.url}{path}", json=body, timeout=self.timeout, trust_env=False)
        except httpx.HTTPError as error:
            raise FourfoldError("the server stopped answering", why=str(error) or type(error).__name__) from error
        if response.status_code != 200:
            raise FourfoldError(
                f"the server answered {path} with {response.status_code}",
                why=response.text[:300],
            )
        return response.json()


def measure_windows(
    engine: Engine,
    windows: list[list[int]],
    folder: Path,
    *,
    save: bool,
    compare: bool,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Perplexity over ``windows``, and KL and agreement against the baseline's log-probabilities.

    Args:
        engine: one that is idle.
        windows: token ids.
        folder: where the baseline's log-probabilities are kept; the engine reads and writes it itself.
        save: keep this engine's there.
        compare: compare with those that are there.
        progress: called with the number of windows done.

    Returns:
        See ``capture.Quality.result``; plus ``dtype``.
    """
    engine.call("begin_quality", str(folder), save, compare)
    for index, window in enumerate(windows):
        engine.call("add_quality_window", index, window, engine.process(window))
        if progress:
            progress(index + 1)
    return dict(engine.call("end_quality"))

"""Real engines on tiny random models and on SmolLM2 (the demo's model, from its PyPI package)."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fourfold.bench.models import default_model
from fourfold.config import Settings

CHILD = Path(__file__).with_name("child.py")


def llama_config(head_size: int, kv_heads: int, group: int = 2, layers: int = 1, **more: Any) -> dict[str, Any]:
    """config.json of a random Llama that vLLM can fill with dummy weights."""
    heads = kv_heads * group
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16 * heads,
        "intermediate_size": 64, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers, "head_dim": head_size, "vocab_size": 512, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32", **more,
    }  # fmt: skip


@pytest.fixture(scope="session")
def dummy_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], str]:
    """Writes a config.json into a folder of its own."""
    count = itertools.count()

    def make(config: dict[str, Any]) -> str:
        folder = tmp_path_factory.mktemp(f"dummy{next(count)}")
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return make


class Engines:
    """Runs jobs (see child.py) in a process of their own, with 4-bit pages unless ``fourfold=False``.

    ``log`` is that of the last call, or of all calls of ``together``, in their order.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._count, self.log = folder, itertools.count(), ""

    def __call__(self, jobs: list[dict[str, Any]], **how: Any) -> list[dict[str, Any]]:
        (future,) = self.together((jobs, how))
        return future.result()

    def together(self, *calls: tuple[list[dict[str, Any]], dict[str, Any]]) -> list[Future[list[dict[str, Any]]]]:
        """Several calls' processes, two at a time with one thread each.  All have ended.

        Two processes of two threads on two cores wait for each other's spinning threads, and take five times as long.
        """
        logs = [""] * len(calls)
        if len(calls) > 1:
            calls = tuple((jobs, {**how, "env": {"OMP_NUM_THREADS": "1", **how.get("env", {})}}) for jobs, how in calls)
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(self._start, logs, i, jobs, **how) for i, (jobs, how) in enumerate(calls)]
        self.log = "".join(logs)
        return futures

    def _start(
        self,
        logs: list[str],
        i: int,
        jobs: list[dict[str, Any]],
        fourfold: bool = True,
        env: dict[str, str] | None = None,
    ) -> list[dict[str, Any]]:
        path = self._folder / f"jobs{next(self._count)}.json"
        path.write_text(json.dumps(jobs))
        values = {**os.environ, "FOURFOLD": "1" if fourfold else "0", "VLLM_LOGGING_LEVEL": "INFO", **(env or {})}
        done = subprocess.run([sys.executable, str(CHILD), str(path)], env=values, capture_output=True, text=True)
        logs[i] = done.stdout + done.stderr
        if done.returncode:
            raise EngineFailed(logs[i])
        results: list[dict[str, Any]] = json.loads(path.with_suffix(".out").read_text())
        return results


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    """Starts engines."""
    return Engines(tmp_path)


class EngineFailed(Exception):
    """An engine that did not start; carries the end of its log."""

    def __init__(self, log: str) -> None:
        found = re.findall(r"FourfoldError: (.*)", log)
        self.error = found[0] if found else ""
        super().__init__(self.error or log[-3000:])


@pytest.fixture(scope="session")
def smollm2() -> str:
    """SmolLM2-135M-Instruct as safetensors, built once in the tests' cache folder."""
    return str(default_model(Settings.from_env().cache_dir))


@pytest.fixture(scope="session")
def token_ids(smollm2: str) -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return lambda text: list(tokenizer(text)["input_ids"])

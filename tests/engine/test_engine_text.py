"""In float32, text does not depend on who else is in the batch, nor on how the engine came to compute it."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from fourfold.bench.server import free_port, running_server
from fourfold.cli.serve import server_command
from fourfold.config import Settings
from fourfold.modes import MODES, environment

from .conftest import Engines
from .texts import assert_same

pytestmark = pytest.mark.engine

TOKENS = 16
TOPICS = (
    "The history of the harbour begins with", "Write a function that sorts a list.\n\n", "Water boils at",
    "Q: What is the capital of Portugal?\nA:", "Once upon a time there was a lighthouse keeper who",
)  # fmt: skip


def prompts(token_ids: Callable[[str], list[int]], count: int) -> list[list[int]]:
    """Prompts of 5 to about 400 tokens, all different."""
    filler = " In the spring the ships came back, and the town, which had slept since November, woke up at once."
    return [token_ids(f"Note {i}." + filler * (i * 7 % 17) + " " + TOPICS[i % len(TOPICS)]) for i in range(count)]


def engine(model: str, **more: Any) -> dict[str, Any]:
    base = {
        "model": model, "max_model_len": 1024, "kv_cache_memory_bytes": 192 << 20, "enable_prefix_caching": False,
        "max_num_batched_tokens": 4096, "max_num_seqs": 64, "block_size": 32,
    }  # fmt: skip
    return {**base, **more}


@pytest.mark.timeout(900)
def test_alone_and_in_batches_and_over_http(
    engines: Engines, smollm2: str, token_ids: Callable[[str], list[int]], tmp_path: Path
) -> None:
    texts = prompts(token_ids, 33)
    calls = [{"prompts": [p], "max_tokens": TOKENS, "gaps": True} for p in texts[:8]]
    calls += [{"prompts": texts[:n], "max_tokens": TOKENS, "gaps": True} for n in (2, 8, 33)]
    (result,) = engines([{"engine": engine(smollm2), "calls": calls}])
    alone, gaps = ([call[0] for call in result[name][:8]] for name in ("calls", "gaps"))
    pair, eight, all33 = result["calls"][8:]
    assert pair == alone[:2]
    assert_same(eight, alone, gaps)
    assert_same(all33[:8], alone, gaps)
    assert len({tuple(t) for t in all33}) > 10  # real answers to five kinds of prompt, not one degenerate token

    async def ask(url: str) -> list[list[int]]:
        async with httpx.AsyncClient(timeout=300) as client:

            async def one(prompt: list[int]) -> list[int]:
                body = {
                    "model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
                    "return_token_ids": True,
                }  # fmt: skip
                answer = await client.post(f"{url}/v1/completions", json=body)
                return list(answer.raise_for_status().json()["choices"][0]["token_ids"])

            return await asyncio.gather(*(one(p) for p in texts))

    port = free_port()
    flags = ["--port", str(port), "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    flags += ["--block-size", "32"]
    flags += ["--kv-cache-memory-bytes", str(192 << 20), "--served-model-name", "m", "--no-enable-prefix-caching"]
    command = server_command(smollm2, flags, sys.executable)
    settings = Settings.from_env()
    with running_server(
        command, environment(MODES["fourfold"], settings), tmp_path / "log", port=port, timeout=300
    ) as url:
        assert_same(asyncio.run(ask(url)), all33, result["gaps"][-1])
        # larger than the pool: an error for this one, and those behind it are served
        too_long = httpx.post(f"{url}/v1/completions", json={"model": "m", "prompt": [5] * 5000, "max_tokens": 4})
        assert too_long.status_code == 400
        assert_same(asyncio.run(ask(url)), all33, result["gaps"][-1])


def weak_drafter(model: str, folder: Path) -> str:
    """``model`` with noise on its weights: about half of its drafts are wrong."""
    shutil.copytree(model, folder)
    g = torch.Generator().manual_seed(0)
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        for name, w in weights.items():
            if w.dim() == 2:
                noise = torch.randn(w.shape, generator=g)
                weights[name] = (w.float() + 0.15 * w.float().std() * noise).to(w.dtype)
        save_file(weights, path, metadata={"format": "pt"})
    return str(folder)


@pytest.mark.timeout(1200)
def test_text_survives_chunks_prefixes_preemption_and_speculation(
    engines: Engines, smollm2: str, token_ids: Callable[[str], list[int]], tmp_path: Path
) -> None:
    texts = prompts(token_ids, 10)
    # answers that repeat themselves, so that n-gram drafts are sometimes right
    texts += [token_ids("one two three four one two three four one two three four one two")]
    call = {"prompts": texts, "max_tokens": 32}
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    drafter = weak_drafter(smollm2, tmp_path / "drafter")
    draft = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 2, "max_model_len": 1024}
    names = {
        "plain": engine(smollm2),
        "chunked": engine(smollm2, max_num_batched_tokens=80, max_num_seqs=16),
        "prefix": engine(smollm2, enable_prefix_caching=True),
        # 30 blocks of 32 tokens for requests that need up to 14 each
        "preempted": engine(smollm2, kv_cache_memory_bytes=6120 * 32 * 34, max_model_len=512),
        "ngram": engine(smollm2, speculative_config=ngram),
        "draft": engine(smollm2, speculative_config=draft),
    }
    # a process each for those that draft: a further one in a process cannot register vLLM's sampling kernels again
    jobs = {name: {"engine": e, "calls": [call, call]} for name, e in names.items()}
    plain = [name for name in jobs if name not in ("ngram", "draft")]
    groups = (plain, ["ngram"], ["draft"])
    done = engines.together(*(([jobs[name] for name in group], {}) for group in groups))
    results = dict(zip(jobs, (row for future in done for row in future.result()), strict=True))
    counters = {name: result["counters"] for name, result in results.items()}
    assert counters["preempted"]["num_preemptions"] > 0
    assert counters["prefix"]["prefix_cache_hits"] > 0
    for name, drafted in (("ngram", 3), ("draft", 2)):  # some drafts are right and some are wrong
        accepted, drafts = (counters[name][f"spec_decode_num_{what}"] for what in ("accepted_tokens", "drafts"))
        assert 0 < accepted < drafted * drafts, name
    expected = results["plain"]["calls"][0]
    for name, result in results.items():
        assert result["calls"] == [expected, expected], name

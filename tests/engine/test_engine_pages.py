"""What the engine allots is what PageLayout says: every head size, KV-head count and block size."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from fourfold.layout import HEAD_SIZES, PageLayout

from .conftest import Engines, llama_config

pytestmark = pytest.mark.engine

MEMORY = 4 << 20
BLOCKS = (16, 32, 48, 64, 80, 96, 112, 128)
ALL = list(itertools.product(HEAD_SIZES, (1, 2, 3, 5, 8), BLOCKS))
# every head size with every head count; block sizes go round, so that each meets several of both
SOME = [ALL[i * len(BLOCKS) + i % len(BLOCKS)] for i in range(len(ALL) // len(BLOCKS))]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shapes", [pytest.param(SOME, id="some"), pytest.param(ALL, id="all", marks=pytest.mark.slow)])
def test_allotted_pages_are_the_layouts(
    engines: Engines, dummy_model: Callable[[dict[str, Any]], str], shapes: list[tuple[int, int, int]]
) -> None:
    jobs = [
        {
            "engine": {
                "model": dummy_model(llama_config(d, heads)), "load_format": "dummy", "block_size": block,
                # whole blocks: vLLM logs how many requests of this length fit, times this length
                "max_model_len": 2 * block, "kv_cache_memory_bytes": MEMORY,
            },
            "calls": [{"prompts": [[5, 6, 7]], "max_tokens": 2}],
        }
        for d, heads, block in shapes
    ]  # fmt: skip
    half, how = len(jobs) // 2, {"env": {"FOURFOLD_CALIBRATION": "none"}}
    results = [row for done in engines.together((jobs[:half], how), (jobs[half:], how)) for row in done.result()]
    logged = [int(n.replace(",", "")) for n in re.findall(r"KV cache size: ([\d,]+) tokens", engines.log)]
    assert len(results) == len(logged) == len(shapes)
    for (d, heads, block), result, tokens in zip(shapes, results, logged, strict=True):
        layout = PageLayout(block, heads, d, d)
        assert result["block_size"] == block
        (layer,) = result["layers"]
        assert layer["dtype"] == "torch.uint8"
        assert layer["shape"] == [result["blocks"], heads, block, layout.bytes_per_token_head]
        assert layer["stride"] == [layout.page_bytes, layout.head_page_bytes, layout.bytes_per_token_head, 1]
        assert layer["bytes"] == result["blocks"] * layout.page_bytes
        assert result["blocks"] == MEMORY // layout.page_bytes
        assert tokens == result["blocks"] * block
        assert len(result["calls"][0][0]) == 2


def test_smollm2_holds_3_7_times_the_tokens(engines: Engines, smollm2: str) -> None:
    job = {"engine": {"model": smollm2, "dtype": "bfloat16", "max_model_len": 1024, "kv_cache_memory_bytes": 192 << 20}}
    done = engines.together(([job], {"env": {"FOURFOLD_CALIBRATION": "none"}}), ([job], {"fourfold": False}))
    four, dense = (future.result()[0] for future in done)
    ratio = four["blocks"] * four["block_size"] / (dense["blocks"] * dense["block_size"])
    assert ratio >= 3.7
    assert ratio == pytest.approx(PageLayout(128, 3, 64, 64).ratio(), rel=0.03)
    assert len(four["layers"]) == 30
    assert {tuple(layer["shape"][1:]) for layer in four["layers"]} == {(3, 128, 68)}


def test_blocks_larger_than_a_page_are_split(engines: Engines, dummy_model: Callable[[dict[str, Any]], str]) -> None:
    model = dummy_model(llama_config(64, 2))
    engine = {"model": model, "load_format": "dummy", "max_model_len": 128, "kv_cache_memory_bytes": MEMORY}
    call = {"prompts": [list(range(3, 103))], "max_tokens": 8}
    env = {"FOURFOLD_CALIBRATION": "none"}
    small, large = engines(
        [{"engine": {**engine, "block_size": block}, "calls": [call]} for block in (64, 256)], env=env
    )
    assert large["calls"] == small["calls"]


def test_without_the_switch_vllm_is_as_before(engines: Engines, dummy_model: Callable[[dict[str, Any]], str]) -> None:
    model = dummy_model(llama_config(64, 2))
    job = {"engine": {"model": model, "load_format": "dummy", "max_model_len": 128, "kv_cache_memory_bytes": MEMORY}}
    (result,) = engines([job], fourfold=False)
    (layer,) = result["layers"]
    assert layer["dtype"] == "torch.float32"
    assert "Fourfold" not in engines.log

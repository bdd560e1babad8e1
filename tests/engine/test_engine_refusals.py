"""The engine stops, with what, why and what to do, where 4-bit pages cannot keep their promise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import EngineFailed, Engines, llama_config

pytestmark = pytest.mark.engine

Make = Callable[[dict[str, Any]], str]
DATA_FREE = {"FOURFOLD_CALIBRATION": "none"}


def refusal(engines: Engines, model: str, env: dict[str, str] | None = None, **engine: Any) -> str:
    arguments = {"model": model, "load_format": "dummy", "max_model_len": 128, "kv_cache_memory_bytes": 4 << 20}
    with pytest.raises(EngineFailed) as caught:
        engines([{"engine": {**arguments, **engine}}], env=env or DATA_FREE)
    message = caught.value.error or str(caught.value)
    assert "What to do:" in message
    return message


def test_unsupported_head_size(engines: Engines, dummy_model: Make) -> None:
    assert "head size of 112" in refusal(engines, dummy_model(llama_config(112, 2)))


def test_quantised_cache_dtype(engines: Engines, dummy_model: Make) -> None:
    message = refusal(engines, dummy_model(llama_config(64, 2)), kv_cache_dtype="fp8")
    assert "--kv-cache-dtype fp8" in message


def test_latent_attention(engines: Engines, dummy_model: Make) -> None:
    config = llama_config(
        64, 2, architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", kv_lora_rank=512, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=2, first_k_dense_replace=1,
        moe_intermediate_size=64, num_experts_per_tok=1, n_shared_experts=1,
    )  # fmt: skip
    del config["head_dim"]
    assert "latent attention" in refusal(engines, dummy_model(config))


def test_recurrent_state(engines: Engines, dummy_model: Make) -> None:
    config = {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 1,
        "vocab_size": 512, "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "conv_kernel": 4,
        "expand": 2, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    assert "attention" in refusal(engines, dummy_model(config))


@pytest.mark.parametrize("content", [b"not a safetensors file", b""])
def test_corrupt_calibration(engines: Engines, dummy_model: Make, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "calibration.safetensors"
    file.write_bytes(content)
    message = refusal(engines, dummy_model(llama_config(64, 2)), env={"FOURFOLD_CALIBRATION": str(file)})
    assert "cannot be read" in message


def test_missing_calibration(engines: Engines, dummy_model: Make, tmp_path: Path) -> None:
    env = {"FOURFOLD_CALIBRATION": str(tmp_path / "none.safetensors")}
    assert "does not exist" in refusal(engines, dummy_model(llama_config(64, 2)), env=env)


def test_unknown_setting(engines: Engines, dummy_model: Make) -> None:
    message = refusal(engines, dummy_model(llama_config(64, 2)), env={"FOURFOLD_PREFIL": "raw"})
    assert "unknown environment variable FOURFOLD_PREFIL" in message

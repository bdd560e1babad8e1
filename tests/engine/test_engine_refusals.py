"""The engine stops, with what, why and what to do, where 4-bit pages cannot keep their promise."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from .conftest import EngineFailed, Engines, llama_config

pytestmark = pytest.mark.engine

Make = Callable[[dict[str, Any]], str]
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 2,
    "first_k_dense_replace": 1, "moe_intermediate_size": 64, "num_experts_per_tok": 1, "n_shared_experts": 1,
}  # fmt: skip
RECURRENT = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 1,
    "vocab_size": 512, "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "conv_kernel": 4,
    "expand": 2, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FINE = llama_config(64, 2)


@dataclass(frozen=True)
class Case:
    """An engine that must not start: its model's configuration, what it is given, and what its message says."""

    says: str
    config: dict[str, Any] = field(default_factory=lambda: FINE)
    engine: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=lambda: {"FOURFOLD_CALIBRATION": "none"})
    calibration: bytes | None = None


latent = {key: value for key, value in llama_config(64, 2, **LATENT).items() if key != "head_dim"}
CASES = {
    "unsupported head size": Case("head size of 112", llama_config(112, 2)),
    "quantised cache dtype": Case("--kv-cache-dtype fp8", engine={"kv_cache_dtype": "fp8"}),
    "latent attention": Case("latent attention", latent),
    "recurrent state": Case("attention", RECURRENT),
    "corrupt calibration": Case("cannot be read", calibration=b"not a safetensors file"),
    "empty calibration": Case("cannot be read", calibration=b""),
    "missing calibration": Case("does not exist", env={"FOURFOLD_CALIBRATION": "/nowhere/calibration.safetensors"}),
    "unknown setting": Case("unknown environment variable FOURFOLD_PREFIL", env={"FOURFOLD_PREFIL": "raw"}),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, dummy_model: Make) -> dict[str, Future[list[dict[str, Any]]]]:
    """Every case, tried."""
    folder = tmp_path_factory.mktemp("refusals")
    calls = []
    for name, case in CASES.items():
        env = case.env
        if case.calibration is not None:
            file = folder / f"{name}.safetensors"
            file.write_bytes(case.calibration)
            env = {"FOURFOLD_CALIBRATION": str(file)}
        arguments = {
            "model": dummy_model(case.config), "load_format": "dummy", "max_model_len": 128,
            "kv_cache_memory_bytes": 4 << 20, **case.engine,
        }  # fmt: skip
        calls.append(([{"engine": arguments}], {"env": env}))
    return dict(zip(CASES, Engines(folder).together(*calls), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_engine_stops(name: str, outcomes: dict[str, Future[list[dict[str, Any]]]]) -> None:
    with pytest.raises(EngineFailed) as caught:
        outcomes[name].result()
    message = caught.value.error or str(caught.value)
    assert "What to do:" in message
    assert CASES[name].says in message
